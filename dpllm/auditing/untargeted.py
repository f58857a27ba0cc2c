"""Untargeted extraction: what a model writes unasked, ranked by how much training made it likelier.

Comes in: models and canaries. Goes out: counts of the canaries' secrets among sampled texts. No prompt knows anything of
the canaries, so this is what an attacker without any knowledge of the training data sees.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from dpllm.auditing.decoding import Tokens, sample, until_end
from dpllm.auditing.scores import score
from dpllm.canaries import kinds
from dpllm.canaries.canaries import Canary
from dpllm.text.data import Format, TokenSequence, encode

# A legend of shapes: D distinct texts.

TOP_SHARE = 0.1
"""An attacker who reads only the highest ranked texts reads this share of them."""
_NO_LIMIT = 2**20  # tokens; nothing is cut


def start(fmt: Format, tokenizer: Any) -> Tokens:
    """How every training row of a format begins: what two rows without a common word share, or else one token.

    That token is the beginning of a text, or the end of the one before, or a new line, whichever the tokenizer has.
    """
    first, second = (
        encode(kinds.example(word, word, fmt), fmt, tokenizer, _NO_LIMIT, "truncate")[0].input_ids
        for word in ("0", "A")
    )
    shared = 0
    while shared < min(len(first), len(second)) and first[shared] == second[shared]:
        shared += 1
    if shared:
        return first[:shared]
    for special in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        if special is not None:
            return (special,)
    return tuple(tokenizer("\n", add_special_tokens=False)["input_ids"])


def write(model: nn.Module, tokenizer: Any, begin: Tokens, num_texts: int, num_tokens: int, seed: int) -> list[Tokens]:
    """Samples texts, each up to its end token; the empty ones and what is written twice are dropped, in order."""
    written = sample(model, tokenizer, [begin] * num_texts, num_tokens, seed=seed)
    texts = (until_end(text, tokenizer) for text in written)
    return list(dict.fromkeys(text for text in texts if text))


def log_prob(model: nn.Module, begin: Tokens, texts: Sequence[Tokens], token_budget: int) -> NDArray[np.float64]:
    """Shape (D,): log p of each text behind the beginning, in nats."""
    sequences = [
        TokenSequence((*begin, *text), (*(False for _ in begin), *(True for _ in text)), len(text)) for text in texts
    ]
    scored = score(model, sequences, [sequence.loss_mask for sequence in sequences], token_budget)
    return np.array([one.log_prob.sum() for one in scored], dtype=np.float64)


def count(
    texts: Sequence[str],
    gain_D: NDArray[np.float64],
    canaries: Sequence[Canary],
    references: Sequence[Canary],
    num_samples: int,
) -> dict[str, Any]:
    """Counts secrets that stand in the texts, in all of them and in the highest ranked.

    Args:
        texts: D distinct ones.
        gain_D: log p_tuned - log p_base of each.
        canaries: All candidates.
        references: All references, as a control.
        num_samples: How many were drawn.

    Returns:
        ``samples``, ``distinct``, ``top`` (how many texts the highest ranked are), ``groups``, each with ``inserted`` and
        ``held_out``, and ``references``; of each side how many ``secrets`` there are, how many are ``found``, and how
        many ``found_in_top``.
    """
    top = math.ceil(TOP_SHARE * len(texts))
    ranked = [texts[index] for index in np.argsort(-gain_D, kind="stable")]

    def side(own: Sequence[Canary]) -> dict[str, int]:
        found = [next((place for place, text in enumerate(ranked) if one.secret in text), None) for one in own]
        places = [place for place in found if place is not None]
        return {
            "secrets": len(own),
            "found": len(places),
            "found_in_top": sum(place < top for place in places),
        }

    groups = {
        str(group): {
            "inserted": side([one for one in canaries if one.group == group and one.inserted]),
            "held_out": side([one for one in canaries if one.group == group and not one.inserted]),
        }
        for group in sorted({one.group for one in canaries})
    }
    return {
        "samples": num_samples,
        "distinct": len(texts),
        "top": top,
        "groups": groups,
        "references": side(references),
    }
