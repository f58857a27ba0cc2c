"""BLEU, NIST, ROUGE-L and CIDEr of texts, each against all references of its prompt, as the E2E challenge defines them.

Comes in: texts, and for each its references, one or more. Goes out: figures. The challenge's own scripts are Perl and Java; what
differs here is in docs/comparing.md. Must know no model and no file.

References:
    Dusek, Novikova and Rieser 2020, "Evaluating the state-of-the-art of end-to-end natural language generation", section 3.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from functools import reduce
from itertools import zip_longest
from operator import or_
from typing import Any

import numpy as np

Json = dict[str, Any]
Tokens = list[str]

RESAMPLES = 1000
_PENALTY = math.log(0.5) / math.log(1.5) ** 2  # of NIST: a text of two thirds of the length counts half
_BETA = 1.2  # of ROUGE-L in MS-COCO: how much more recall counts than precision
_SIGMA = 6.0  # of CIDEr in MS-COCO: words, of the penalty for a difference in length
# What the Penn treebank counts as words, without punctuation: "it doesn't cost £20-25." is it, does, n't, cost, £, 20-25.
_WORDS = re.compile(r"n't\b|'(?:s|m|d|re|ve|ll)\b|[^\W_]+?(?=n't\b)|[^\W_]+(?:[-./&][^\W_]+|(?<=\d),\d+)*|[£$€%&]")


def bleu(texts: Sequence[str], references: Sequence[Sequence[str]]) -> Json:
    """Corpus BLEU, without regard to case and without smoothing.

    Returns:
        ``value`` in 0..100, a 95 % ``interval`` by sacrebleu's bootstrap over texts (None for one text), and its ``signature``.

    References:
        Papineni et al. 2002; Post 2018, "A Call for Clarity in Reporting BLEU Scores"; Koehn 2004 for the bootstrap.
    """
    from sacrebleu.metrics import BLEU  # type: ignore[import-not-found,unused-ignore]

    streams = [list(stream) for stream in zip_longest(*references)]
    metric = BLEU(lowercase=True, tokenize="13a", smooth_method="none")
    whole = metric.corpus_score(list(texts), streams)
    limits = None
    if len(texts) > 1:
        drawn = metric.corpus_score(list(texts), streams, n_bootstrap=RESAMPLES)
        limits = [min(100.0, max(0.0, drawn._mean - drawn._ci)), min(100.0, drawn._mean + drawn._ci)]
    return {"value": min(100.0, whole.score), "interval": limits, "signature": str(metric.get_signature())}


def nist(texts: Sequence[str], references: Sequence[Sequence[str]]) -> Json:
    """Corpus NIST of up to five words: an n-gram counts by how rare its last word is behind the others in the references.

    Returns:
        ``value`` >= 0, and a 95 % ``interval`` by bootstrap over texts (None for one text).

    References:
        Doddington 2002, "Automatic evaluation of machine translation quality using n-gram co-occurrence statistics".
    """
    from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a  # type: ignore[import-not-found,unused-ignore]

    split = Tokenizer13a()
    written = [split(text).lower().split() for text in texts]
    answers = [[split(answer).lower().split() for answer in row] for row in references]
    known: Counter[tuple[str, ...]] = Counter()
    for row in answers:
        for answer in row:
            for n in range(6):  # of no words: one for each word, behind which it stands
                known.update(_ngrams(answer, n))

    def found(text: Tokens, row: list[Tokens]) -> list[float]:
        """Information and number of its n-grams of each length, words, words of a reference on average."""
        hits, counts = [], []
        for n in range(1, 6):
            own = _ngrams(text, n)
            shared = own & reduce(or_, (_ngrams(answer, n) for answer in row))
            hits.append(sum(count * math.log2(known[gram[:-1]] / known[gram]) for gram, count in shared.items()))
            counts.append(float(own.total()))
        return [*hits, *counts, float(len(text)), sum(map(len, row)) / len(row)]

    def score(sums: np.ndarray) -> float:
        hits, counts, (words, wanted) = sums[:5], sums[5:10], sums[10:]
        ratio = min(1.0, words / wanted) if wanted else 0.0
        return float((hits / np.maximum(counts, 1)).sum() * math.exp(_PENALTY * math.log(ratio) ** 2)) if ratio else 0.0

    parts_EP = np.array([found(text, row) for text, row in zip(written, answers, strict=True)])  # E texts, P parts
    limits = None
    if len(texts) > 1:
        draws = np.random.default_rng(0).integers(0, len(texts), size=(RESAMPLES, len(texts)))
        limits = [
            float(end) for end in np.quantile([score(parts_EP[drawn].sum(axis=0)) for drawn in draws], [0.025, 0.975])
        ]
    return {"value": score(parts_EP.sum(axis=0)), "interval": limits}


def rouge_l(texts: Sequence[str], references: Sequence[Sequence[str]]) -> list[float]:
    """ROUGE-L of each text, 0..1: the best precision and the best recall over its references, recall weighed by 1.2.

    References:
        Lin 2004, "ROUGE: A Package for Automatic Evaluation of Summaries"; Chen et al. 2015 (arXiv 1504.00325), 3.3.
    """
    scores = []
    for text, row in zip(texts, references, strict=True):
        own, answers = words(text), [words(answer) for answer in row]
        common = [_common(own, answer) for answer in answers]
        precision = max(common) / max(1, len(own))
        recall = max(length / max(1, len(answer)) for length, answer in zip(common, answers, strict=True))
        below = recall + _BETA**2 * precision
        scores.append((1 + _BETA**2) * precision * recall / below if below else 0.0)
    return scores


def cider(texts: Sequence[str], references: Sequence[Sequence[str]]) -> list[float]:
    """CIDEr of each text, 0..10: likeness to each reference in n-grams that the references of few other prompts have.

    References:
        Vedantam et al. 2015, "CIDEr: Consensus-based Image Description Evaluation", with clipping and the penalty for length of
        its section 7 (CIDEr-D), which MS-COCO's scripts compute.
    """
    answers = [[words(answer) for answer in row] for row in references]
    among: Counter[tuple[str, ...]] = Counter()  # prompts
    for row in answers:
        among.update({gram for answer in row for n in range(1, 5) for gram in _ngrams(answer, n)})

    def weighed(tokens: Tokens, n: int) -> dict[tuple[str, ...], float]:
        return {gram: count * math.log(len(texts) / max(1, among[gram])) for gram, count in _ngrams(tokens, n).items()}

    def alike(text: Tokens, answer: Tokens, n: int) -> float:
        own, other = weighed(text, n), weighed(answer, n)
        product = sum(min(value, other[gram]) * other[gram] for gram, value in own.items() if gram in other)
        return product / (math.hypot(*own.values()) * math.hypot(*other.values())) if product else 0.0

    scores = []
    for text, row in zip(map(words, texts), answers, strict=True):
        near = [math.exp(-((len(text) - len(answer)) ** 2) / (2 * _SIGMA**2)) for answer in row]
        each = [sum(alike(text, answer, n) for n in range(1, 5)) / 4 for answer in row]
        scores.append(10 * sum(a * b for a, b in zip(near, each, strict=True)) / len(row))
    return scores


def words(text: str) -> Tokens:
    """Words in lower case, without punctuation."""
    return _WORDS.findall(text.lower().replace("\u2019", "'"))


def _ngrams(tokens: Tokens, n: int) -> Counter[tuple[str, ...]]:
    """How often each stands in a text; of no words at all, as often as there are words."""
    return Counter(zip(*(tokens[start:] for start in range(n)), strict=False)) if n else Counter({(): len(tokens)})


def _common(one: Tokens, other: Tokens) -> int:
    """Length of the longest common subsequence."""
    row = [0] * (len(other) + 1)
    for token in one:
        above, row = row, [0]
        for place, wanted in enumerate(other):
            row.append(above[place] + 1 if token == wanted else max(row[place], above[place + 1]))
    return row[-1]
