"""A gradient canary is one more unit: at most C in the sum, seen again in what is released, and nothing without its coin."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tiny_models as tm
import torch
from scipy import stats
from tiny_models import CPU, Toy

from dpllm.errors import Refused
from dpllm.privacy import clipping
from dpllm.privacy.engine import Engine
from dpllm.privacy.gradient_canaries import GradientCanaries
from dpllm.privacy.plan import adaptive_clipping, spacing_of

COINS = (True, False, True, True, False, True, False)
SLACK = 1e-6


def planted(promise: Any, coins: tuple[bool, ...] = COINS, net: Any = None, **arguments: Any) -> Engine:
    engine = tm.make_engine(net or tm.build("llama"), promise, **arguments)
    engine.canaries = GradientCanaries(2**100 + 3, coins, engine.size, promise.clipping, CPU)
    return engine


@pytest.mark.parametrize("clipping_function", ["flat", "automatic", "per_layer"])
@pytest.mark.parametrize("max_grad_norm", [1e-3, 0.7, 1e3])
def test_neighbours_with_and_without_one_differ_by_at_most_c(clipping_function: str, max_grad_norm: float) -> None:
    """And by C less a thousandth, or it would test less than a unit can do."""
    promise = tm.plan(max_grad_norm, 0.6, clipping=clipping_function)
    engine, some = planted(promise), tm.batches(tm.units(tm.RAGGED))
    with_all, _ = engine.clipped_sum(some, range(len(COINS)))
    for canary, coin in enumerate(COINS):
        without, _ = engine.clipped_sum(some, [other for other in range(len(COINS)) if other != canary])
        moved = float((with_all - without).norm()) / max_grad_norm
        assert moved <= 1 + SLACK
        assert moved == 0 if not coin else moved > 0.98


def test_a_canary_whose_coin_says_out_changes_no_bit() -> None:
    engine, some = planted(tm.plan(0.5, 0.6)), tm.batches(tm.units(tm.RAGGED))
    out = [canary for canary, coin in enumerate(COINS) if not coin]
    assert torch.equal(engine.clipped_sum(some, out)[0], engine.clipped_sum(some)[0])


def test_sums_with_canaries_lie_on_the_lattice() -> None:
    engine, some = planted(tm.plan(0.5, 0.6)), tm.batches(tm.units(tm.RAGGED))
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
    monkeypatch.setitem(clipping.FUNCTIONS, "flat", lambda norm, c: torch.ones_like(norm))
    engine = planted(tm.plan(0.5, 0.6))
    assert float(engine.clipped_sum([], [0])[0].norm()) / 0.5 > 900


def test_with_adaptive_clipping_they_follow_c_and_leave_the_count_alone() -> None:
    promise = tm.plan(0.5, 0.6, adaptive=adaptive_clipping(0.6, 10, 0.5, 0.2))
    engine = planted(promise)
    engine.max_grad_norm = 0.2
    flat_P, _ = engine.clipped_sum([], [0])
    assert float(flat_P[:-1].norm()) == pytest.approx(0.2, rel=1e-6)
    assert float(flat_P[-1]) == 0


def test_more_canaries_than_coordinates_are_refused() -> None:
    with pytest.raises(Refused, match=r"Set audit\.gradient_canaries to 4 or less"):
        GradientCanaries(5, (True,) * 65, 64, "flat", CPU)
