"""What the tests of the mechanism assert, as functions: tests/privacy/test_mutations.py shows that each can fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tiny_models as tm
import torch
from cases import ragged
from scipy import stats
from torch import Tensor, nn

from dpllm.errors import Refused
from dpllm.privacy.noise import GaussianNoise
from dpllm.privacy.packing import Pass, lay_out, passes_of
from dpllm.privacy.schedule import Unit

BOUND = 1 + 1e-6
EXACT = 1e-5
ALARM = 1e-9  # false alarm probability of each statistical check
SIGMA, C = 1.7, 0.05  # of the plans whose noise is measured


SIZES = (tm.ALONE, 64, 512)  # tokens of a pass


def sizes_for(engine: Any, sizes: Sequence[int] = SIZES) -> list[int]:
    """Those that the engine's model can run: models without transformers' attention run each example by itself."""
    return [tm.ALONE] if engine.packing.alone else list(sizes)


def clip(gradient_UP: Tensor, bound: float) -> Tensor:
    """The clipped sum by the book."""
    return (bound / gradient_UP.norm(dim=1)).clamp(max=1.0) @ gradient_UP


def apart(computed: Tensor, expected: Tensor) -> float:
    """Relative distance of two vectors."""
    assert computed.shape == expected.shape
    return float((computed.double() - expected).norm() / expected.norm())


def without(units: Sequence[Unit], index: int) -> list[Unit | None]:
    return [None if position == index else unit for position, unit in enumerate(units)]


def exact(net: nn.Module, units: Sequence[Unit], exact_UP: Tensor, mode: str = "held", sizes: Any = SIZES) -> None:
    """Norms and clipped sums, at a C that clips some units and not others, are those of the reference."""
    norm_U = exact_UP.norm(dim=1)
    bound = float(norm_U.median()) * 1.01
    engine = tm.make_engine(net, tm.plan(bound), mode=mode)
    for size in sizes_for(engine, sizes):
        sum_P, counts = engine.clipped_sum(tm.batches(units, size))
        assert apart(sum_P, clip(exact_UP, bound)) <= EXACT
        assert (counts.units, counts.clipped) == (len(units), int((norm_U > bound).sum()))
        for unit, norm in zip(units, norm_U, strict=True):
            alone = tm.engine_norm(engine, unit, size)
            assert abs(alone - float(norm)) <= EXACT * float(norm)


def bounded(engine: Any, units: Sequence[Unit]) -> None:
    """Every unit alone adds at most C."""
    for unit in units:
        norm = float(tm.clipped_sum(engine, [unit]).norm())
        assert norm <= engine.max_grad_norm * BOUND, norm


def neighbours(engine: Any, units: Sequence[Unit], size: int | None = None) -> None:
    """Emptying any one unit moves the clipped sum by at most C; so does a unit alone."""
    bounded(engine, units)
    sum_P = tm.clipped_sum(engine, units, size)
    for index in range(len(units)):
        moved = float((sum_P - tm.clipped_sum(engine, without(units, index), size)).norm())
        assert moved <= engine.max_grad_norm * BOUND


def cancelling(mode: str, scale: float, bound: float = 1e-4, **arguments: Any) -> None:
    """A unit whose gradient is far shorter than its terms is bounded, alone and beside its like."""
    units = [tm.alternating_unit(length) for length in (5, 9, 17, 32, 65)]
    for hidden in (4, 64):
        engine = tm.make_engine(tm.Cancelling(scale, hidden), tm.plan(bound), mode=mode, **arguments)
        bounded(engine, units)
        summed_P, counts = engine.clipped_sum(tm.batches(units, engine))
        assert float(summed_P.norm()) <= counts.units * bound * BOUND


def own_rounding(mode: str, scale: float) -> None:
    """A long unit beside forty whose terms cancel moves the sum by at most C: their rounding does not follow it."""
    units = [*[tm.alternating_unit(9)] * 40, tm.alternating_unit(40)]
    engine = tm.make_engine(tm.Cancelling(scale, 64), tm.plan(1e-4), mode=mode)
    moved = float((tm.clipped_sum(engine, units) - tm.clipped_sum(engine, units[:-1])).norm())
    assert moved <= 1e-4 * BOUND, moved / 1e-4


def whole_units(net: nn.Module, mode: str = "held") -> None:
    """A unit with more rows than a pass is clipped once, as if it were in one."""
    long, short = tm.unit((15, 29, 13, 18, 26), 4), tm.unit((7,), 5)
    exact_UP = tm.brute_force(net, [long, short])
    bound = float(exact_UP.norm(dim=1).min()) * 0.9
    engine = tm.make_engine(net, tm.plan(bound), mode=mode)
    for size in sizes_for(engine, (tm.ALONE, 64, 512)):
        pieces = tm.batches([long, short], size)
        assert [piece.goes_on for piece in pieces] == {
            tm.ALONE: [True, True, True, True, False, False],
            64: [True, False, False],
            512: [False],
        }[size]
        sum_P, counts = engine.clipped_sum(pieces)
        assert apart(sum_P, clip(exact_UP, bound)) <= EXACT
        assert (counts.units, counts.clipped) == (2, 2)


def empty_passes(net: nn.Module, mode: str = "held") -> None:
    """A pass that holds nobody, as a rank runs that has fewer than another, adds nothing and is not counted."""
    units = tm.units(tm.RAGGED)
    engine = tm.make_engine(net, tm.plan(0.3), mode=mode)
    expected_P, counted = engine.clipped_sum(tm.batches(units, engine))
    assert float(expected_P.norm()) > 0
    nobody = lay_out([], engine.packing, 0)
    sum_P, counts = engine.clipped_sum([nobody, *tm.batches(units, engine), nobody])
    assert torch.equal(sum_P, expected_P)
    assert (counts.units, counts.clipped) == (counted.units, counted.clipped)
    nothing_P, counts = engine.clipped_sum([nobody])
    assert not bool(nothing_P.any())
    assert counts.units == 0


def not_finite(mode: str = "held", adapter: Any = tm.FROZEN, bad: float = float("nan")) -> None:
    """A unit of which one row's gradient is not finite adds zero and spoils nothing."""
    net = tm.build("llama", adapter)
    with torch.no_grad():
        net.get_input_embeddings().weight[tm.VOCABULARY - 1] = bad
    units = tm.units(tm.RAGGED)
    (row,) = units[1].sequences
    poisoned = Unit((row, tm.replace_token(row, 8, tm.VOCABULARY - 1)))
    engine = tm.make_engine(net, tm.plan(0.3), mode=mode)
    with_it_P = tm.clipped_sum(engine, [units[0], poisoned, *units[2:]])
    assert apart(with_it_P, tm.clipped_sum(engine, without(units, 1))) <= 1e-6
    assert not bool(tm.clipped_sum(engine, [poisoned]).any())


def own_loss(net: nn.Module) -> None:
    """A long neighbour does not change a loss."""
    engine = tm.make_engine(net)
    units = tm.units([(6,), (11,), (3,), (60,)])
    groups = [[unit] for unit in units] if engine.packing.alone else [units]
    packed_losses = []
    with torch.no_grad():
        alone_R = torch.cat([engine.losses(tm.batches([unit], tm.ALONE)[0]) for unit in units])
        for group in groups:
            piece = lay_out(group, engine.packing, 0)
            with engine._attention.of(piece):
                packed_losses.append(engine.losses(piece))
    torch.testing.assert_close(torch.cat(packed_losses), alone_R, rtol=1e-5, atol=1e-6)


def laid_out_publicly(world: int = 2) -> None:
    """Every drawn unit lies in one pass, or alone in passes of its own; the shape of passes tells nothing about the draw."""
    shape = tm.packing(64)
    units = tm.units([(9, 4), (30, 31, 32), (5,), *[(2,)] * 20, (12,)])
    lengths = []
    ranks = [passes_of(range(len(units)), units, shape, 0, rank, world) for rank in range(world)]
    assert len({len(passes) for passes in ranks}) == 1
    for piece in (piece for passes in ranks for piece in passes):
        assert piece.input_ids_1M.shape == (1, 64)
        assert piece.num_units <= shape.most_units
        assert int(piece.position_ids_1M[0, -1]) == shape.last_position
        for row in piece.rows:
            positions = piece.position_ids_1M[0, row.start : row.stop].tolist()
            assert positions == list(range(row.stop - row.start))
            assert row.stop < 64
        padded = piece.targets.position_N[piece.targets.count :].tolist()
        assert set(padded) <= {63}
        assert len(piece.targets.position_N) % shape.targets == 0
        assert not piece.goes_on or piece.num_units == 1
        lengths += [row.stop - row.start for row in piece.rows]
    assert sorted(lengths) == sorted(len(row.input_ids) for unit in units for row in unit.sequences)


def nothing_left_over(net: nn.Module) -> None:
    """Two batches after each other add what each holds: nothing of the first is used again."""
    first, second = tm.units([(9,), (5,)], seed=1), tm.units([(7,), (12,)], seed=2)
    expected_P = clip(tm.brute_force(net, [*first, *second]), 0.3)
    engine = tm.make_engine(net, tm.plan(0.3))
    assert apart(engine.clipped_sum([*tm.batches(first, engine), *tm.batches(second, engine)])[0], expected_P) <= EXACT


def checkpointed(kind: str, adapter: Any, exact_UP: Tensor, mode: str = "held", **changes: Any) -> None:
    """Gradient checkpointing changes nothing."""
    net = tm.build("llama", adapter, checkpointing=kind, **changes)
    exact(net, ragged(), exact_UP, mode)
    assert tm.make_engine(net, mode=mode).self_check(tm.VOCABULARY).error <= EXACT


def no_weight_gradients(net: nn.Module, mode: str = "held") -> None:
    """In the engine's backward pass no parameter requires a gradient, so that autograd computes none."""
    engine = tm.make_engine(net, mode=mode)
    receive, calls = engine._clipper._taps._receive, []

    def look(*arguments: Any) -> None:
        assert not any(p.requires_grad or p.grad is not None for p in net.parameters())
        calls.append(1)
        receive(*arguments)

    engine._clipper._taps._receive = look
    engine.clipped_sum(tm.batches(tm.units(tm.RAGGED), engine))
    assert len(calls) >= len({name.rpartition(".")[0] for name in engine.parameters})
    assert all(p.grad is None for p in net.parameters())
    assert {name for name, p in net.named_parameters() if p.requires_grad} == set(engine.parameters)


def refused(call: Callable[[], Any], words: str) -> None:
    """The call is refused, with these words."""
    message = None
    try:
        call()
    except Refused as refusal:
        message = str(refusal)
    assert message is not None, "it was not refused"
    assert words in message, message


def self_check_refuses(net: nn.Module, words: str) -> None:
    """The check before every run stops this model."""
    refused(lambda: tm.make_engine(net).self_check(tm.VOCABULARY), words)


def large_sum() -> None:
    """A logical batch of thousands is summed without rounding a unit's bound away."""
    units = [tm.unit([3 + number % 9], number // 9) for number in range(2048)]
    engine = tm.make_engine(tm.Toy(), tm.plan(1e-3))
    sum_P = tm.clipped_sum(engine, units)
    assert float(sum_P.norm()) > 0.15  # far above C: the gradients point the same way
    for index in (0, 5, 1024, 2047):
        assert float((sum_P - tm.clipped_sum(engine, without(units, index))).norm()) <= 1e-3 * BOUND


def tf32_refused(short_cut: Callable[[], None]) -> None:
    """No step with short cuts in float32 products, with or without data."""
    engine = tm.make_engine(tm.Toy())
    engine.step([])
    short_cut()
    for units in ([], tm.units([(5,)])):
        refused(lambda units=units: engine.step(tm.batches(units, engine)), "TF32")


def lone_step_refused() -> None:
    """optimizer.step() beside the engine is refused, and the weights stay."""
    net = tm.Toy()
    engine = tm.make_engine(net)
    before = net.layer.weight.detach().clone()
    net(torch.arange(8).view(2, 4)).logits.sum().backward()
    refused(engine._optimizer.step, "called outside the engine")
    assert torch.equal(net.layer.weight, before)


def foreign_gradients_refused(units: Sequence[Unit]) -> None:
    """A backward pass of one's own before a step is found out."""
    net = tm.Toy()
    engine = tm.make_engine(net)
    net(torch.arange(8).view(2, 4)).logits.sum().backward()
    refused(lambda: engine.step(tm.batches(units, engine)), "a gradient that this engine did not compute")


def expected_divisor() -> None:
    """The update is (clipped sum + noise) / B for the Plan's B, whether 0, 3 or 14 units were drawn, by brute force."""
    for size in (0, 3, 14):
        net, units = tm.Toy(), tm.units([(4 + number,) for number in range(size)])
        total_P = clip(tm.brute_force(net, units), 0.03) if units else torch.zeros(64, dtype=torch.float64)
        expected_P = (total_P + 0.8 * 0.03 * GaussianNoise(2**77 + 5, tm.CPU).draw(64)) / 10
        engine = tm.make_engine(net, tm.plan(0.03, 0.8), noise_entropy=2**77 + 5)
        before_P = net.layer.weight.detach().flatten().clone()
        engine.step(tm.batches(units, engine))
        moved_P = (before_P - net.layer.weight.detach().flatten()).double()
        torch.testing.assert_close(moved_P, expected_P, rtol=1e-4, atol=1e-7)


def released(engine: Any, some_batches: Sequence[Pass], steps: int, sigma: float = SIGMA) -> Tensor:
    """What many steps on one logical batch release beyond the clipped sum, over sigma C: (steps, P)."""
    exact_P = engine.clipped_sum(some_batches)[0]
    rows = [tm.released(engine, some_batches) - exact_P for _ in range(steps)]
    return torch.stack(rows) / (sigma * engine.max_grad_norm)


def two_sided(statistic: Any, degrees: int) -> Any:
    """p-value of a sum of ``degrees`` squares of standard normal variates."""
    return 2 * np.minimum(stats.chi2.sf(statistic, degrees), stats.chi2.cdf(statistic, degrees))


def unrelated(noise_NP: Any) -> None:
    """No two rows of normal noise are related: the squared cosine between two of P numbers is Beta(1/2, (P - 1) / 2)."""
    gram_NN, size = noise_NP @ noise_NP.T, noise_NP.shape[1]
    if size == 1:  # numbers point the same way, or opposite ways
        return
    earlier, later = np.triu_indices(len(gram_NN), k=1)
    square = gram_NN[earlier, later] ** 2 / (np.diag(gram_NN)[earlier] * np.diag(gram_NN)[later])
    assert stats.beta.sf(square.max(), 0.5, (size - 1) / 2) > ALARM / len(square)


def standard_normal(noise_SP: Tensor) -> None:
    """Standard deviation 1 over all, on every coordinate and in every step; normal, centred, unlike any earlier step."""
    noise, alarm = noise_SP.double().numpy(), ALARM / 5
    steps, size = noise.shape
    square_P = (noise**2).sum(axis=0)
    assert two_sided(square_P.sum(), steps * size) > alarm
    assert two_sided(square_P, steps).min() > alarm / size
    assert two_sided((noise**2).sum(axis=1), size).min() > alarm / steps
    assert stats.kstest(noise.flatten(), "norm").pvalue > alarm
    assert 2 * stats.norm.sf(abs(noise.mean(axis=0)) * steps**0.5).min() > alarm / size
    for lag in (1, 2, 5):
        product = (noise[:-lag] * noise[lag:]).sum() / (size * (steps - lag)) ** 0.5
        assert 2 * stats.norm.sf(abs(product)) > alarm / 3
    unrelated(noise)


def noise_of_its_own() -> None:
    """What is added to a sum does not depend on the batch: with one key it is the same for three units and for nobody."""
    engine, twin = (tm.make_engine(tm.Toy(bias=True), tm.plan(C, SIGMA), noise_entropy=2**90) for _ in range(2))
    for units in (tm.units([(9, 4), (7,), (5,)]), [], tm.units([(6,)])):
        added_P = tm.released(engine, tm.batches(units, engine)) - engine.clipped_sum(tm.batches(units, engine))[0]
        torch.testing.assert_close(added_P, tm.released(twin, []), rtol=0, atol=1e-5 * SIGMA * C)


# --- sampling --------------------------------------------------------------------------------------------------------


def joined_at(joined_DN: Any, rate: float) -> None:
    """Every slot joins at the accounted rate, and all together do."""
    draws, slots = joined_DN.shape
    count = joined_DN.sum(axis=0)
    per_slot = 2 * np.minimum(stats.binom.cdf(count, draws, rate), stats.binom.sf(count - 1, draws, rate))
    assert per_slot.min() > ALARM / slots
    total = joined_DN.sum()
    overall = 2 * min(stats.binom.cdf(total, joined_DN.size, rate), stats.binom.sf(total - 1, joined_DN.size, rate))
    assert overall > ALARM
    chi_square = ((count - draws * rate) ** 2).sum() / (draws * rate * (1 - rate))
    assert ALARM < stats.chi2.cdf(chi_square, slots) < 1 - ALARM


def sizes_vary(joined_DN: Any, rate: float) -> None:
    """The size of a logical batch varies as a binomial: a shuffled sampler has batches of one size, no variance at all."""
    draws, slots = joined_DN.shape
    chi_square = ((joined_DN.sum(axis=1) - slots * rate) ** 2).sum() / (slots * rate * (1 - rate))
    assert ALARM < stats.chi2.cdf(chi_square, draws) < 1 - ALARM


# --- clipping functions ----------------------------------------------------------------------------------------------


def layers(net: nn.Module) -> list[slice]:
    """Where in a flat gradient each layer's parameters lie, in the order of ``named_parameters``."""
    places: dict[str, slice] = {}
    start = 0
    for name, p in tm.trainable(net).items():
        layer = name.rpartition(".")[0]
        first = places[layer].start if layer in places else start
        places[layer] = slice(first, start + p.numel())
        start += p.numel()
    return list(places.values())


def by_hand(clipping: str, gradient_UP: Tensor, bound: float) -> Tensor:
    """contribution_UP of each clipping function, as its paper writes it."""
    norm_U = gradient_UP.norm(dim=1, keepdim=True)
    if clipping == "automatic":
        return bound * gradient_UP / (norm_U + 0.01)
    assert clipping == "flat", "write the function once more"
    return (bound / norm_U).clamp(max=1.0) * gradient_UP


def function(
    clipping: str, net: nn.Module, some: Sequence[Unit], exact_UP: Tensor, bound: float, **arguments: Any
) -> None:
    """The clipped sum is the one by hand, and no unit adds more than C."""
    engine = tm.make_engine(net, tm.plan(bound, clipping=clipping), **arguments)
    found_P = tm.clipped_sum(engine, some)
    assert apart(found_P, by_hand(clipping, exact_UP, bound).sum(dim=0)) <= EXACT
    bounded(engine, some)
