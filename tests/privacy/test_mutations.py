"""Each guarantee is broken on purpose, and the check that the other tests use must see it.

A row of ``MUTATIONS`` is what breaks, how, and the check of tests/checks.py that fails on it. Every check is also run on
the unbroken engine here, so that none of them fails by itself.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import checks
import mutants
import numpy as np
import pytest
import tiny_models as tm
import torch
from cases import HEAD, TIED
from tiny_models import FROZEN, LORA, Toy
from torch import Tensor, nn

from dpllm.privacy import clipping, engine, gradients, guards, rules, selfcheck
from dpllm.privacy.clipping import FUNCTIONS, PerUnitClipper, Taps
from dpllm.privacy.engine import StepEngine
from dpllm.privacy.gradients import Owners, UnitGradients
from dpllm.privacy.noise import GaussianNoise
from dpllm.privacy.sampling import PhysicalBatch, PoissonSampler


@cache
def net(adapter: str = "lora") -> Any:
    if adapter == "tied":
        return tm.build("llama", HEAD, **TIED)
    return tm.build("llama", LORA if adapter == "lora" else FROZEN)


@cache
def reference(adapter: str = "lora") -> Tensor:
    return tm.brute_force(net(adapter), tm.units(tm.RAGGED))


# --- the checks, each with its arguments -------------------------------------------------------------------------------


def exact(adapter: str = "lora", mode: str = "auto") -> None:
    checks.exact(net(adapter), tm.units(tm.RAGGED), reference(adapter), mode)


def bounded() -> None:
    checks.bounded(tm.make_engine(net(), tm.plan(0.02)), tm.units(tm.RAGGED))


def noise() -> None:
    promise = tm.plan(checks.C, checks.SIGMA)
    made = tm.make_engine(Toy(bias=True), promise, noise_entropy=2**90)
    noise_SP = checks.released(made, tm.batches(tm.units([(9, 4), (7,)])), 300)
    checks.standard_normal(noise_SP)
    checks.unrelated(noise_SP.numpy().T)


def poisson() -> None:
    sampler, joined_DN = PoissonSampler(tm.schedule(100, 15), 60, entropy=2**127), np.zeros((2000, 60))
    for row_N in joined_DN:
        row_N[sampler.draw()] = 1
    checks.joined_at(joined_DN, 0.15)
    checks.sizes_vary(joined_DN, 0.15)


def checkpointed() -> None:
    checks.checkpointed("non-reentrant", LORA, reference())


def short_cut() -> None:
    try:
        checks.tf32_refused(lambda: torch.set_float32_matmul_precision("high"))
    finally:
        torch.set_float32_matmul_precision("highest")


# --- the mutations -----------------------------------------------------------------------------------------------------


def ghost_in_float32(left_Ni: Tensor, right_Nj: Tensor, *_: Any) -> Tensor:
    left, right = left_Ni.float(), right_Nj.float()
    return ((left @ left.T) * (right @ right.T)).sum().clamp(min=0).sqrt().double()


def no_slack(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(gradients, "ROUNDING", 0.0)
    patch.setattr(gradients, "GRAM_PRECISION", float("inf"))


def no_cross_term(patch: pytest.MonkeyPatch) -> None:
    whole = UnitGradients.square_norm

    def parts(self: UnitGradients) -> Tensor:
        if not (self._rows and self._products):
            return whole(self)
        return whole(replace(self, _products=[])) + whole(replace(self, _rows=[]))

    patch.setattr(UnitGradients, "square_norm", parts)


def half_of_the_noise(patch: pytest.MonkeyPatch) -> None:
    draw = GaussianNoise.draw

    def some(self: GaussianNoise, size: int) -> Tensor:
        drawn = draw(self, size)
        drawn[size // 2 :] = 0.0
        return drawn

    patch.setattr(GaussianNoise, "draw", some)


def noise_drawn_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(GaussianNoise, "draw", cache(GaussianNoise.draw))


def slightly_less_noise(patch: pytest.MonkeyPatch) -> None:
    draw = GaussianNoise.draw
    patch.setattr(GaussianNoise, "draw", lambda self, size: 0.93 * draw(self, size))


def stale(patch: pytest.MonkeyPatch) -> None:
    add, first = PerUnitClipper.add, []

    def of_the_first_batch(self: Any, losses: Any, batch: PhysicalBatch, *rest: Any) -> Any:
        first.append(batch)
        return add(self, losses, first[0], *rest)

    patch.setattr(PerUnitClipper, "add", of_the_first_batch)


def one_contribution_for_every_forward_pass(patch: pytest.MonkeyPatch) -> None:
    """As Opacus' hooks under non-reentrant checkpointing, whose recomputation fires them again."""
    capture = Taps.capture_activations_hook
    calls: Counter[str] = Counter()

    def counting(self: Taps, name: str, *arguments: Any) -> Any:
        calls[name] += 1
        receive = self._receive

        def again(*reported: Any) -> None:
            for _ in range(calls.pop(name, 0)):
                receive(*reported)

        self._receive = again
        try:
            return capture(self, name, *arguments)
        finally:
            self._receive = receive

    patch.setattr(Taps, "capture_activations_hook", counting)


def dummies_belong_to_the_first_unit(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(clipping, "Owners", lambda unit_R, units: Owners(unit_R.clamp(min=0), units))


def dummies_are_a_unit(patch: pytest.MonkeyPatch) -> None:
    add = PerUnitClipper.add

    def with_them(self: Any, losses: Any, batch: PhysicalBatch, *rest: Any) -> Any:
        if bool((batch.unit_R < 0).any()):
            unit_R = torch.where(batch.unit_R < 0, batch.num_units, batch.unit_R)
            batch = replace(batch, unit_R=unit_R, num_units=batch.num_units + 1)
        return add(self, losses, batch, *rest)

    patch.setattr(PerUnitClipper, "add", with_them)


def pieces_are_units(patch: pytest.MonkeyPatch) -> None:
    add = PerUnitClipper.add
    patch.setattr(
        PerUnitClipper,
        "add",
        lambda self, losses, batch, *rest: add(self, losses, replace(batch, goes_on=False), *rest),
    )


def only_the_last_piece(patch: pytest.MonkeyPatch) -> None:
    add = PerUnitClipper.add

    def forgetful(self: Any, *arguments: Any) -> Any:
        found = add(self, *arguments)
        self._unfinished = []
        return found

    patch.setattr(PerUnitClipper, "add", forgetful)


def rounded_sums(patch: pytest.MonkeyPatch) -> None:
    add_to = UnitGradients.add_to

    def rounding(self: UnitGradients, sum_: Tensor, *rest: Any) -> None:
        add_to(self, sum_, *rest)
        sum_.copy_(sum_.float())

    patch.setattr(UnitGradients, "add_to", rounding)


def everybody_is_finite(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch, "isfinite", lambda values: torch.ones_like(values, dtype=torch.bool))


def no_foreign_guard(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(engine, "refuse_foreign_gradients", lambda parameters: None)


def no_foreign_guards_at_all(patch: pytest.MonkeyPatch) -> None:
    no_foreign_guard(patch)
    patch.setattr(PerUnitClipper, "_check_complete", lambda self, gradients: None)


def weight_gradients(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(clipping, "without_weight_gradients", lambda parameters: contextlib.nullcontext())


def half_of_the_tokens(layer: Any, input: Tensor, backprop: Tensor, *rest: Any) -> Any:
    return rules.linear(layer, input[:, ::2], backprop[:, ::2], *rest)


def attribute(where: Any, name: str, value: Any) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setattr(where, name, value)


def function(name: str, value: Callable[[Tensor, float], Tensor]) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda patch: patch.setitem(FUNCTIONS, name, value)


def nothing(*_: Any, **__: Any) -> float:
    return 0.0


def refuses(words: str, kind: type[Toy]) -> Callable[[], None]:
    return lambda: checks.self_check_refuses(kind(), words)


class Functional(Toy):
    def hidden(self, x_RTd: Tensor) -> Tensor:
        return self.layer(x_RTd) + torch.nn.functional.linear(x_RTd.tanh(), self.layer.weight)


class Lengthy(Toy):
    def hidden(self, x_RTd: Tensor) -> Tensor:
        return self.layer(x_RTd * (3.0 if x_RTd.shape[1] > 20 else 1.0))


class FullInTraining(Toy):
    """An expert that takes eight tokens of the batch and the others half; an evaluation shows nothing."""

    def hidden(self, x_RTd: Tensor) -> Tensor:
        rank_RT = (x_RTd[..., 0] > 0).flatten().cumsum(0).view(x_RTd.shape[:2])
        return self.layer(x_RTd) * torch.where(rank_RT <= (8 if self.training else 10**9), 1.0, 0.5).unsqueeze(-1)


Change = Callable[[pytest.MonkeyPatch], None]
MUTATIONS: dict[str, tuple[Change, Callable[[], None]]] = {
    "no clipping: exactness": (function("flat", lambda norm, bound: torch.ones_like(norm)), exact),
    "no clipping: bound": (function("flat", lambda norm, bound: torch.ones_like(norm)), bounded),
    "max instead of min": (function("flat", lambda norm, bound: (bound / norm).clamp(min=1.0)), exact),
    "clipping to 1.001 C": (function("flat", lambda norm, bound: (1.001 * bound / norm).clamp(max=1.0)), bounded),
    "float32 Gram": (attribute(gradients, "_upper_bound", ghost_in_float32), partial(checks.cancelling, "ghost", 1e5)),
    "Gram products relied on, no slack for rounding": (no_slack, partial(checks.cancelling, "ghost", 1e7)),
    "no cross term of a tied head": (no_cross_term, partial(exact, "tied", "ghost")),
    "a rule that reads half of the tokens": (
        lambda patch: patch.setitem(rules.RULES, nn.Linear, half_of_the_tokens), exact,
    ),
    "stale gradients": (stale, lambda: checks.nothing_left_over(net())),
    "two contributions under checkpointing": (one_contribution_for_every_forward_pass, checkpointed),
    "dummy rows of the first unit": (dummies_belong_to_the_first_unit, lambda: checks.dummy_rows(net())),
    "dummy rows counted as a unit": (dummies_are_a_unit, lambda: checks.dummy_rows(net())),
    "pieces of a unit clipped each": (pieces_are_units, lambda: checks.whole_units(net())),
    "the unfinished unit forgotten": (only_the_last_piece, lambda: checks.whole_units(net())),
    "sums in float32": (rounded_sums, checks.large_sum),
    "a unit of nan is kept": (everybody_is_finite, checks.not_finite),
    "a mean over the batch's tokens": (
        attribute(engine, "example_means", checks.batch_token_mean), lambda: checks.own_loss(net()),
    ),
    "divided by the realised batch": (mutants.divided_by_who_came, checks.expected_divisor),
    "rows clipped, not units": (mutants.rows_clipped_each, lambda: checks.whole_units(net())),
    "noise that depends on the data": (mutants.noise_of_the_data, checks.noise_of_its_own),
    **{name: (change, noise) for name, change in mutants.NOISE.items()},
    **{name: (change, poisson) for name, change in mutants.SAMPLING.items()},
    **{name: (change, exact) for name, change in mutants.SUMS.items()},
    "noise on half of what trains": (half_of_the_noise, noise),
    "noise drawn once": (noise_drawn_once, noise),
    "7% less noise": (slightly_less_noise, noise),
    "foreign gradients before an empty batch": (no_foreign_guard, lambda: checks.foreign_gradients_refused([])),
    "foreign gradients before a batch": (
        no_foreign_guards_at_all, lambda: checks.foreign_gradients_refused(tm.units([(5,)])),
    ),
    "weight gradients left on": (weight_gradients, lambda: checks.no_weight_gradients(net())),
    "steps beside the engine": (attribute(StepEngine, "_only_released", lambda *_: None), checks.lone_step_refused),
    "TF32 allowed": (attribute(guards, "check_float32", nothing), short_cut),
    "no self-check": (attribute(engine, "self_check", nothing), refuses("off by", Functional)),
    "no check of padding": (attribute(selfcheck, "_check_padding", nothing), refuses("other rows in the batch", Lengthy)),
    "no check of neighbours": (
        attribute(selfcheck, "_check_company", nothing), refuses("other rows in the batch", FullInTraining),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_check_sees_the_mutation(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change, check = MUTATIONS[name]
    reference("lora"), reference("tied")  # by brute force, before anything is broken
    change(monkeypatch)
    with pytest.raises(AssertionError):
        check()


_EACH_ONCE = {check: name for name, (_, check) in MUTATIONS.items()}
UNBROKEN = {name: check for check, name in _EACH_ONCE.items()}


@pytest.mark.parametrize("name", UNBROKEN)
def test_the_check_passes_unbroken(name: str) -> None:
    UNBROKEN[name]()


def test_the_mutations_leave_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        for change, _ in MUTATIONS.values():
            change(patch)
    exact()
