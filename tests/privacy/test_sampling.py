"""What runs is what is accounted: each slot joins independently at rate q, whole, once, on one rank."""

from __future__ import annotations

import checks
import numpy as np
import pytest
import tiny_models as tm
import torch
from scipy import stats

from dpllm.privacy.noise import SecretStream
from dpllm.privacy.packing import lay_out, passes_of
from dpllm.privacy.sampling import PoissonSampler
from dpllm.privacy.schedule import Unit

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
