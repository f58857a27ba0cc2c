"""What a run with banded noise adds is C^-1 times independent noise, exactly, and only the group whose turn it is joins."""

from __future__ import annotations

import itertools
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import tiny_models as tm
import torch
from mutants import around
from scipy import stats

from dpllm.privacy import banded
from dpllm.privacy.noise import BandedNoise, GaussianNoise, spacing_of
from dpllm.privacy.plan import Plan
from dpllm.privacy.sampling import CyclicSchedule, PoissonSampler, groups

CPU = torch.device("cpu")
BANDS, STEPS, SEQUENCES = 4, 9, 100_000
ALARM = 1e-4  # p-value below which a statistic of fixed seeds is called wrong
COEFFICIENTS = banded.strategy(banded.LearningRate(warmup=0.05), STEPS, BANDS)


def promise(sigma: float = 0.7, bound: float = 0.05) -> Plan:
    made = tm.plan(bound, sigma, tm.schedule(100, 10, STEPS))
    return made.model_copy(update={"coefficients": COEFFICIENTS})


def released(noise: BandedNoise, scale: float = 3.0, size: int = SEQUENCES) -> banded.Floats:
    """noise_TP of one attempt, over its scale."""
    rows = []
    for _ in range(STEPS):
        row_P = torch.zeros(size, dtype=torch.float64)
        noise.add_to(row_P, scale)
        rows.append(row_P.numpy() / scale)
    return np.stack(rows)


def inverse() -> banded.Floats:
    d_T = banded.inverse(COEFFICIENTS, STEPS)
    return np.stack([np.concatenate([np.zeros(t), d_T[: STEPS - t]]) for t in range(STEPS)], axis=1)


def looks_like(noise_TP: banded.Floats) -> bool:
    """Whether the sequences have covariance C^-1 C^-T, and give independent normal rows if C is applied."""
    expected_TT = inverse() @ inverse().T
    found_TT = noise_TP @ noise_TP.T / SEQUENCES
    square_TT = expected_TT**2 + np.outer(np.diag(expected_TT), np.diag(expected_TT))
    deviation_TT = np.sqrt(square_TT / SEQUENCES)  # of a sample covariance of normal variates
    return bool((np.abs(found_TT - expected_TT) < 5 * deviation_TT).all()) and independent_normal(noise_TP)


def independent_normal(noise_TP: banded.Floats) -> bool:
    """Whether C times the noise has independent normal rows."""
    z_TP = banded.whiten(COEFFICIENTS, noise_TP)
    normal = min(stats.kstest(row_P, "norm").pvalue for row_P in z_TP) > ALARM
    between = np.abs(np.corrcoef(z_TP)[np.triu_indices(STEPS, 1)]).max() < 5 / noise_TP.shape[1] ** 0.5
    return normal and bool(between)


@pytest.mark.parametrize("secure", [False, True])
def test_a_hundred_thousand_sequences_have_the_covariance_of_the_strategy(secure: bool) -> None:
    assert looks_like(released(BandedNoise(GaussianNoise(2**90 + 1, CPU, secure=secure), COEFFICIENTS)))


def test_noise_of_other_strategies_is_seen() -> None:
    def rows(coefficients: tuple[float, ...], past: list[torch.Tensor] | None = None) -> banded.Floats:
        noise = BandedNoise(GaussianNoise(2**90 + 1, CPU), coefficients)
        noise._past = past or []
        return released(noise)

    first = BandedNoise(GaussianNoise(5, CPU), COEFFICIENTS)
    released(first)
    assert not looks_like(rows(COEFFICIENTS, first._past))  # buffers replayed after a resume
    assert not looks_like(rows(COEFFICIENTS[:-1]))
    assert not looks_like(rows((COEFFICIENTS[0] * 1.02, *COEFFICIENTS[1:])))  # too little noise
    assert not looks_like(rows((1.0,)))


def test_what_is_released_is_the_matrix_mechanism_rounded_exactly() -> None:
    """In exact arithmetic: C n - s z is c_0 times a rounding error of at most half a spacing, whatever was added to n."""
    scale, size = 3.0, 50
    spacing, noise = spacing_of(scale), BandedNoise(GaussianNoise(77, CPU), COEFFICIENTS)
    fresh = GaussianNoise(77, CPU)
    sums_TP = torch.randint(-(2**40), 2**40, (STEPS, size)).double() * spacing
    added_TP = sums_TP.clone()
    for row_P in added_TP:
        noise.add_to(row_P, scale)
    steps = (added_TP - sums_TP) / spacing
    assert torch.equal(steps, steps.round())
    for t in range(STEPS):
        z_P = (fresh.draw(size) * (scale / spacing)).tolist()
        for place in range(size):
            row = sum(Fraction(c) * int(steps[t - j, place]) for j, c in enumerate(COEFFICIENTS) if j <= t)
            assert abs(row - Fraction(z_P[place])) <= Fraction(COEFFICIENTS[0]) * (Fraction(1, 2) + Fraction(1, 2**12))


def test_buffers_are_few_and_begin_empty() -> None:
    noise, row_P = BandedNoise(GaussianNoise(1, CPU), COEFFICIENTS), torch.zeros(10, dtype=torch.float64)
    for t in range(STEPS):
        assert len(noise._past) == min(t, BANDS - 1)
        noise.add_to(row_P, 1.0)
    assert len({id(item) for item in noise._past}) == BANDS - 1


def test_a_long_vector_is_made_in_pieces_that_know_their_own_past(monkeypatch: pytest.MonkeyPatch) -> None:
    def rows() -> banded.Floats:
        fresh, normal = GaussianNoise(9, CPU), np.random.default_rng(9)
        monkeypatch.setattr(fresh, "draw", lambda size: torch.from_numpy(normal.standard_normal(size)))
        return released(BandedNoise(fresh, COEFFICIENTS), 1.0, 1000)

    whole = rows()
    monkeypatch.setattr("dpllm.privacy.noise.CHUNK", 64)
    assert np.array_equal(whole, rows())


def test_the_engine_adds_it_and_keeps_its_scale() -> None:
    made = promise()
    engine = tm.make_engine(tm.build("llama"), made, noise_entropy=2**80 + 5)
    empty = torch.zeros(engine.size, dtype=torch.float64)
    rows = torch.stack([engine._release(empty.clone()) for _ in range(STEPS)]).double().numpy()
    scale = engine.lattice()["noise_over_max_grad_norm"] * made.max_grad_norm
    assert independent_normal(rows * made.schedule.expected_batch_size / scale)
    noisier = (banded.step_noise(COEFFICIENTS, STEPS) * COEFFICIENTS[0]) ** 2  # than the first step
    assert float(np.var(rows[-1]) / np.var(rows[0])) == pytest.approx(noisier, rel=0.1)


@pytest.mark.parametrize(("rank", "buffers"), [(None, BANDS - 1), (0, BANDS - 1), (1, 0)])
@pytest.mark.parametrize("momentum", [0, 1])
def test_rehearsing_draws_no_noise_and_holds_room_for_what_a_step_holds(momentum, rank, buffers, monkeypatch):
    engine, ones, sizes = tm.make_engine(tm.build("llama"), promise()), torch.ones, []
    engine._optimizer = torch.optim.SGD(engine.parameters.values(), lr=0.1, momentum=0.9 * momentum)
    monkeypatch.setattr("dpllm.privacy.engine._rank", lambda: rank)
    monkeypatch.setattr(torch, "ones", lambda size, **more: sizes.append(size) or ones(size, **more))
    engine.rehearse([])
    assert engine._noise._past == []
    assert sizes[0] == (2 * buffers + momentum) * engine.size  # float64, held as twice as many float32


# --- groups ----------------------------------------------------------------------------------------------------------


def draws(turns: CyclicSchedule, number: int, slots: int = 60, batch: int = 10, key: int = 3) -> list[list[int]]:
    sampler = PoissonSampler(tm.schedule(slots, batch), slots, key, turns=turns)
    return [sampler.draw() for _ in range(number)]


def test_groups_are_uniform_and_stay() -> None:
    result = groups(CyclicSchedule(BANDS, 2**200 + 9), 40_000)
    assert stats.chisquare(np.bincount(result, minlength=BANDS)).pvalue > ALARM
    assert set(result) == set(range(BANDS))
    assert np.array_equal(result, groups(CyclicSchedule(BANDS, 2**200 + 9, first_step=17), 40_000))
    assert not np.array_equal(result, groups(CyclicSchedule(BANDS, 2**200 + 10), 40_000))
    # They follow from a slot's place alone: neighbours say nothing, and a longer list begins the same.
    assert np.array_equal(result, groups(CyclicSchedule(BANDS, 2**200 + 9), 50_000)[:40_000])
    assert abs(np.corrcoef(result[:-1], result[1:])[0, 1]) < 5 / 200


def test_each_of_the_group_joins_its_steps_by_its_own_coin_and_nobody_else() -> None:
    turns, number, slots, rate = CyclicSchedule(BANDS, 12345), 12_000, 60, BANDS * 10 / 60
    found, group_N = draws(turns, number, slots), groups(turns, slots)
    joined_TN = np.zeros((number, slots), dtype=bool)
    for step, drawn in enumerate(found):
        joined_TN[step, drawn] = True
        assert set(group_N[drawn]) <= {step % BANDS}
    times_N, rounds = joined_TN.sum(axis=0), number // BANDS
    excess = (times_N - rounds * rate) ** 2 / (rounds * rate * (1 - rate))
    assert stats.chi2.sf(excess.sum(), slots) > ALARM
    for group in range(BANDS):
        mine = joined_TN[group::BANDS][:, group_N == group]
        pairs = np.corrcoef(mine.T)[np.triu_indices(mine.shape[1], 1)]
        assert np.abs(pairs).max() < 5.5 / rounds**0.5
    assert np.mean([len(drawn) for drawn in found]) == pytest.approx(10, rel=0.1)  # B, over the draw of the groups


def test_steps_of_a_unit_stay_apart_over_a_resume_with_lost_steps() -> None:
    """The second attempt begins where charges ended, not where the checkpoint was."""
    first = draws(CyclicSchedule(BANDS, 99), 6, key=1)  # of which the last three were lost, and are counted
    second, from_the_checkpoint = (draws(CyclicSchedule(BANDS, 99, first_step=step), 9, key=2) for step in (6, 3))
    assert apart([*first, *second])
    assert not apart([*first, *from_the_checkpoint])


def apart(drawn: list[list[int]]) -> bool:
    """Whether no slot joins twice within ``BANDS`` steps."""
    steps = [[step for step, slots in enumerate(drawn) if slot in slots] for slot in range(60)]
    return all(later - earlier >= BANDS for at in steps for earlier, later in itertools.pairwise(at))


def fewer_groups(draw: Any, self: PoissonSampler) -> list[int]:
    self._group_N = self._group_N % (BANDS - 1)
    self._turns = CyclicSchedule(BANDS - 1, 5)
    return draw(self)


def two_turns_of_slot_0(draw: Any, self: PoissonSampler) -> list[int]:
    self._group_N[0] = self._step % 2
    return draw(self)


@pytest.mark.parametrize("change", [fewer_groups, two_turns_of_slot_0])
def test_groups_of_b_less_one_and_a_unit_in_two_groups_are_seen(change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert apart(draws(CyclicSchedule(BANDS, 5), 40))
    around(PoissonSampler, "draw", change)(monkeypatch)
    assert not apart(draws(CyclicSchedule(BANDS, 5), 40))
