"""What runs is what is accounted: each slot joins independently at rate q, whole, once, on one rank."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import checks
import numpy as np
import pytest
import tiny_models as tm
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from dpllm.privacy.sampling import PoissonSampler, collate, physical_batches
from dpllm.privacy.schedule import Shape, _tail, shape_for, shapes_of
from dpllm.privacy.stream import SecretStream
from dpllm.text.data import Unit

ALARM = 1e-9
SLOTS, DRAWS = 60, 4000
RATE = 0.15


@pytest.fixture(scope="module")
def joined(seed: int) -> np.ndarray:
    """DRAWS x SLOTS of 0 and 1, through the sampler as it runs."""
    sampler = PoissonSampler(tm.schedule(100, 15), SLOTS, entropy=2**127 + seed)
    rows = np.zeros((DRAWS, SLOTS))
    for row in rows:
        row[sampler.draw()] = 1
    return rows


def test_every_slot_joins_at_the_accounted_rate_and_sizes_vary_as_a_binomial(joined: np.ndarray) -> None:
    """The rate is the Plan's B / N, not B over the number of slots that happen to be there."""
    checks.joined_at(joined, RATE)
    checks.sizes_vary(joined, RATE)


def test_slots_are_independent_of_each_other_and_of_earlier_draws(joined: np.ndarray) -> None:
    centred = (joined - RATE) / (RATE * (1 - RATE)) ** 0.5
    between_slots = (centred.T @ centred / DRAWS**0.5)[np.triu_indices(SLOTS, 1)]
    assert 2 * stats.norm.sf(abs(between_slots)).min() > ALARM / len(between_slots)
    for lag in (1, 2, 7):
        between_draws = (centred[:-lag] * centred[lag:]).sum(axis=0) / (DRAWS - lag) ** 0.5
        assert 2 * stats.norm.sf(abs(between_draws)).min() > ALARM / SLOTS
    # An epoch in which everybody is seen once would make draws repel each other.
    epoch = joined[: DRAWS // 10 * 10].reshape(-1, 10, SLOTS).sum(axis=1)
    chi_square = ((epoch - 10 * RATE) ** 2).sum() / (10 * RATE * (1 - RATE))
    kurtosis = 1 + (1 - 6 * RATE * (1 - RATE)) / (10 * RATE * (1 - RATE)) / 2  # variance of a squared binomial, over 2
    assert abs(chi_square - epoch.size) < 6.5 * (2 * kurtosis * epoch.size) ** 0.5


def test_every_rank_draws_the_same_and_another_key_draws_otherwise() -> None:
    keys = (7, 7, 7 + 2**100)
    one, same, other = (PoissonSampler(tm.schedule(), 500, entropy) for entropy in keys)
    draws = [[sampler.draw() for _ in range(5)] for sampler in (one, same, other)]
    assert draws[0] == draws[1]
    assert draws[0] != draws[2]
    assert len({tuple(draw) for draw in draws[0]}) == 5


def test_sampling_and_noise_share_no_stream_even_with_one_key() -> None:
    """A batch that could be read off the noise would end the amplification by sampling."""
    key = 2**200 + 5
    drawn = PoissonSampler(tm.schedule(100, 15), 40_000, key).draw()
    noise = SecretStream(key, b"nois").uniform(40_000)
    both = int((noise[drawn] < RATE).sum())
    assert stats.binomtest(both, len(drawn), RATE).pvalue > ALARM


def test_rate_one_takes_everybody_and_an_empty_draw_works() -> None:
    assert PoissonSampler(tm.schedule(10, 10), 10, 3).draw() == list(range(10))
    sampler = PoissonSampler(tm.schedule(10**9, 1), 3, 3)
    assert sampler.draw() == []
    assert physical_batches([], [], tm.shapes(16, 4), 0) == []
    assert physical_batches([0, 1], [None, Unit(())], tm.shapes(16, 4), 0) == []


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.one_of(st.none(), st.lists(st.integers(2, 9), max_size=4)), max_size=12),
    sizes=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    world=st.integers(1, 5),
    data=st.data(),
)
def test_every_drawn_unit_is_computed_once_and_whole(
    lengths: list, sizes: tuple[int, int], world: int, data: st.DataObject
) -> None:
    """Slot s writes token s + 3 everywhere, so that batches tell whose rows they hold."""
    slots = [
        None if of_one is None else Unit(tuple(tm.constant_unit(length, s + 3).sequences[0] for length in of_one))
        for s, of_one in enumerate(lengths)
    ]
    drawn = sorted(data.draw(st.sets(st.sampled_from(range(len(slots)))))) if slots else []
    seen: Counter[int] = Counter()
    shapes = Shape(4, sizes[0]), Shape(9, sizes[1])
    shares = [physical_batches(drawn, slots, shapes, 0, rank, world) for rank in range(world)]
    assert len({len(share) for share in shares}) == 1  # no rank waits for another's forward pass
    assert not shares[0] or any(share[-1].num_units for share in shares)  # and none runs more of them than it must
    found = {(batch.input_ids_RT.shape[1], len(batch.unit_R)) for share in shares for batch in share}
    assert found <= {*shapes}  # which tell nobody's number of rows
    for share in shares:
        so_far: list[int] = []
        for batch in share:
            if batch.num_units == 0:
                assert {*batch.unit_R.tolist()} == {-1}
                assert not batch.loss_mask_RT.any()
                continue
            owners = batch.input_ids_RT[:, 0] - 3
            assert sorted({*batch.unit_R.tolist()} - {-1}) == list(range(batch.num_units))
            for unit in range(batch.num_units):
                rows = so_far + owners[batch.unit_R == unit].tolist()
                longest = max(len(sequence.input_ids) for sequence in slots[rows[0]].sequences)
                assert batch.input_ids_RT.shape[1] == shape_for(longest, shapes).length  # from the unit alone
                assert len(set(rows)) == 1
                assert (len(rows) == len(slots[rows[0]].sequences)) != batch.goes_on  # whole, when it is clipped
                so_far = rows if batch.goes_on else []
                seen[rows[0]] += not batch.goes_on
            assert not batch.goes_on or batch.num_units == 1
        assert not so_far
    assert seen == Counter(s for s in drawn if slots[s] is not None and slots[s].sequences)


def test_physical_batches_are_filled_up_with_padding_rows() -> None:
    some = tm.units([(5,)] * 8 + [(5, 5), (4, 4, 4, 4)])

    def taken(batches: list[Any]) -> list[int]:
        return [int((batch.unit_R >= 0).sum()) for batch in batches]

    assert taken(tm.batches(some[:8], 3)) == [3, 3, 2]
    batches = tm.batches(some, 3)
    assert taken(batches) == [3, 3, 2, 3, 1, 2]  # the unit of four has two of its own
    assert [batch.goes_on for batch in batches] == [False, False, False, True, False, False]


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    rows=st.integers(1, 40),
    batch=st.integers(1, 600),
    max_length=st.one_of(st.sampled_from([2, 7, 8, 16, 96, 128, 1000, 2048]), st.integers(2, 600)),
    each=st.integers(1, 5),
    fixed=st.sampled_from([0, 64, 256, 2048]),
)
def test_shapes_are_few_and_reach_the_longest(rows: int, batch: int, max_length: int, each: int, fixed: int) -> None:
    shapes = shapes_of(rows, batch, max_length, each=each, fixed=fixed)
    lengths = [shape.length for shape in shapes]
    assert lengths == sorted(set(lengths))
    assert len(lengths) <= 6
    assert lengths[-1] == max_length
    assert all(length % 8 == 0 for length in lengths[:-1])
    assert all(min(each, rows) <= shape.rows <= rows for shape in shapes)
    for tokens in {2, *lengths, *(length + 1 for length in lengths[:-1])}:
        assert shape_for(tokens, shapes).length == min(length for length in lengths if length >= tokens)
    with pytest.raises(ValueError, match="longer than"):
        shape_for(max_length + 1, shapes)


def test_shapes_of_large_public_numbers_are_found_at_once() -> None:
    assert Shape(1, 1).lower == Shape(1, 1)
    for rows, batch, each in ((10**6, 10**4, 1), (10**4, 10**5, 1), (16, 10**6, 1), (16, 10**4, 100)):
        begun = time.process_time()
        shapes = shapes_of(rows, batch, 4096, each=each)
        assert time.process_time() - begun < 10
        assert max(shape.rows for shape in shapes) <= rows


def physical_batches_expected(shapes: tuple[Shape, ...], batch: int) -> list[float]:
    """Physical batches of each shape in a step, by what ``shapes_of`` takes lengths to be."""
    longest, shorter = shapes[-1].length, [0, *(shape.length for shape in shapes)]
    means = [batch * (shape.length - less) / longest for shape, less in zip(shapes, shorter, strict=False)]
    return [float(_tail(mean)[:: shape.rows].sum()) for shape, mean in zip(shapes, means, strict=True)]


def cost(shapes: tuple[Shape, ...], batch: int, fixed: int) -> float:
    each = physical_batches_expected(shapes, batch)
    return sum(number * (shape.rows * shape.length + fixed) for number, shape in zip(each, shapes, strict=True))


@pytest.mark.parametrize("batch", [3, 64, 512])
def test_no_other_shapes_of_these_lengths_are_cheaper(batch: int) -> None:
    """By brute force over two lengths of 32 tokens, and every number of rows at each."""
    grid = [*range(8, 33, 8)]
    others = [(Shape(32, n),) for n in range(1, 13)]
    others += [(Shape(less, m), Shape(32, n)) for less in grid[:-1] for m in range(1, 13) for n in range(1, 13)]
    for fixed in (0, 64, 256):
        found = cost(shapes_of(12, batch, 32, fixed=fixed), batch, fixed)
        assert found <= min(cost(other, batch, fixed) for other in others) + 1e-9


def test_expected_physical_batches_are_those_of_poisson_draws(seed: int) -> None:
    shapes, batch = shapes_of(16, 64, 128), 64
    generator = np.random.default_rng(seed)
    counts = np.zeros((4000, len(shapes)))
    for row in counts:
        tokens = generator.uniform(0, 128, generator.poisson(batch))
        ends = [0, *(shape.length for shape in shapes)]
        held = np.histogram(tokens, ends)[0]
        row[:] = [-(-n // shape.rows) for n, shape in zip(held, shapes, strict=True)]
    error = counts.std(axis=0) / len(counts) ** 0.5
    assert (abs(counts.mean(axis=0) - physical_batches_expected(shapes, batch)) < 6.5 * error + 1e-9).all()


def test_collate_pads_right_and_learns_nothing_from_padding() -> None:
    some = tm.units([(5, 2), (3,)])
    batch = collate(some, pad_id=61)
    assert batch.input_ids_RT.shape == (3, 5)
    assert batch.unit_R.tolist() == [0, 0, 1]
    assert batch.num_units == 2
    for row, sequence in enumerate(sequence for one in some for sequence in one.sequences):
        tokens = len(sequence.input_ids)
        assert batch.input_ids_RT[row].tolist() == [*sequence.input_ids, *[61] * (5 - tokens)]
        assert batch.loss_mask_RT[row].tolist() == [*sequence.loss_mask, *[False] * (5 - tokens)]
        assert batch.denominator_R[row] == sequence.denominator
    assert not bool(batch.loss_mask_RT[:, 0].any())
    assert batch.denominator_R.dtype == torch.float32
