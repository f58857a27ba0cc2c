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
from cases import built, ragged, reference
from mutants import around
from tiny_models import LORA, Toy
from torch import Tensor, nn

from dpllm.privacy import attention, clipping, engine, guards, packing, rules, selfcheck
from dpllm.privacy.attention import RowAttention
from dpllm.privacy.clipping import FUNCTIONS, PerUnitClipper, Taps
from dpllm.privacy.engine import StepEngine
from dpllm.privacy.gradients import PassGradients
from dpllm.privacy.noise import GaussianNoise
from dpllm.privacy.packing import Pass, Segment
from dpllm.privacy.sampling import PoissonSampler

LORA_OF_LLAMA, TIED, POSITIONS = "llama, all-linear", "llama, last block and tied head", "gpt2, all-linear"


def net() -> Any:
    return built(LORA_OF_LLAMA)


# --- the checks, each with its arguments -------------------------------------------------------------------------------


def exact(name: str = LORA_OF_LLAMA, mode: str = "held") -> None:
    checks.exact(built(name), ragged(), reference(name), mode)


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
    checks.checkpointed(kind, LORA, reference(LORA_OF_LLAMA))


def short_cut() -> None:
    try:
        checks.tf32_refused(lambda: torch.set_float32_matmul_precision("high"))
    finally:
        torch.set_float32_matmul_precision("highest")


# --- the mutations -----------------------------------------------------------------------------------------------------


def no_cross_term(patch: pytest.MonkeyPatch) -> None:
    """Of a tied head: the norm of what the head gives and of what the embedding gives, and nothing of both together."""
    formed = PassGradients._formed

    def square(self: PassGradients, name: str, place: Any, number: int, part: Any) -> Tensor:
        alone = copy.copy(self)
        alone._parts = {name: [part]}
        return sum(gradient.double().square().sum() for _, gradient in formed(alone, name, place, number))

    def parts(self: PassGradients) -> Tensor:
        square_LU = torch.zeros((len(self.places), len(self._units)), dtype=torch.float64)
        for row, (name, place) in enumerate(self.places.items()):
            for number in range(len(self._units)):
                square_LU[row, number] = sum(square(self, name, place, number, p) for p in self._parts.get(name, []))
        return square_LU

    patch.setattr(PassGradients, "unit_norms", parts)


def none_on_the_second_half(noise: Tensor) -> Tensor:
    noise[len(noise) // 2 :] = 0.0
    return noise


def stale(patch: pytest.MonkeyPatch) -> None:
    first: list[Pass] = []

    def of_the_first_batch(add: Any, self: Any, losses: Any, batch: Pass, *rest: Any) -> Any:
        first.append(batch)
        return add(self, losses, first[0], *rest)

    around(PerUnitClipper, "add", of_the_first_batch)(patch)


def one_contribution_for_every_forward_pass(patch: pytest.MonkeyPatch) -> None:
    """As Opacus' hooks under non-reentrant checkpointing, whose recomputation fires them again."""
    calls: Counter[str] = Counter()

    def counting(capture: Any, self: Taps, name: str, *arguments: Any) -> Any:
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

    around(Taps, "capture_activations_hook", counting)(patch)


def pieces_are_units(add: Any, self: Any, losses: Any, batch: Pass, *rest: Any) -> Any:
    return add(self, losses, replace(batch, goes_on=False), *rest)


def only_the_last_piece(add: Any, self: Any, *arguments: Any) -> Any:
    losses_and_norms = add(self, *arguments)
    self._unfinished_P = None
    return losses_and_norms


def rounded_sums(add_to: Any, self: PassGradients, sum_P: Tensor, *rest: Any) -> None:
    add_to(self, sum_P, *rest)
    sum_P.copy_(sum_P.float())


def no_foreign_guards_at_all(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(engine, "refuse_foreign_gradients", nothing)
    patch.setattr(PerUnitClipper, "_check_complete", nothing)


def half_of_the_tokens(layer: Any, input: Tensor, backprop: Tensor, *rest: Any) -> Any:
    return rules.linear(layer, input[:, ::2], backprop[:, ::2], *rest)


def mean_over_the_pass(losses: Any, self: StepEngine, some: Pass) -> Tensor:
    """As transformers' own loss: divided by the tokens of the whole batch."""
    return losses(self, some) * some.denominator_R / some.denominator_R.sum()


def over_the_boundary(of: Any, self: RowAttention, some: Pass) -> Any:
    """Every row of a pass attends to those before it."""
    return of(self, replace(some, rows=(Segment(some.rows[0].start, some.rows[-1].stop, 0),) if some.rows else ()))


def laid_out(change: Callable[[Pass], Pass]) -> mutants.Change:
    return around(packing, "lay_out", lambda lay_out, *arguments: change(lay_out(*arguments)))


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


def forgotten_before_the_backward_pass(losses: Any, self: StepEngine, some: Pass) -> Tensor:
    """Checkpointing computes again in the model's own attention."""
    loss_R = losses(self, some)
    for config in self._clipper._attention._configs:
        config._attn_implementation_internal = "sdpa"
    return loss_R


def tail_shared(pieces: Any, sequences: Any, shape: Any) -> Any:
    """The last pass of a large unit holds others too."""
    *first, last = pieces(sequences, shape)
    return [*first, (*last, *sequences[:1])]


def most_units_ignored(grouped: Any, sized: Any, shape: Any) -> Any:
    return grouped(sized, replace(shape, most_units=10**6))


def sinks_refused() -> None:
    query = torch.zeros(1, 2, 8, 4)
    with RowAttention(nn.Module()).of(tm.batches(tm.units([(5,)]), 64)[0]):
        checks.refused(lambda: attention.by_rows(nn.Module(), query, query, query, s_aux=query), "s_aux")


def attribute(where: Any, name: str, value: Any) -> mutants.Change:
    return lambda patch: patch.setattr(where, name, value)


def function(name: str, value: Callable[[Tensor, float], Tensor]) -> mutants.Change:
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


MUTATIONS: dict[str, tuple[mutants.Change, Callable[[], None]]] = {
    "no clipping: exactness": (function("flat", lambda norm, bound: torch.ones_like(norm)), exact),
    "no clipping: bound": (function("flat", lambda norm, bound: torch.ones_like(norm)), bounded),
    "max instead of min": (function("flat", lambda norm, bound: (bound / norm).clamp(min=1.0)), exact),
    "clipping to 1.001 C": (function("flat", lambda norm, bound: (1.001 * bound / norm).clamp(max=1.0)), bounded),
    "no cross term of a tied head": (no_cross_term, partial(exact, TIED, "twice")),
    "a row attends over its boundary": (around(RowAttention, "of", over_the_boundary), exact),
    "positions that do not restart": (laid_out(counted_through), partial(exact, POSITIONS)),
    "positions that do not restart: layout": (laid_out(counted_through), checks.laid_out_publicly),
    "the length of a pass follows the draw": (laid_out(as_long_as_its_rows), checks.laid_out_publicly),
    "the last pack filled from a unit's token": (laid_out(packs_filled_by_a_unit), checks.laid_out_publicly),
    "the layout dropped before checkpointing computes again": (
        around(StepEngine, "losses", forgotten_before_the_backward_pass), partial(checkpointed, "reentrant"),
    ),
    "the tail of a large unit shared": (around(packing, "_pieces", tail_shared), checks.laid_out_publicly),
    "most_units ignored": (around(packing, "_grouped", most_units_ignored), checks.laid_out_publicly),
    "an unknown keyword of attention ignored": (
        attribute(attention, "HARMLESS", attention.HARMLESS | {"s_aux"}), sinks_refused,
    ),
    "a rule that reads half of the tokens": (
        lambda patch: patch.setitem(rules.RULES, nn.Linear, half_of_the_tokens), exact,
    ),
    "stale gradients": (stale, lambda: checks.nothing_left_over(net())),
    "two contributions under checkpointing": (one_contribution_for_every_forward_pass, checkpointed),
    "pieces of a unit clipped each": (around(PerUnitClipper, "add", pieces_are_units), lambda: checks.whole_units(net())),
    "the unfinished unit forgotten": (around(PerUnitClipper, "add", only_the_last_piece), lambda: checks.whole_units(net())),
    "sums in float32": (around(PassGradients, "add_to", rounded_sums), checks.large_sum),
    "a unit of nan is kept": (attribute(torch, "isfinite", partial(torch.ones_like, dtype=torch.bool)), checks.not_finite),
    "a mean over the tokens of a pass": (around(StepEngine, "losses", mean_over_the_pass), lambda: checks.own_loss(net())),
    "divided by the realised batch": (around(StepEngine, "step", mutants.divided_by_who_came), checks.expected_divisor),
    "rows clipped, not units": (
        around(PerUnitClipper, "add", mutants.rows_clipped_each), lambda: checks.whole_units(net()),
    ),
    "noise that depends on the data": (
        around(StepEngine, "clipped_sum", mutants.one_variate_more_for_every_unit), checks.noise_of_its_own,
    ),
    **{name: (change, noise) for name, change in mutants.NOISE.items()},
    **{name: (change, poisson) for name, change in mutants.SAMPLING.items()},
    **{name: (change, exact) for name, change in mutants.SUMS.items()},
    "noise on half of what trains": (mutants.drawn(none_on_the_second_half), noise),
    "noise drawn once": (attribute(GaussianNoise, "draw", cache(GaussianNoise.draw)), noise),
    "7% less noise": (mutants.drawn(lambda noise: 0.93 * noise), noise),
    "foreign gradients before an empty batch": (
        attribute(engine, "refuse_foreign_gradients", nothing), lambda: checks.foreign_gradients_refused([]),
    ),
    "foreign gradients before a batch": (
        no_foreign_guards_at_all, lambda: checks.foreign_gradients_refused(tm.units([(5,)])),
    ),
    "weight gradients left on": (
        attribute(clipping, "without_weight_gradients", contextlib.nullcontext),
        lambda: checks.no_weight_gradients(net()),
    ),
    "steps beside the engine": (attribute(StepEngine, "_only_released", lambda *_: None), checks.lone_step_refused),
    "TF32 allowed": (attribute(guards, "check_float32", nothing), short_cut),
    "no self-check": (attribute(engine, "self_check", nothing), refuses("off by", Functional)),
    "no check of company": (attribute(selfcheck, "_check_company", lambda *_: ""), company_refused),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_check_sees_the_mutation(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change, check = MUTATIONS[name]
    reference(LORA_OF_LLAMA), reference(TIED), reference(POSITIONS)  # by brute force, before anything is broken
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
