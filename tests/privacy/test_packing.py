"""Slots join independently, whole, once, on one rank; passes hold whole units, and no shape follows from who was drawn."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import tiny_models as tm
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from dpllm.model.memory import pass_length
from dpllm.privacy import loss, packing
from dpllm.privacy.noise import SecretStream
from dpllm.privacy.packing import Pass, Targets, lay_out, passes_of
from dpllm.privacy.sampling import PoissonSampler
from dpllm.privacy.schedule import Packing, TokenSequence, Unit

PACKING = Packing(tokens=64, most_units=5, held_numbers=10**9, targets=8, max_length=20)
PAD = 3


def unit(*lengths: int, first: int = 10) -> Unit:
    """Rows whose tokens nobody else has, every token but the first learned."""
    rows = []
    for length in lengths:
        ids = tuple(range(first, first + length))
        rows.append(TokenSequence(ids, (False, *[True] * (length - 1)), max(1, length - 1)))
        first += length
    return Unit(tuple(rows))


def tokens_of(some: Pass) -> list[tuple[int, ...]]:
    """The rows that lie in a pass, as they lie there."""
    flat = some.input_ids_1M.flatten().tolist()
    return [tuple(flat[row.start : row.stop]) for row in some.rows]


units_drawn = st.lists(st.lists(st.integers(1, 20), min_size=1, max_size=8), max_size=40)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(units_drawn, st.integers(1, 3), st.booleans())
def test_every_drawn_unit_is_computed_once_and_whole(drawn: list[list[int]], world: int, alone: bool) -> None:
    shape = replace(PACKING, alone=alone)
    units: list[Unit | None] = [unit(*lengths, first=1000 * (n + 1)) for n, lengths in enumerate(drawn)]
    units.append(None)  # a canary whose coin said out
    ranks = [passes_of(range(len(units)), units, shape, PAD, rank, world) for rank in range(world)]
    assert len({len(passes) for passes in ranks}) == 1
    seen: Counter[tuple[int, ...]] = Counter()
    for passes in ranks:
        going: list[int] = []
        for some in passes:
            rows = tokens_of(some)
            seen.update(row[: row.index(PAD)] if PAD in row else row for row in rows)
            owners = [row[0] // 1000 for row in rows]
            assert some.num_units == len(set(owners))
            assert len(some.units) == some.num_units  # neighbours
            if going:  # a unit that goes on has the next passes for itself
                assert set(owners) == set(going)
            going = owners if some.goes_on else []
            if not alone:
                assert some.input_ids_1M.shape == (1, shape.tokens)
                assert some.num_units <= shape.most_units
        assert not going
    assert seen == Counter(sequence.input_ids for one in units if one for sequence in one.sequences)


def test_the_last_token_of_a_full_pass_is_padding() -> None:
    full = [unit(20), unit(20), unit(20), unit(3)]
    (some,) = passes_of(range(4), full, PACKING, PAD)
    assert some.rows[-1].stop == PACKING.tokens - 1
    more = passes_of(range(5), [*full, unit(1)], PACKING, PAD)
    assert len(more) == 2


def test_targets_come_in_packs_that_the_last_position_fills() -> None:
    some = lay_out([unit(4), unit(7)], PACKING, PAD)
    targets = some.targets
    assert (targets.count, len(targets.position_N)) == (9, 16)
    assert targets.position_N.tolist() == [0, 1, 2, 4, 5, 6, 7, 8, 9] + [63] * 7
    assert targets.target_N.tolist()[:9] == [11, 12, 13, 11, 12, 13, 14, 15, 16]
    assert set(some.input_ids_1M.flatten().tolist()[11:]) == {PAD}


def test_a_unit_that_is_larger_than_a_pass_shares_none_of_its_passes() -> None:
    units = [unit(2), unit(20, 20, 20, 20, 5), unit(3)]
    passes = passes_of(range(3), units, PACKING, PAD)
    kinds = [(some.num_units, some.goes_on, len(some.rows)) for some in passes]
    assert kinds == [(1, True, 3), (1, False, 2), (2, False, 2)]


def test_preference_pairs_are_never_cut() -> None:
    pairs = replace(PACKING, rows_each=2)
    passes = passes_of([0], [unit(20, 19, 20, 18, 4, 5)], pairs, PAD)
    assert [len(some.rows) for some in passes] == [2, 4]
    passes = passes_of([0], [unit(20, 19, 20, 18)], replace(pairs, alone=True), PAD)
    assert [tuple(some.input_ids_1M.shape) for some in passes] == [(2, 20), (2, 20)]


def test_passes_are_nearly_as_few_as_can_be() -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(20, 129, (2_000,), generator=generator).tolist()
    shape = replace(PACKING, tokens=512, most_units=64, max_length=128)
    passes = passes_of(range(2_000), [unit(length) for length in lengths], shape, PAD)
    assert sum(lengths) / (512 * len(passes)) > 0.97


@pytest.mark.full
def test_packing_a_hundred_thousand_units_takes_no_time() -> None:
    lengths = torch.randint(20, 129, (100_000,), generator=torch.Generator().manual_seed(0)).tolist()
    units = [unit(length) for length in lengths]
    begun = time.process_time()
    sized = [(n, [length]) for n, length in enumerate(lengths)]
    groups = list(packing._grouped(sized, replace(PACKING, tokens=512, most_units=64)))
    assert time.process_time() - begun < 2
    assert sum(len(group) for group, _ in groups) == len(units)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.integers(2, 300_000), st.integers(1, 64))
def test_packs_of_targets_end_with_a_block_of_every_thread(vocabulary: int, threads: int) -> None:
    """Elementwise kernels give what is left of a block another rounding, so that a target's bits would follow its place."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "get_num_threads", lambda: threads)
        device = torch.device("cpu")
        pack = loss.pack_of(vocabulary, device)
        at_once = loss._at_once(Targets.of([], [], (1, 1), pack), torch.empty(0, vocabulary))
    for count in (pack, at_once):
        assert count * vocabulary % (32 * threads) == 0
    assert pack % at_once == 0


@pytest.mark.parametrize(
    ("batch", "longest", "least", "tokens"),
    [(16, 512, 16_384, 8320), (64, 512, 16_384, 16_512), (4, 100, 16_384, 512), (32, 512, 13_056, 12_928)],
)
def test_a_pass_is_no_larger_than_a_batch_can_be_and_holds_no_more_than_fits(batch, longest, least, tokens):
    """The last one: 25 rows of full length are what a GPU has room for twice over, and 26 had taken the slow way."""
    assert pass_length(batch, longest, None, multiple=128, least=least, most=least) == tokens


# --- what joins a batch is drawn as it is accounted -------------------------------------------------------------------

ALARM = 1e-9
SLOTS, DRAWS = 60, 4000
RATE = 0.15


@pytest.fixture(scope="module")
def joined(seed: int) -> np.ndarray:
    """DRAWS x SLOTS of 0 and 1, through the sampler as it runs; test_mutations.py holds them to the accounted rate."""
    sampler = PoissonSampler(tm.schedule(100, 15), SLOTS, entropy=2**127 + seed)
    rows = np.zeros((DRAWS, SLOTS))
    for row in rows:
        row[sampler.draw()] = 1
    return rows


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
    assert passes_of([], [], tm.packing(), 0) == []
    assert passes_of([0, 1], [None, Unit(())], tm.packing(), 0) == []


def test_an_example_by_itself_is_padded_right_and_learns_nothing_from_padding() -> None:
    (one,) = tm.units([(5, 2)])
    some = lay_out([one], tm.packing(tm.ALONE), 61)
    assert some.input_ids_1M.shape == (2, 8)
    assert some.num_units == 1
    learned = []
    for row, sequence in enumerate(one.sequences):
        tokens = len(sequence.input_ids)
        assert some.input_ids_1M[row].tolist() == [*sequence.input_ids, *[61] * (8 - tokens)]
        learned += [8 * row + place - 1 for place, target in enumerate(sequence.loss_mask) if target]
        assert some.denominator_R[row] == sequence.denominator
    assert some.targets.position_N[: some.targets.count].tolist() == learned
    assert some.denominator_R.dtype == torch.float32
