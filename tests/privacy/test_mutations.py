"""Each guarantee is broken on purpose, and the check that the other tests use must see it.

A row of ``MUTATIONS`` is what breaks, how, and the check of tests/checks.py that fails on it. Every check is also run on
the unbroken engine here, so that none of them fails by itself.
"""

from __future__ import annotations

import contextlib
import copy
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

from dpllm.privacy import attention, clipping, engine, guards, packing, rules, selfcheck
from dpllm.privacy.attention import RowAttention
from dpllm.privacy.clipping import FUNCTIONS, PerUnitClipper, Taps
from dpllm.privacy.engine import StepEngine
from dpllm.privacy.gradients import PassGradients
from dpllm.privacy.noise import GaussianNoise
from dpllm.privacy.packing import Pass, Segment
from dpllm.privacy.sampling import PoissonSampler


@cache
def net(adapter: str = "lora") -> Any:
    if adapter == "tied":
        return tm.build("llama", HEAD, **TIED)
    if adapter == "positions":
        return tm.build("gpt2", LORA)
    return tm.build("llama", LORA if adapter == "lora" else FROZEN)


@cache
def reference(adapter: str = "lora") -> Tensor:
    return tm.brute_force(net(adapter), tm.units(tm.RAGGED))


# --- the checks, each with its arguments -------------------------------------------------------------------------------


def exact(adapter: str = "lora", mode: str = "held") -> None:
    checks.exact(net(adapter), tm.units(tm.RAGGED), reference(adapter), mode)


def bounded() -> None:
    checks.bounded(tm.make_engine(net(), tm.plan(0.02)), tm.units(tm.RAGGED))


def noise() -> None:
    promise = tm.plan(checks.C, checks.SIGMA)
    made = tm.make_engine(Toy(bias=True), promise, noise_entropy=2**90)
    noise_SP = checks.released(made, tm.batches(tm.units([(9, 4), (7,)]), made), 300)
    checks.standard_normal(noise_SP)
    checks.unrelated(noise_SP.numpy().T)


def poisson() -> None:
    sampler, joined_DN = PoissonSampler(tm.schedule(100, 15), 60, entropy=2**127), np.zeros((2000, 60))
    for row_N in joined_DN:
        row_N[sampler.draw()] = 1
    checks.joined_at(joined_DN, 0.15)
    checks.sizes_vary(joined_DN, 0.15)


def checkpointed(kind: str = "non-reentrant") -> None:
    checks.checkpointed(kind, LORA, reference())


def short_cut() -> None:
    try:
        checks.tf32_refused(lambda: torch.set_float32_matmul_precision("high"))
    finally:
        torch.set_float32_matmul_precision("highest")


# --- the mutations -----------------------------------------------------------------------------------------------------


def no_cross_term(patch: pytest.MonkeyPatch) -> None:
    """Of a tied head: the norm of what the head gives and of what the embedding gives, and nothing of both together."""
    formed = PassGradients._formed

    def parts(self: PassGradients) -> Tensor:
        square_LU = torch.zeros((len(self.places), len(self._units)), dtype=torch.float64)
        for row, (name, place) in enumerate(self.places.items()):
            for number in range(len(self._units)):
                for part in self._parts.get(name, []):
                    alone = copy.copy(self)
                    alone._parts = {name: [part]}
                    square_LU[row, number] += sum(
                        g.double().square().sum() for _, g in formed(alone, name, place, number)
                    )
        return square_LU

    patch.setattr(PassGradients, "unit_norms", parts)


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

    def of_the_first_batch(self: Any, losses: Any, batch: Pass, *rest: Any) -> Any:
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
        losses_and_norms = add(self, *arguments)
        self._unfinished_P = None
        return losses_and_norms

    patch.setattr(PerUnitClipper, "add", forgetful)


def rounded_sums(patch: pytest.MonkeyPatch) -> None:
    add_to = PassGradients.add_to

    def rounding(self: PassGradients, sum_P: Tensor, *rest: Any) -> None:
        add_to(self, sum_P, *rest)
        sum_P.copy_(sum_P.float())

    patch.setattr(PassGradients, "add_to", rounding)


def everybody_is_finite(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch, "isfinite", lambda values: torch.ones_like(values, dtype=torch.bool))


def no_foreign_guard(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(engine, "refuse_foreign_gradients", lambda parameters: None)


def no_foreign_guards_at_all(patch: pytest.MonkeyPatch) -> None:
    no_foreign_guard(patch)
    patch.setattr(PerUnitClipper, "_check_complete", lambda self: None)


def weight_gradients(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(clipping, "without_weight_gradients", lambda parameters: contextlib.nullcontext())


def half_of_the_tokens(layer: Any, input: Tensor, backprop: Tensor, *rest: Any) -> Any:
    return rules.linear(layer, input[:, ::2], backprop[:, ::2], *rest)


def mean_over_the_pass(patch: pytest.MonkeyPatch) -> None:
    """As transformers' own loss: divided by the tokens of the whole batch."""
    losses = StepEngine.losses

    def mean(self: StepEngine, some: Pass) -> Tensor:
        return losses(self, some) * some.denominator_R / some.denominator_R.sum()

    patch.setattr(StepEngine, "losses", mean)


def over_the_boundary(patch: pytest.MonkeyPatch) -> None:
    """Every row of a pass attends to those before it."""
    of = RowAttention.of
    patch.setattr(RowAttention, "of", lambda self, some: of(self, replace(some, rows=one_row(some))))


def one_row(some: Pass) -> tuple[Segment, ...]:
    return (Segment(some.rows[0].start, some.rows[-1].stop, 0),) if some.rows else ()


def laid_out(change: Callable[[Pass], Pass]) -> Callable[[pytest.MonkeyPatch], None]:
    lay_out = packing.lay_out
    return lambda patch: patch.setattr(packing, "lay_out", lambda *arguments: change(lay_out(*arguments)))


def counted_through(some: Pass) -> Pass:
    if some.position_ids_1M is None:
        return some
    return replace(some, position_ids_1M=torch.arange(some.input_ids_1M.shape[1])[None])


def as_long_as_its_rows(some: Pass) -> Pass:
    stop = some.rows[-1].stop + 1 if some.rows else 1
    places = some.position_ids_1M
    cut = None if places is None else places[:, :stop]
    return replace(some, input_ids_1M=some.input_ids_1M[:, :stop], position_ids_1M=cut)


def packs_filled_by_a_unit(some: Pass) -> Pass:
    position_N = some.targets.position_N.clone()
    position_N[some.targets.count :] = 0
    return replace(some, targets=replace(some.targets, position_N=position_N))


def forgotten_before_the_backward_pass(patch: pytest.MonkeyPatch) -> None:
    """Checkpointing computes again in the model's own attention."""
    losses = StepEngine.losses

    def forgetful(self: StepEngine, some: Pass) -> Tensor:
        loss_R = losses(self, some)
        for config in self._clipper._attention._configs:
            config._attn_implementation_internal = "sdpa"
        return loss_R

    patch.setattr(StepEngine, "losses", forgetful)


def tail_shared(patch: pytest.MonkeyPatch) -> None:
    """The last pass of a large unit holds others too."""
    pieces = packing._pieces

    def more(sequences: Any, shape: Any) -> Any:
        *first, last = pieces(sequences, shape)
        yield from first
        yield (*last, *sequences[:1])

    patch.setattr(packing, "_pieces", more)


def most_units_ignored(patch: pytest.MonkeyPatch) -> None:
    grouped = packing._grouped
    patch.setattr(packing, "_grouped", lambda sized, shape: grouped(sized, replace(shape, most_units=10**6)))


def sinks_refused() -> None:
    query = torch.zeros(1, 2, 8, 4)
    with RowAttention(nn.Module()).of(tm.batches(tm.units([(5,)]), 64)[0]):
        checks.refused(lambda: attention.by_rows(nn.Module(), query, query, query, s_aux=query), "s_aux")


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


def company_refused() -> None:
    """A layer that reads the tokens before a row is found out by other company alone, since brute force sees it too."""
    made = tm.build("llama", LORA)

    def full(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        """An expert that takes sixty tokens of a pass and of the others a half."""
        rank_M = torch.arange(output.shape[1])
        return output * torch.where(rank_M < 60, 1.0, 0.5).unsqueeze(-1)

    made.base_model.model.model.layers[0].mlp.register_forward_hook(full)
    checks.self_check_refuses(made, "other rows in the batch")


Change = Callable[[pytest.MonkeyPatch], None]
MUTATIONS: dict[str, tuple[Change, Callable[[], None]]] = {
    "no clipping: exactness": (function("flat", lambda norm, bound: torch.ones_like(norm)), exact),
    "no clipping: bound": (function("flat", lambda norm, bound: torch.ones_like(norm)), bounded),
    "max instead of min": (function("flat", lambda norm, bound: (bound / norm).clamp(min=1.0)), exact),
    "clipping to 1.001 C": (function("flat", lambda norm, bound: (1.001 * bound / norm).clamp(max=1.0)), bounded),
    "no cross term of a tied head": (no_cross_term, partial(exact, "tied", "twice")),
    "a row attends over its boundary": (over_the_boundary, exact),
    "positions that do not restart": (laid_out(counted_through), partial(exact, "positions")),
    "positions that do not restart: layout": (laid_out(counted_through), checks.laid_out_publicly),
    "the length of a pass follows the draw": (laid_out(as_long_as_its_rows), checks.laid_out_publicly),
    "the last pack filled from a unit's token": (laid_out(packs_filled_by_a_unit), checks.laid_out_publicly),
    "the layout dropped before checkpointing computes again": (
        forgotten_before_the_backward_pass, partial(checkpointed, "reentrant"),
    ),
    "the tail of a large unit shared": (tail_shared, checks.laid_out_publicly),
    "most_units ignored": (most_units_ignored, checks.laid_out_publicly),
    "an unknown keyword of attention ignored": (
        attribute(attention, "HARMLESS", attention.HARMLESS | {"s_aux"}), sinks_refused,
    ),
    "a rule that reads half of the tokens": (
        lambda patch: patch.setitem(rules.RULES, nn.Linear, half_of_the_tokens), exact,
    ),
    "stale gradients": (stale, lambda: checks.nothing_left_over(net())),
    "two contributions under checkpointing": (one_contribution_for_every_forward_pass, checkpointed),
    "pieces of a unit clipped each": (pieces_are_units, lambda: checks.whole_units(net())),
    "the unfinished unit forgotten": (only_the_last_piece, lambda: checks.whole_units(net())),
    "sums in float32": (rounded_sums, checks.large_sum),
    "a unit of nan is kept": (everybody_is_finite, checks.not_finite),
    "a mean over the tokens of a pass": (mean_over_the_pass, lambda: checks.own_loss(net())),
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
    "no check of company": (attribute(selfcheck, "_check_company", lambda *_: ""), company_refused),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_check_sees_the_mutation(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change, check = MUTATIONS[name]
    reference("lora"), reference("tied"), reference("positions")  # by brute force, before anything is broken
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
