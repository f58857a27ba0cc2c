"""Attribute inference: whether a model knows a secret among others behind the same sentence.

Comes in: a model and, for each canary, its own secret and others in its place. Goes out: log-probabilities of all of
them, and how often the own one stands out. Knows no coins.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats
from torch import nn
from transformers import DynamicCache

from dpllm.audit.scores import score
from dpllm.data import TokenSequence

# A legend of shapes: B canaries of a batch, R rows of it (K for each canary), T tokens, V vocabulary, K secrets.

Floats = NDArray[np.float64]
Option = tuple[TokenSequence, tuple[bool, ...]]
"""One secret behind the sentence, encoded, and which tokens are the secret's."""

CONFIDENCE = 0.95
"""Of the interval."""


def log_prob(model: nn.Module, choices: Sequence[Sequence[Option]], token_budget: int) -> list[Floats]:
    """Log-probability of every secret, summed over its tokens, in nats.

    The tokens that all options of a canary begin with are read once, where the model's memory is a cache of keys and
    values.

    Args:
        model: In eval mode.
        choices: Of each canary its options, equally many or none.
        token_budget: Padded tokens in one batch; one canary's options are always together.

    Returns:
        For each canary one value for each option, in order.
    """
    result: list[Floats] = [np.zeros(0)] * len(choices)
    groups: dict[int, list[int]] = {}
    for index, options in enumerate(choices):
        if options:
            groups.setdefault(_shared(options), []).append(index)
    with torch.inference_mode():
        for shared, rows in sorted(groups.items()):
            while rows:
                width = max(len(sequence.input_ids) for sequence, _ in choices[rows[0]])
                size = max(1, token_budget // (width * len(choices[rows[0]])))
                batch, rows = rows[:size], rows[size:]
                own = [choices[index] for index in batch]
                found = _read_once(model, own, shared) if shared > 0 else None
                for index, values in zip(batch, found or _read_all(model, own, token_budget), strict=True):
                    result[index] = values
    return result


def accuracy(scores: Sequence[Floats]) -> dict[str, Any]:
    """How often the first of K secrets scores higher than all others.

    Args:
        scores: Of each canary K values, the own secret's first; canaries without any are left out.

    Returns:
        ``asked``, ``right`` (a tie counts as wrong), ``accuracy`` with Clopper and Pearson's ``interval``, and
        ``chance``, 1 / K; the last three are None where nobody was asked.
    """
    asked = [one for one in scores if len(one)]
    right = sum(bool((one[0] > one[1:]).all()) for one in asked)
    result: dict[str, Any] = {"asked": len(asked), "right": right, "accuracy": None, "interval": None, "chance": None}
    if asked:
        interval = stats.binomtest(right, len(asked)).proportion_ci(CONFIDENCE, method="exact")
        result |= {
            "accuracy": right / len(asked),
            "interval": [float(interval.low), float(interval.high)],
            "chance": 1 / len(asked[0]),
        }
    return result


def _shared(options: Sequence[Option]) -> int:
    """How many tokens can be read once: the common ones, without the last, which predicts what comes first."""
    first = min(mask.index(True) for _, mask in options)
    while any(sequence.input_ids[:first] != options[0][0].input_ids[:first] for sequence, _ in options):
        first -= 1
    return first - 1


def _read_once(model: Any, choices: Sequence[Sequence[Option]], shared: int) -> list[Floats] | None:
    """The common beginning for each canary, then the rest for each option; None: the model's memory is another."""
    device = next(model.parameters()).device
    num_options = len(choices[0])
    begin_BT = torch.tensor([options[0][0].input_ids[:shared] for options in choices], device=device)
    cache: Any = getattr(model(input_ids=begin_BT, use_cache=True), "past_key_values", None)
    if type(cache) is not DynamicCache:
        return None
    cache.batch_repeat_interleave(num_options)

    rests = [_rest(option, shared) for options in choices for option in options]
    width = max(len(ids) for ids, _ in rests)
    ids_RT = torch.zeros(len(rests), width, dtype=torch.long)
    scored_RT = torch.zeros(len(rests), width)
    seen_RT = torch.zeros(len(rests), shared + width, dtype=torch.long)
    for row, (ids, mask) in enumerate(rests):
        ids_RT[row, : len(ids)] = torch.tensor(ids)
        scored_RT[row, : len(ids)] = torch.tensor(mask, dtype=torch.float32)
        seen_RT[row, : shared + len(ids)] = 1
    ids_RT = ids_RT.to(device)
    logits_RTV = (
        model(input_ids=ids_RT, attention_mask=seen_RT.to(device), past_key_values=cache).logits[:, :-1].float()
    )
    chosen_RT = logits_RTV.gather(2, ids_RT[:, 1:, None])[..., 0] - logits_RTV.logsumexp(dim=-1)
    sums = (chosen_RT.cpu() * scored_RT[:, 1:]).double().sum(dim=1).numpy().reshape(len(choices), num_options)
    return list(sums)


def _rest(option: Option, shared: int) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    """What follows the common beginning, up to the secret's last token."""
    sequence, mask = option
    end = len(mask) - mask[::-1].index(True)
    return sequence.input_ids[shared:end], mask[shared:end]


def _read_all(model: nn.Module, choices: Sequence[Sequence[Option]], token_budget: int) -> list[Floats]:
    options = [option for options in choices for option in options]
    scored = iter(score(model, [sequence for sequence, _ in options], [mask for _, mask in options], token_budget))
    return [np.array([next(scored).log_prob.sum() for _ in own]) for own in choices]
