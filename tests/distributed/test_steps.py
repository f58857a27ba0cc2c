"""Several processes take the steps that one would: one logical batch, one sum, one noise, one update."""

from pathlib import Path

import numpy as np
import pytest
import torch
from programs import run_program
from remembered import Once
from scipy import stats
from torch import Tensor

from dpllm.privacy import banded
from dpllm.privacy.noise import GaussianNoise, noise_scale

STEPS, C, SIGMA, B = 3, 0.05, 0.7, 12
SLOTS, DRAWS, RATE = 40, 1500, 10 / 40
ALARM = 1e-4  # p-value below which a statistic of fixed seeds is called wrong
WORLDS = [1, 2, 3]

Results = dict[str, dict[str, Tensor]]


@pytest.fixture(scope="module")
def runs(once: Once) -> dict[int, list[Results]]:
    """Number of processes -> what each of them did."""
    folder = once("ranks", lambda folder: run_program(Path(__file__).with_name("step_worker.py"), folder))
    return {
        world: [torch.load(folder / f"world{world}_rank{rank}.pt", weights_only=True) for rank in range(world)]
        for world in WORLDS
    }


def total(ranks: list[Results], job: str, name: str) -> Tensor:
    return torch.stack([rank[job][name] for rank in ranks]).sum(dim=0)


@pytest.mark.parametrize("world", [2, 3])
def test_the_ranks_sums_add_up_to_that_of_one_process_and_all_hold_its_parameters_bit_for_bit(
    runs: dict[int, list[Results]], world: int
) -> None:
    ranks, alone = [rank["steps"] for rank in runs[world]], runs[1][0]["steps"]
    for step in range(STEPS):
        assert int(total(runs[world], "steps", f"units{step}")) == int(alone[f"units{step}"])
        assert all(int(rank[f"units{step}"]) > 0 for rank in ranks)
        assert len({int(rank[f"batches{step}"]) for rank in ranks}) == 1  # as many passes
        assert torch.equal(total(runs[world], "steps", f"sum{step}"), alone[f"sum{step}"])  # sums are exact
        assert all(torch.equal(rank[f"released{step}"], alone[f"released{step}"]) for rank in ranks)
    assert all(torch.equal(rank["weights"], alone["weights"]) for rank in ranks)


@pytest.mark.parametrize("world", WORLDS)
def test_noise_is_added_once_by_rank_0_at_the_same_places(runs: dict[int, list[Results]], world: int) -> None:
    """Noise of each rank would double the variance; noise of none is no privacy; another rank's key must not appear."""
    stream = GaussianNoise(1234, torch.device("cpu"))
    for step in range(STEPS):
        sum_P = total(runs[world], "steps", f"sum{step}")
        expected = (sum_P + noise_scale(SIGMA, C, sum_P.numel()) * stream.draw(sum_P.numel())) / B
        torch.testing.assert_close(runs[world][0]["steps"][f"released{step}"].double(), expected, rtol=1e-5, atol=1e-8)


@pytest.mark.parametrize("world", WORLDS)
def test_the_released_noise_has_standard_deviation_sigma_c_for_any_number_of_ranks(
    runs: dict[int, list[Results]], world: int
) -> None:
    rows = runs[world][0]["noise"]["rows"].double() * B / (SIGMA * C)
    for other in runs[world][1:]:
        assert torch.equal(runs[world][0]["noise"]["rows"], other["noise"]["rows"])
    square = float(rows.square().sum())
    assert 2 * min(stats.chi2.cdf(square, rows.numel()), stats.chi2.sf(square, rows.numel())) > ALARM
    assert stats.kstest(rows.flatten().numpy(), "norm").pvalue > ALARM
    between = np.corrcoef(rows.numpy())[np.triu_indices(len(rows), 1)]  # of two steps
    assert np.abs(between).max() < 6 / rows.shape[1] ** 0.5


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", ["one", "none", "empty_slot"])
def test_an_empty_share_waits_for_nobody_and_adds_nothing(
    runs: dict[int, list[Results]], world: int, name: str
) -> None:
    ranks, alone = runs[world], runs[1][0]["few"]
    assert len({int(rank["few"][f"{name}_batches"]) for rank in ranks}) == 1
    holding = [rank for rank in ranks if bool(rank["few"][f"{name}_sum"].any())]
    assert len(holding) == (1 if name == "one" else 0)
    assert torch.equal(total(ranks, "few", f"{name}_sum"), alone[f"{name}_sum"])
    for rank in ranks:
        assert torch.equal(rank["few"][f"{name}_released"], alone[f"{name}_released"])


@pytest.mark.parametrize("world", WORLDS)
def test_sampling_masks_agree_with_one_global_poisson_draw(runs: dict[int, list[Results]], world: int) -> None:
    seen = torch.stack([rank["masks"]["seen"] for rank in runs[world]]).numpy()  # ranks, draws, slots
    joined = seen.sum(axis=0)
    assert joined.max() == 1  # nobody twice, on two ranks or one
    assert np.array_equal(joined, runs[1][0]["masks"]["seen"].numpy())  # the very draws of one process
    position = (joined.sum(axis=0) - DRAWS * RATE) ** 2 / (DRAWS * RATE * (1 - RATE))
    assert stats.chi2.sf(position.sum(), SLOTS) > ALARM
    sizes = np.bincount(joined.sum(axis=1), minlength=SLOTS + 1)
    expected = DRAWS * stats.binom.pmf(np.arange(SLOTS + 1), SLOTS, RATE)
    kept = expected > 5
    both = ((sizes - expected) ** 2 / expected)[kept].sum()
    assert stats.chi2.sf(both, kept.sum() - 1) > ALARM
    # Whichever ranks two slots are on: with a stream for each rank, equal seeds would make them join together.
    pairs = np.corrcoef(joined.T)[np.triu_indices(SLOTS, 1)]
    assert np.abs(pairs).max() < 5 / DRAWS**0.5  # of 780 pairs
    load = seen.sum(axis=(1, 2))
    # Dealt out by passes of four at most: the first rank has one more at most.
    assert load.max() - load.min() <= 4 * DRAWS


@pytest.mark.parametrize("world", WORLDS)
def test_banded_noise_is_rank_0_s_alone_and_all_ranks_know_whose_turn_it_is(
    runs: dict[int, list[Results]], world: int
) -> None:
    first, *others = (rank["banded_noise"] for rank in runs[world])
    for other in others:
        assert torch.equal(first["rows"], other["rows"])
        assert torch.equal(first["joined"], other["joined"])
        assert int(other["held"]) == 0  # buffers lie where noise is added
    assert int(first["held"]) == 2
    assert torch.equal(first["rows"], runs[1][0]["banded_noise"]["rows"])
    scale = noise_scale(SIGMA, C, first["rows"].shape[1])
    coefficients = banded.strategy(banded.LearningRate(warmup=0.05), 3 * STEPS, 3)
    z_TP = banded.whiten(coefficients, first["rows"].numpy() / scale)
    assert min(stats.kstest(row_P, "norm").pvalue for row_P in z_TP) > ALARM
    assert np.abs(np.corrcoef(z_TP)[np.triu_indices(3 * STEPS, 1)]).max() < 6 / z_TP.shape[1] ** 0.5
    joined = first["joined"].numpy()
    assert (joined[:3].sum(axis=0) <= 1).all()
    assert all((joined[t : t + 3].sum(axis=0) <= 1).all() for t in range(3 * STEPS - 2))
