"""What a recipe says of its audit: what is planted, and which tests are fixed before training.

Comes in: the section ``audit`` of a recipe. Goes out: its values, and the tests that follow from how many canaries there are.
Knows neither scores nor coins.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from dpllm.privacy.plan import AuditSettings
from dpllm.recipe.section import Section


def default_ways(candidates: int) -> dict[str, list[int]]:
    """The tests of a group of so many canaries, planted or not, as ``dpllm.auditing.bounds.epsilon_lower_bound`` takes them.

    References:
        ``scripts/audit_mechanisms.py``, by whose table in docs/measurements.md they were chosen.
    """
    root = math.sqrt(candidates)
    few, near, far = round(root), round(4 * root), min(round(16 * root), candidates)
    if candidates < 64:  # near would be more than half of them, and hardly another test
        return {"falling": [far] if far else [], "falling_in": [few] if few <= candidates // 2 and few else []}
    return {"falling": [near, far], "falling_in": [few, near]}


class CanaryConfig(Section):
    """Random secrets behind carrier sentences, each inserted or not by its own fair coin."""

    kind: Literal["digits", "random_tokens", "new_tokens"] = "digits"
    """Kind of secret. digits: a number. random_tokens: ordinary tokens at random. new_tokens: one existing token per canary that
    the base model hardly expects after the carrier."""
    groups: dict[Annotated[int, Field(ge=1, le=32)], PositiveInt] = Field(
        default_factory=lambda: {1: 1000, 4: 20, 32: 20}, min_length=1
    )
    """Repetitions, 1 to 32 -> number of candidates. Every candidate occupies its slots in N, whatever its coin says."""
    digits: int = Field(default=8, ge=4, le=16)
    """With kind: digits: length of the secret; it is one of 10^digits."""
    place: Literal["target", "prompt"] = "target"
    """Where the secret stands. target: the model learns to predict it. prompt (kind: digits): at the end of a prompt, which the
    model reads and never learns to predict; every row then has the same public completion."""
    tokens: int = Field(default=6, ge=1, le=32)
    """With kind: random_tokens: length of the secret, in tokens of the base model."""
    references: int = Field(default=1000, ge=100)
    """Number of candidates that are never inserted, against which exposure is ranked (at most log2 of this number, in bits)."""

    @model_validator(mode="after")
    def _prompts_hold_digits(self) -> Self:
        if self.place == "prompt" and self.kind != "digits":
            raise ValueError(
                "place: prompt goes with kind: digits alone, since the other kinds are drawn for the place of a target. Set "
                "kind: digits, or leave place out"
            )
        return self


class AuditConfig(Section):
    """What is planted before training and measured afterwards."""

    canaries: CanaryConfig | None = None
    """null: no canary text is planted, as in a run that is published. On the command line it also sets gradient_canaries to 0,
    unless they are given too."""
    gradient_canaries: int = Field(default=0, ge=0, le=100_000)
    """Number of vectors of norm C that fair coins add to the summed gradients, with or without text canaries: the strongest test
    of sampling, clipping and noise, by an observer of every step. They leave no text in the weights. Each occupies a slot in N,
    whatever its coin says."""
    alpha: float = Field(default=0.05, gt=0, lt=0.5)
    """Probability that the epsilon lower bound exceeds the truth."""

    @property
    def plants(self) -> bool:
        """Whether there is anything to audit."""
        return self.canaries is not None or self.gradient_canaries > 0

    @property
    def texts(self) -> CanaryConfig:
        """Which canaries of text are drawn: beside gradient canaries alone, references that nothing plants."""
        return self.canaries or CanaryConfig.model_construct(groups={}, references=100)

    def fixed(self) -> AuditSettings:
        """What of the test has to be fixed before training, as plan.json commits to it."""
        ways = default_ways(self.canaries.groups.get(1, 0) if self.canaries else 0)
        return AuditSettings.checked(
            {"alpha": self.alpha, **ways, "score": "calibrated", "version": 2, "control_level": 0.001}
        )
