"""The audit of the mechanism knows banded noise: it calls the true engine consistent, and each way to break it falsified."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tiny_models as tm
from torch import Tensor

from dpllm.auditing.mechanism_report import MechanismReport
from dpllm.lab.mechanism import audit_mechanism
from dpllm.privacy import sampling
from dpllm.privacy.noise import BandedNoise, GaussianNoise
from dpllm.privacy.plan import Plan
from dpllm.privacy.sampling import PoissonSampler
from dpllm.recipe.config import RunConfig
from dpllm.recipe.derived import plan_of

STEPS, CANARIES, UNITS, BANDS = 60, 200, 2000, 4
Break = Callable[[pytest.MonkeyPatch], None]
JOIN, ADD = PoissonSampler.draw, BandedNoise.add_to

pytestmark = pytest.mark.usefixtures("one_thread")


def recipe() -> RunConfig:
    privacy = {"noise": "banded", "bands": BANDS, "noise_multiplier": 1.0, "epsilon": 1e4, "max_grad_norm": 0.3}
    return tm.recipe(privacy=privacy, train={"batch_size": 100, "steps": STEPS})


@pytest.fixture(scope="module")
def promise() -> Plan:
    return plan_of(recipe(), UNITS)


def audited(promise: Plan, seed: int) -> MechanismReport:
    return audit_mechanism(recipe(), plan=promise, steps=STEPS, canaries=CANARIES, pairs=2, entropy=[seed, 17])


def test_the_true_engine_is_consistent(promise: Plan, seed: int, full: bool) -> None:
    for more in range(20 if full else 3):
        report = audited(promise, seed + more)
        assert report.verdict == "consistent", report.reason
        assert report.bound.value <= report.epsilon


def fewer_groups(patch: pytest.MonkeyPatch) -> None:
    real = sampling.groups
    patch.setattr(sampling, "groups", lambda turns, size: np.minimum(real(turns, size), BANDS - 2))


def turns_of_b_minus_one(patch: pytest.MonkeyPatch) -> None:
    def draw(self: PoissonSampler) -> list[int]:
        step = self._step
        self._step = step % (BANDS - 1)
        found = JOIN(self)
        self._step = step + 1
        return found

    patch.setattr(PoissonSampler, "draw", draw)


def in_two_groups(patch: pytest.MonkeyPatch) -> None:
    """One slot in a hundred joins in another group's turn too."""

    def draw(self: PoissonSampler) -> list[int]:
        kept, self._group_N = (
            self._group_N,
            np.where(np.arange(self._num_slots) % 100 == 0, self._step % BANDS, self._group_N),
        )
        try:
            return JOIN(self)
        finally:
            self._group_N = kept

    patch.setattr(PoissonSampler, "draw", draw)


def longer_columns(patch: pytest.MonkeyPatch) -> None:
    """C of a norm of 1.07: 7% less noise."""
    real = BandedNoise.__init__

    def init(self: BandedNoise, noise: GaussianNoise, coefficients: tuple[float, ...]) -> None:
        real(self, noise, [1.07 * one for one in coefficients])

    patch.setattr(BandedNoise, "__init__", init)


def replayed(patch: pytest.MonkeyPatch) -> None:
    """A resumed run takes back noise that the attempt before has released."""
    last: list[Tensor] = []

    def add_to(self: BandedNoise, sum_P: Tensor, scale: float) -> None:
        if not self._past and last:
            self._past = [one.clone() for one in last if len(one) == len(sum_P)]
        ADD(self, sum_P, scale)
        last[:] = self._past

    patch.setattr(BandedNoise, "add_to", add_to)


def independent(patch: pytest.MonkeyPatch) -> None:
    """Noise that takes nothing back."""
    patch.setattr(BandedNoise, "add_to", lambda self, sum_P, scale: self._noise.add_to(sum_P, scale))


def fresh_noise_again(patch: pytest.MonkeyPatch) -> None:
    """Every tenth step has the fresh variates of the one before."""
    real, seen = GaussianNoise.draw, {}

    def draw(self: GaussianNoise, size: int) -> Tensor:
        count, _ = seen.get(id(self), (0, None))
        noise = real(self, size) if (count + 1) % 10 else seen[id(self)][1]
        seen[id(self)] = count + 1, noise.clone()
        return noise

    patch.setattr(GaussianNoise, "draw", draw)


@pytest.mark.parametrize(
    "change",
    [turns_of_b_minus_one, in_two_groups, longer_columns, replayed, independent, fresh_noise_again],
    ids=lambda change: change.__name__,
)
def test_a_broken_engine_is_falsified(change: Break, promise: Plan, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    change(monkeypatch)
    assert audited(promise, seed).verdict == "falsified"


def test_groups_that_are_missing_are_falsified(promise: Plan, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of b - 1, drawn as such."""
    fewer_groups(monkeypatch)
    monkeypatch.setattr("dpllm.lab.probe.groups", sampling.groups)
    assert audited(promise, seed).verdict == "falsified"
