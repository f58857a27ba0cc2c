"""A gradient canary is one more unit: at most C in the sum, seen again in what is released, and nothing without its coin."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tiny_models as tm
import torch
from mutants import Change, around, drawn
from scipy import stats
from tiny_models import CPU, Toy

from dpllm.auditing.gradient import examine, tabulate
from dpllm.errors import Refused
from dpllm.privacy import accounting, clipping, events
from dpllm.privacy.engine import StepEngine
from dpllm.privacy.gradient_canaries import GradientCanaries
from dpllm.privacy.noise import GaussianNoise, spacing_of
from dpllm.privacy.packing import passes_of
from dpllm.privacy.sampling import PoissonSampler

COINS = (True, False, True, True, False, True, False)
SLACK = 1e-6


def planted(promise: Any, coins: tuple[bool, ...] = COINS, net: Any = None, **arguments: Any) -> StepEngine:
    engine = tm.make_engine(net or tm.build("llama"), promise, **arguments)
    engine.canaries = GradientCanaries(2**100 + 3, coins, engine.size, promise.clipping, CPU)
    return engine


@pytest.mark.parametrize("clipping_function", ["flat", "automatic"])
@pytest.mark.parametrize("max_grad_norm", [1e-6, 0.7, 1e3])
def test_neighbours_with_and_without_one_differ_by_at_most_c(clipping_function: str, max_grad_norm: float) -> None:
    """And by C less a thousandth, or it would test less than a unit can do."""
    promise = tm.plan(max_grad_norm, 0.6, clipping=clipping_function)
    engine = planted(promise)
    some = tm.batches(tm.units(tm.RAGGED), engine)
    with_all, _ = engine.clipped_sum(some, range(len(COINS)))
    for canary, coin in enumerate(COINS):
        without, _ = engine.clipped_sum(some, [other for other in range(len(COINS)) if other != canary])
        moved = float((with_all - without).norm()) / max_grad_norm
        assert moved <= 1 + SLACK
        assert moved == 0 if not coin else moved > 0.98


def test_a_canary_whose_coin_says_out_changes_no_bit() -> None:
    engine = planted(tm.plan(0.5, 0.6))
    some = tm.batches(tm.units(tm.RAGGED), engine)
    out = [canary for canary, coin in enumerate(COINS) if not coin]
    assert torch.equal(engine.clipped_sum(some, out)[0], engine.clipped_sum(some)[0])


def test_sums_with_canaries_lie_on_the_lattice() -> None:
    engine = planted(tm.plan(0.5, 0.6))
    some = tm.batches(tm.units(tm.RAGGED), engine)
    flat_P, _ = engine.clipped_sum(some, [0, 2])
    whole_P = flat_P / spacing_of(engine.lattice()["noise_over_max_grad_norm"] * 0.5)
    assert torch.equal(whole_P, whole_P.round())


def test_each_is_seen_along_its_own_vector_and_nowhere_else() -> None:
    engine = planted(tm.plan(0.5, 0.6))
    flat_P, _ = engine.clipped_sum([], [0, 3])
    assert engine.canaries is not None
    seen = engine.canaries.project(flat_P) / 0.5
    torch.testing.assert_close(seen, torch.tensor([1.0, 0, 0, 1, 0, 0, 0], dtype=torch.float64), rtol=1e-6, atol=1e-9)


def test_what_a_step_shows_of_them_is_the_noise_of_the_plan_and_c_for_who_was_drawn() -> None:
    engine = planted(tm.plan(0.5, 0.6), net=Toy(bias=True), noise_entropy=2**90)
    seen_TM = []
    for _ in range(400):
        engine.step([], [2])
        assert engine.projections is not None
        seen_TM.append(engine.projections.numpy())
    noise_TM = (np.array(seen_TM) - np.array([0, 0, 1, 0, 0, 0, 0])) / engine.lattice()["noise_over_max_grad_norm"]
    assert stats.kstest(noise_TM.ravel(), "norm").pvalue > 1e-3


def test_a_step_that_does_not_clip_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    no_clipping(monkeypatch)
    engine = planted(tm.plan(0.5, 0.6))
    assert float(engine.clipped_sum([], [0])[0].norm()) / 0.5 > 900


def test_more_canaries_than_coordinates_are_refused() -> None:
    with pytest.raises(Refused, match=r"Set audit\.gradient_canaries to 4 or less"):
        GradientCanaries(5, (True,) * 65, 64, "flat", CPU)


# --- whole runs of the engine, broken on purpose -------------------------------------------------------------------------

ROWS, CANARIES, STEPS, SIGMA = 40, 1000, 30, 0.6


def the_same_noise_again(patch: pytest.MonkeyPatch) -> None:
    first: dict[tuple[int, int], Any] = {}
    again = around(GaussianNoise, "draw", lambda draw, self, n: first.setdefault((id(self), n), draw(self, n)))
    again(patch)


def no_clipping(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(clipping.FUNCTIONS, "flat", lambda norm, c: torch.ones_like(norm))


MUTANTS: dict[str, Change] = {
    "half the noise": drawn(lambda noise: noise / 2),
    "the same noise again": the_same_noise_again,
    "twice the rate": around(PoissonSampler, "draw", lambda draw, self: sorted({*draw(self), *draw(self)})),
    "no clipping": no_clipping,
}


def falsified(seed: int) -> bool:
    """Whether a run of the engine on rows and gradient canaries contradicts its Plan."""
    generator = np.random.default_rng([seed, 3])
    coins = tuple((generator.random(CANARIES) < 0.5).tolist())
    slots = [*tm.units([(8,)] * ROWS, seed), *[None] * CANARIES]
    promise = tm.plan(0.05, SIGMA, tm.schedule(len(slots), 64, STEPS))
    engine = planted(promise, coins, tm.build("llama", tm.FROZEN), noise_entropy=seed + 2**80)
    sampler = PoissonSampler(promise.schedule, len(slots), entropy=seed)
    seen_TM = []
    for _ in range(STEPS):
        drawn = sampler.draw()
        engine.step(passes_of(drawn, slots, engine.packing, 0), [slot - ROWS for slot in drawn if slot >= ROWS])
        assert engine.projections is not None
        seen_TM.append(engine.projections.numpy())
    noise = engine.lattice()["noise_over_max_grad_norm"]
    table = tabulate(seen_TM, coins, promise.schedule.sampling_rate, noise)
    result = examine(table, delta=1e-5, alpha=0.05)
    return result.noise_refuted or result.drawn_refuted or result.epsilon_lower_bound > EPSILON


EPSILON = accounting.epsilon(events.dp_sgd_event(64 / (ROWS + CANARIES), SIGMA, STEPS), 1e-5, "zero_out")


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_broken_engine_is_falsified_in_nine_of_ten_runs(mutant, full, monkeypatch):
    MUTANTS[mutant](monkeypatch)
    runs = 10 if full else 3
    assert sum(map(falsified, range(runs))) >= runs - 1


def test_the_engine_as_it_is_is_falsified_in_at_most_one_of_twenty(full: bool) -> None:
    assert sum(map(falsified, range(20 if full else 6))) <= 1
