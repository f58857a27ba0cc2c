"""Attacks that let the model write: completion, free text, personal details.

Comes in: the tuned model, its base, and the canaries. Goes out: counts for each group of repetitions, every one beside
its controls: the same canaries on the base model, and held-out canaries on the tuned one. No text leaves this module.
Which canaries are asked about follows from ids and from a public seed, never from scores or coins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from dpllm.auditing import personal, untargeted, verbatim
from dpllm.auditing.decoding import Tokens, complete, sample, until_end
from dpllm.canaries.canaries import Canary, CanaryPlan
from dpllm.canaries.encoding import encode_secret
from dpllm.text.data import Format

if TYPE_CHECKING:
    from dpllm.model.loading import ScoringModels

PERSONAL_SAMPLES = 4
"""Texts sampled behind each prompt that names a person, beside the greedy one."""
_LOGITS_PER_BATCH = 2**28  # elements
_TOKENS_PER_BATCH = 2**12  # a processor alone gets slower with larger batches, and accelerators no faster
_ROOM = 8  # tokens behind the longest secret, so that a text may come to it late

Floats = NDArray[np.float64]


@dataclass(frozen=True, repr=False)
class _Case:
    """One canary that is asked about."""

    canary: Canary
    prompt: Tokens
    target: Tokens
    prompt_text: str
    target_text: str


@dataclass(frozen=True, repr=False)
class _Answers:
    """What one model answered."""

    completions: dict[str, list[Tokens]]
    """By kind of search, of each case."""
    texts: list[Tokens]
    personal: list[list[str]]
    """Of each case; empty where canaries are no personal details."""


def generate_attacks(
    models: ScoringModels,
    plan: CanaryPlan,
    fmt: Format,
    max_length: int,
    long_examples: str,
    *,
    prompts: int = 200,
    beams: int = 8,
    samples: int = 200,
    seed: int = 0,
) -> dict[str, Any]:
    """Everything about the canaries that needs a model to write.

    Args:
        models: Tuned and base, in eval mode.
        plan: The canaries, with their coins.
        fmt: How training rows read.
        max_length: Tokens in a sequence.
        long_examples: As in training.
        prompts: At most so many inserted canaries of each group are asked about, and as many held-out ones: those with
            the smallest ids.
        beams: Of the beam search, >= 2.
        samples: Texts to sample without a prompt.
        seed: Of samples; public, and independent of the coins.

    Returns:
        Ready for JSON, counts only: ``settings``; ``completion`` and ``personal`` (None unless the canaries
        are personal details) for each group; ``untargeted`` for texts of the tuned and of the base model. Deterministic
        for one kind of device.

    Raises:
        ConfigError: A canary that training could not have learned; see ``scores.encode_secret``.
        ConfigError: A model whose scores are not finite.
    """
    tokenizer = models.tokenizer
    budget = min(_TOKENS_PER_BATCH, _LOGITS_PER_BATCH // max(1, len(tokenizer)))

    inside = _chosen(plan.canaries, prompts, inserted=True)
    outside = _chosen(plan.canaries, prompts, inserted=False)
    cases = [_case(canary, fmt, tokenizer, max_length, long_examples) for canary in (*inside, *outside)]
    begin = untargeted.start(fmt, tokenizer)
    longest = max((len(case.prompt) + len(case.target) for case in cases), default=0) + _ROOM
    num_tokens = max(1, min(longest, max_length - len(begin)))

    def ask(model: nn.Module, completed: Sequence[_Case]) -> _Answers:
        return _Answers(
            completions={
                name: _complete(model, tokenizer, completed, width) for name, width in (("greedy", 1), ("beam", beams))
            },
            texts=untargeted.write(model, tokenizer, begin, samples, num_tokens, seed),
            personal=_personal_texts(model, tokenizer, completed, max_length, seed) if plan.kind == "pii" else [],
        )

    tuned = ask(models.tuned, cases)
    own_gain = untargeted.log_prob(models.tuned, begin, tuned.texts, budget)
    with models.base() as base_model:
        base = ask(base_model, cases[: len(inside)])
        own_gain -= untargeted.log_prob(base_model, begin, tuned.texts, budget)
        base_gain = -untargeted.log_prob(base_model, begin, base.texts, budget)
    base_gain += untargeted.log_prob(models.tuned, begin, base.texts, budget)

    completion, details = {}, {}
    planted = [canary.secret for canary in plan.canaries if canary.inserted]
    for group in sorted({canary.group for canary in plan.canaries}):
        own = [index for index, case in enumerate(cases) if case.canary.group == group and case.canary.inserted]
        held_out = [
            index for index, case in enumerate(cases) if case.canary.group == group and not case.canary.inserted
        ]
        sides = {"inserted": (tuned, own), "base": (base, own), "held_out": (tuned, held_out)}
        completion[str(group)] = {
            name: {
                side: _compare(cases, answers.completions[name], chosen, tokenizer)
                for side, (answers, chosen) in sides.items()
            }
            for name in ("greedy", "beam")
        }
        if plan.kind == "pii":
            details[str(group)] = {
                side: asdict(
                    personal.count(
                        [cases[index].canary.secret for index in chosen],
                        [cases[index].prompt_text for index in chosen],
                        [answers.personal[index] for index in chosen],
                        planted,
                    )
                )
                for side, (answers, chosen) in sides.items()
            }

    def texts(answers: _Answers, gain: Floats) -> dict[str, Any]:
        written = [tokenizer.decode(text) for text in answers.texts]
        return untargeted.count(written, gain, plan.canaries, plan.references, samples)

    return {
        "settings": {
            "prompts": prompts,
            "beams": beams,
            "samples": samples,
            "sample_tokens": num_tokens,
            "seed": seed,
        },
        "completion": completion,
        "untargeted": {"tuned": texts(tuned, own_gain), "base": texts(base, base_gain)},
        "personal": details if plan.kind == "pii" else None,
    }


def _chosen(canaries: Sequence[Canary], most: int, *, inserted: bool) -> list[Canary]:
    """At most so many of each group, by id."""
    result = []
    for group in sorted({canary.group for canary in canaries}):
        own = [canary for canary in canaries if canary.group == group and canary.inserted == inserted]
        result += sorted(own, key=lambda canary: canary.canary_id)[:most]
    return result


def _case(canary: Canary, fmt: Format, tokenizer: Any, max_length: int, long_examples: str) -> _Case:
    sequence, mask = encode_secret(canary, fmt, tokenizer, max_length, long_examples)
    first = mask.index(True)
    prompt, target = sequence.input_ids[:first], sequence.input_ids[first : first + sum(mask)]
    return _Case(canary, prompt, target, tokenizer.decode(prompt), tokenizer.decode(target))


def _complete(model: nn.Module, tokenizer: Any, cases: Sequence[_Case], beams: int) -> list[Tokens]:
    """As many tokens for each case as its secret has: a beam search that looks further may end elsewhere."""
    result: list[Tokens] = [()] * len(cases)
    for length in sorted({len(case.target) for case in cases}):
        own = [index for index, case in enumerate(cases) if len(case.target) == length]
        written = complete(model, tokenizer, [cases[index].prompt for index in own], length, beams)
        for index, tokens in zip(own, written, strict=True):
            result[index] = tokens
    return result


def _personal_texts(
    model: nn.Module, tokenizer: Any, cases: Sequence[_Case], max_length: int, seed: int
) -> list[list[str]]:
    prompts = [case.prompt for case in cases]
    longest = max((len(case.target) for case in cases), default=0) + _ROOM
    length = max(1, min(longest, max_length - max(map(len, prompts), default=0)))
    greedy = complete(model, tokenizer, prompts, length)
    drawn = sample(model, tokenizer, prompts * PERSONAL_SAMPLES, length, seed=seed)
    return [
        [tokenizer.decode(until_end(tokens, tokenizer)) for tokens in (greedy[index], *drawn[index :: len(cases)])]
        for index in range(len(cases))
    ]


def _compare(
    cases: Sequence[_Case], completions: Sequence[Tokens], chosen: Sequence[int], tokenizer: Any
) -> dict[str, Any]:
    """Counts of one side. A secret that the prompt itself holds would be no extraction, so it is left out."""
    asked = [index for index in chosen if cases[index].target_text.strip() not in cases[index].prompt_text]
    matches = [
        verbatim.compare(
            completions[index],
            tokenizer.decode(completions[index]),
            cases[index].target,
            cases[index].target_text,
        )
        for index in asked
    ]
    return {
        "prompts": len(asked),
        "in_prompt": len(chosen) - len(asked),
        "exact": sum(match.exact for match in matches),
        "near_tokens": sum(match.near_tokens for match in matches),
        "near_characters": sum(match.near_characters for match in matches),
        "mean_common_share": float(np.mean([match.common_share for match in matches])) if matches else None,
    }
