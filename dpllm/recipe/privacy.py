"""The section ``privacy`` of a recipe: the promise, and where it is booked.

Comes in: values of a YAML file. Goes out: one ``PrivacyConfig``. Must not see data.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, PositiveInt, field_validator, model_validator

from dpllm.privacy.schedule import Clipping
from dpllm.recipe.section import Section, number_or_auto


class PrivacyConfig(Section):
    """The promise, and where it is booked."""

    enabled: bool = True
    """false: no differential privacy at all; only for data declared public."""
    epsilon: float = Field(default=8.0, gt=0)
    """Target epsilon; the stated epsilon is at most this."""
    delta: Literal["auto"] | float = "auto"
    """auto: 1/(10 N) rounded down to one digit. 1/N or more is refused."""
    noise_multiplier: float | None = Field(default=None, gt=0)
    """Noise standard deviation divided by max_grad_norm; null: calibrated to epsilon. If set, the resulting epsilon is stated,
    and refused above the target."""
    max_grad_norm: float = Field(default=1.0, ge=1e-20, le=1e20)
    """C: the L2 norm to which each privacy unit's gradient is clipped."""
    noise: Literal["independent", "banded"] = "independent"
    """independent: each step draws its own noise. banded: later noise cancels a part of earlier noise, and groups of units take
    turns (Choquette-Choo et al. 2023), so the same epsilon leaves less noise in the weights. Each step's noise is then larger:
    `dpllm plan` says by how much, and how far to raise train.learning_rate for adamw."""
    bands: Literal["auto"] | PositiveInt = "auto"
    """With noise: banded, the number of bands, which is also the number of groups that take turns. auto: the number that leaves
    the least noise in the last weights, or 1 (independent noise) where the gain is below 5%."""
    clipping: Clipping = "flat"
    """The clipping function, part of the Plan; docs/concepts/engine.md describes each."""
    ledger: str | None = None
    """Path of the ledger, or a postgresql:// URL; null: one file in the user's data directory."""
    dataset: str | None = None
    """Name of the dataset in the ledger; null: the name under which it already knows these records, or one made from
    data.train."""
    derived_from: str | None = None
    """Name of the ledger's dataset of which data.train is a subset, an extended or a re-tokenised copy; that dataset is
    charged."""
    fit_budget: bool = False
    """true: where the dataset's budget has no room for epsilon, lower it to the largest that fits, and say so; false: refuse."""
    final: bool = False
    """true: the first and last reservation on the dataset, admitted by its exact epsilon: no other run can follow. `--final` sets
    it. Only so can a budget admit `data.sampling: example`."""
    secure_noise: bool = False
    """true: noise comes from AES, a cryptographic generator on the CPU, also when a GPU trains. Slower; meant for adapters."""
    insecure_seed: int | None = Field(default=None, ge=0, lt=2**128)
    """For tests only: seeds noise and sampling, so that the run says guarantee: false; refused on data with a budget."""

    @field_validator("delta")
    @classmethod
    def _delta(cls, value: str | float) -> str | float:
        if isinstance(value, float) and not 0 < value < 1:
            raise ValueError("delta must lie strictly between 0 and 1, and well below 1/N; or type auto")
        return value

    _bands = field_validator("bands", mode="wrap")(number_or_auto("steps"))

    @model_validator(mode="after")
    def _banded(self) -> Self:
        if self.noise == "independent" and self.bands != "auto":
            raise ValueError("privacy.bands needs banded noise; set privacy.noise: banded, or leave privacy.bands out")
        return self

    @model_validator(mode="after")
    def _final(self) -> Self:
        if self.fit_budget and self.final:
            raise ValueError(
                "privacy.fit_budget fits a run beside others, and none can follow one that is final; leave privacy.fit_budget "
                "out, and set privacy.epsilon to that of the budget or less"
            )
        return self
