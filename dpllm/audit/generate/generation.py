"""Attacks that let the model write, or ask it to choose: completion, choice of a secret, free text, personal details.

Comes in: the tuned model, its base, and the canaries. Goes out: counts for each group of repetitions, every one beside
its controls: the same canaries on the base model, and held-out canaries on the tuned one. No text leaves this module.
Which canaries are asked about follows from ids and from a public seed, never from scores or coins.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from dpllm.audit.canaries import Canary, CanaryPlan
from dpllm.audit.generate import choice, personal, untargeted, verbatim
from dpllm.audit.generate.decoding import Tokens, complete, sample, until_end
from dpllm.audit.scores import encode_secret
from dpllm.data import Format
from dpllm.errors import ConfigError

if TYPE_CHECKING:
    from dpllm.model import ScoringModels

# A legend of shapes: M canaries that are asked about, K secrets to choose from.

PERSONAL_SAMPLES = 4
"""Texts sampled behind each prompt that names a person, beside the greedy one."""
_LOGITS_PER_BATCH = 2**28  # elements
_TOKENS_PER_BATCH = (
    2**12
)  # a processor without an accelerator gets slower with larger batches, and the others no faster
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
    choices: tuple[choice.Option, ...]
    """Its own secret and others behind its carrier, encoded, with the tokens to score; empty: too few fit."""


@dataclass(frozen=True, repr=False)
class _Answers:
    """What one model answered."""

    completions: dict[str, list[Tokens]]
    """By kind of search, of each case."""
    choice_log_prob: list[Floats]
    """Of each case, log p of each choice; of the own secret first."""
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
    choices: int = 10,
    seed: int = 0,
) -> dict[str, Any]:
    """Everything about the canaries that needs a model to write or to choose.

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
        choices: K: the own secret and K - 1 of references.
        seed: Of samples and of choices; public, and independent of the coins.

    Returns:
        Ready for JSON, counts only: ``settings``; ``completion``, ``choice`` and ``personal`` (None unless the canaries
        are personal details) for each group; ``untargeted`` for texts of the tuned and of the base model. Deterministic
        for one kind of device.

    Raises:
        ConfigError: A canary that training could not have learned; see ``scores.encode_secret``.
        ConfigError: A model whose scores are not finite.
    """
    tokenizer = models.tokenizer
    budget = min(_TOKENS_PER_BATCH, _LOGITS_PER_BATCH // max(1, len(tokenizer)))

    def encoded(canary: Canary) -> choice.Option:
        return encode_secret(canary, fmt, tokenizer, max_length, long_examples)

    inside = _chosen(plan.canaries, prompts, inserted=True)
    outside = _chosen(plan.canaries, prompts, inserted=False)
    pools = _pools(plan.references)
    cases = [_case(canary, pools, encoded, tokenizer, choices, seed) for canary in (*inside, *outside)]
    begin = untargeted.start(fmt, tokenizer)
    longest = max((len(case.prompt) + len(case.target) for case in cases), default=0) + _ROOM
    num_tokens = max(1, min(longest, max_length - len(begin)))

    def ask(model: nn.Module, completed: Sequence[_Case]) -> _Answers:
        return _Answers(
            completions={
                name: _complete(model, tokenizer, completed, width) for name, width in (("greedy", 1), ("beam", beams))
            },
            choice_log_prob=choice.log_prob(model, [case.choices for case in cases], budget),
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

    completion, choices_made, details = {}, {}, {}
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
        choices_made[str(group)] = _choices(tuned, base, own, held_out)
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
            "choices": choices,
            "seed": seed,
        },
        "completion": completion,
        "choice": choices_made,
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


def _pools(references: Sequence[Canary]) -> dict[personal.Kind | None, list[str]]:
    """Secrets of references, in the order of their ids, by what kind of personal detail they are."""
    pools: dict[personal.Kind | None, list[str]] = {}
    for one in sorted(references, key=lambda one: one.canary_id):
        pools.setdefault(personal.kind_of(one.secret), []).append(one.secret)
    return pools


def _case(
    canary: Canary,
    pools: dict[personal.Kind | None, list[str]],
    encoded: Callable[[Canary], choice.Option],
    tokenizer: Any,
    choices: int,
    seed: int,
) -> _Case:
    sequence, mask = encoded(canary)
    ids = sequence.input_ids
    first = mask.index(True)
    target = ids[first : first + sum(mask)]
    # A phone number is told from an address by any model, so a secret stands among its like where there are enough.
    pool = list(pools.get(personal.kind_of(canary.secret), []))
    if len(pool) < choices - 1:
        pool = [secret for own in pools.values() for secret in own]
    random.Random(f"{seed}/{canary.canary_id}").shuffle(pool)
    options = [(sequence, mask)]
    for other in pool:
        if len(options) == choices:
            break
        try:
            options.append(encoded(replace(canary, secret=other)))
        except ConfigError:
            continue  # too long behind this carrier, so it could not have been trained on there
    return _Case(
        canary=canary,
        prompt=ids[:first],
        target=target,
        prompt_text=tokenizer.decode(ids[:first]),
        target_text=tokenizer.decode(target),
        choices=tuple(options) if len(options) == choices else (),
    )


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


def _choices(tuned: _Answers, base: _Answers, own: Sequence[int], held_out: Sequence[int]) -> dict[str, Any]:
    """Whether the own secret is the likeliest of K: by how much training raised it, and, as a control, by the base alone."""

    def gain(index: int) -> Floats:
        return tuned.choice_log_prob[index] - base.choice_log_prob[index]

    def before(index: int) -> Floats:
        return base.choice_log_prob[index]

    return {
        "inserted": choice.accuracy([gain(index) for index in own]),
        "base": choice.accuracy([before(index) for index in own]),
        "held_out": choice.accuracy([gain(index) for index in held_out]),
    }
