"""BLEU, NIST, ROUGE-L and CIDEr as the E2E challenge defines them, compared with the output of its own scripts.

    git clone https://github.com/tuetschek/e2e-metrics
    python scripts/e2e_metrics.py e2e-metrics eval.jsonl train.jsonl

Its scripts need Java and their requirements.txt. BLEU is what ``dpllm compare --tasks`` computes; the others are computed here.

Comes in: a clone, and files of rows with prompt and completion. The first reference of every prompt with two or more is the
text of one system; a second system drops words of it and shuffles some texts. Goes out: a table with a line for each system.

References:
    Dusek, Novikova and Rieser 2020, "Evaluating the state-of-the-art of end-to-end natural language generation", section 3.
"""

from __future__ import annotations

import json
import math
import random
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from functools import reduce
from operator import or_
from pathlib import Path

from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a

from dpllm.comparison.tasks import bleu, by_prompt

Tokens = list[str]

_PENALTY = math.log(0.5) / math.log(1.5) ** 2  # NIST: a text of two thirds of the references' length counts half
_BETA = 1.2  # ROUGE-L in MS-COCO: weight of recall over precision
_SIGMA = 6.0  # CIDEr in MS-COCO: width in words of the length penalty
# Words as in the Penn treebank, without punctuation: "it doesn't cost £20-25." is it, does, n't, cost, £, 20-25.
_WORDS = re.compile(r"n't\b|'(?:s|m|d|re|ve|ll)\b|[^\W_]+?(?=n't\b)|[^\W_]+(?:[-./&][^\W_]+|(?<=\d),\d+)*|[£$€%&]")


def worse(text: str, generator: random.Random) -> str:
    """Drops each word with probability 15 %, and shuffles the words of three in ten texts."""
    remaining = [word for word in text.split() if generator.random() > 0.15]
    if generator.random() < 0.3:
        generator.shuffle(remaining)
    return " ".join(remaining) or "the"


def official(clone: Path, texts: list[str], references: list[list[str]]) -> list[float]:
    """BLEU, NIST, ROUGE-L and CIDEr as the challenge's scripts print them, without their METEOR."""
    with tempfile.TemporaryDirectory() as folder:
        references_file, texts_file = Path(folder, "references.txt"), Path(folder, "texts.txt")
        references_file.write_text("\n\n".join("\n".join(row) for row in references) + "\n", encoding="utf-8")
        texts_file.write_text("\n".join(texts) + "\n", encoding="utf-8")
        command = [sys.executable, str(clone / "measure_scores.py"), "-p", str(references_file), str(texts_file)]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    scores = dict(re.findall(r"^(\w+): ([\d.]+)$", output, re.MULTILINE))
    return [float(scores[name]) for name in ("BLEU", "NIST", "ROUGE_L", "CIDEr")]


def own(texts: list[str], references: list[list[str]]) -> list[float]:
    """The same four metrics computed here, in the scripts' units."""
    rouge, likeness = rouge_l(texts, references), cider(texts, references)
    return [
        bleu(texts, references)["value"] / 100,
        nist(texts, references),
        sum(rouge) / len(rouge),
        sum(likeness) / len(likeness),
    ]


def nist(texts: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """Corpus NIST up to 5-grams: the weight of an n-gram is the information of its last word given the others.

    References:
        Doddington 2002, "Automatic evaluation of machine translation quality using n-gram co-occurrence statistics".
    """
    split = Tokenizer13a()
    written = [split(text).lower().split() for text in texts]
    answers = [[split(answer).lower().split() for answer in row] for row in references]
    reference_counts: Counter[tuple[str, ...]] = Counter()
    for row in answers:
        for answer in row:
            for n in range(6):  # n = 0 counts all words, for the weights of 1-grams
                reference_counts.update(_ngrams(answer, n))

    hits, counts, length, wanted = [0.0] * 5, [0] * 5, 0, 0.0
    for text, row in zip(written, answers, strict=True):
        length, wanted = length + len(text), wanted + sum(map(len, row)) / len(row)
        for n in range(1, 6):
            ngrams = _ngrams(text, n)
            shared = ngrams & reduce(or_, (_ngrams(answer, n) for answer in row))
            hits[n - 1] += sum(
                count * math.log2(reference_counts[gram[:-1]] / reference_counts[gram])
                for gram, count in shared.items()
            )
            counts[n - 1] += ngrams.total()
    ratio = min(1.0, length / wanted) if wanted else 0.0
    score = sum(hit / max(count, 1) for hit, count in zip(hits, counts, strict=True))
    return score * math.exp(_PENALTY * math.log(ratio) ** 2) if ratio else 0.0


def rouge_l(texts: Sequence[str], references: Sequence[Sequence[str]]) -> list[float]:
    """ROUGE-L of each text, 0..1: F-measure, with beta 1.2, of the best precision and the best recall over its references.

    References:
        Lin 2004, "ROUGE: A Package for Automatic Evaluation of Summaries"; Chen et al. 2015 (arXiv 1504.00325), 3.3.
    """
    scores = []
    for text, row in zip(texts, references, strict=True):
        text_words, answers = words(text), [words(answer) for answer in row]
        common = [_common(text_words, answer) for answer in answers]
        precision = max(common) / max(1, len(text_words))
        recall = max(length / max(1, len(answer)) for length, answer in zip(common, answers, strict=True))
        below = recall + _BETA**2 * precision
        scores.append((1 + _BETA**2) * precision * recall / below if below else 0.0)
    return scores


def cider(texts: Sequence[str], references: Sequence[Sequence[str]]) -> list[float]:
    """CIDEr of each text, 0..10: mean similarity to its references in TF-IDF weighted n-grams.

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
        text_weights, answer_weights = weighed(text, n), weighed(answer, n)
        product = sum(
            min(value, answer_weights[gram]) * answer_weights[gram]
            for gram, value in text_weights.items()
            if gram in answer_weights
        )
        return product / (math.hypot(*text_weights.values()) * math.hypot(*answer_weights.values())) if product else 0.0

    scores = []
    for text, row in zip(map(words, texts), answers, strict=True):
        near = [math.exp(-((len(text) - len(answer)) ** 2) / (2 * _SIGMA**2)) for answer in row]
        row_scores = [sum(alike(text, answer, n) for n in range(1, 5)) / 4 for answer in row]
        scores.append(10 * sum(a * b for a, b in zip(near, row_scores, strict=True)) / len(row))
    return scores


def words(text: str) -> Tokens:
    """Words in lower case, without punctuation."""
    return _WORDS.findall(text.lower().replace("\u2019", "'"))


def _ngrams(tokens: Tokens, n: int) -> Counter[tuple[str, ...]]:
    """Counts of the n-grams of a text; for n = 0, the number of words."""
    return Counter(zip(*(tokens[start:] for start in range(n)), strict=False)) if n else Counter({(): len(tokens)})


def _common(first: Tokens, second: Tokens) -> int:
    """Length of the longest common subsequence."""
    row = [0] * (len(second) + 1)
    for token in first:
        above, row = row, [0]
        for place, wanted in enumerate(second):
            row.append(above[place] + 1 if token == wanted else max(row[place], above[place + 1]))
    return row[-1]


def main(clone: Path, files: list[Path]) -> None:
    """Prints the table."""
    rows = [json.loads(line) for path in files for line in path.read_text(encoding="utf-8").splitlines()]
    answers = [row for row in by_prompt(rows, len(rows)).values() if len(row) > 1]
    generator = random.Random(0)
    systems = {"a person's": [row[0] for row in answers]}
    systems["the same with words dropped and shuffled"] = [worse(row[0], generator) for row in answers]
    references = [row[1:] for row in answers]
    print(f"{len(references)} prompts, {sum(map(len, references))} references")
    print("| text | BLEU | NIST | ROUGE-L | CIDEr |\n|---|---|---|---|---|")
    for name, texts in systems.items():
        for source, scores in (("official", official(clone, texts, references)), ("here", own(texts, references))):
            print(f"| {name}: {source} | " + " | ".join(f"{score:.4f}" for score in scores) + " |")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), list(map(Path, sys.argv[2:])))
