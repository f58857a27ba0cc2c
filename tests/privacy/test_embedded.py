"""Clusters and classifiers of vectors: what one unit moves, what is noised, and that nothing else is read off the vectors."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution as pld
from scipy import stats
from sklearn.cluster import KMeans
from sklearn.linear_model import LinearRegression

from dpllm.privacy import embedded
from dpllm.privacy.accounting import epsilon
from dpllm.privacy.embedded import STEPS, Projection, ada_ssp, event_of, k_means, lattice, nearest, unit_length
from dpllm.privacy.events import Gaussian, SelfComposed
from dpllm.privacy.noise import spacing_of

ALARM = 1e-8
SIGMA, CLUSTERS, CLASSES, ROUNDS, DIMENSIONS = 2.0, 4, 3, 4, 6
Data = tuple[np.ndarray, np.ndarray, np.ndarray]  # rows, labels, units


def made(rng: np.random.Generator, units: int = 20, most: int = 5) -> Data:
    """Rows of every length up to 1, a little above it by rounding, and some of zeros; the last unit has one row, of length 1."""
    units_R = np.append(np.repeat(np.arange(units - 1), rng.integers(1, most + 1, units - 1)), units - 1)
    rows_RP = unit_length(rng.normal(size=(len(units_R), DIMENSIONS)))
    rows_RP *= rng.choice([1 + 1e-13, 1.0, 0.3, 0.0], (len(units_R), 1), p=[0.3, 0.4, 0.2, 0.1])
    rows_RP[-1] = unit_length(np.ones((1, DIMENSIONS)))
    return rows_RP, rng.integers(0, CLASSES, len(units_R)), units_R


def without(data: Data, unit: int) -> Data:
    keep_R = data[2] != unit
    rows_RP, labels_R, units_R = (part[keep_R] for part in data)
    return rows_RP, labels_R, units_R


class Script:
    """Stands for the noise: keeps what should be noised, and releases what was written beforehand."""

    def __init__(self, releases: list[np.ndarray]) -> None:
        self.releases, self.exact, self.scales, self.charged = releases, list[np.ndarray](), list[float](), list[int]()

    def __call__(self, sums: np.ndarray, scale: float) -> np.ndarray:
        assert len(self.charged) == len(self.exact) + 1, "a round is charged before it is drawn"
        self.exact.append(sums.copy())
        self.scales.append(scale)
        return self.releases[len(self.exact) - 1]


def run(kind: str, data: Data, patch: pytest.MonkeyPatch, releases: list[np.ndarray]) -> tuple[Script, Any]:
    script, (rows_RP, labels_R, units_R) = Script(releases), data
    with patch.context() as inner:
        inner.setattr(embedded, "_noised", script)
        if kind == "clusters":
            return script, k_means(rows_RP, units_R, CLUSTERS, SIGMA, ROUNDS, script.charged.append)
        return script, ada_ssp(rows_RP, labels_R, units_R, CLASSES, SIGMA, script.charged.append)


def written(kind: str, rng: np.random.Generator) -> list[np.ndarray]:
    """Releases that nobody's data gave."""
    if kind == "clusters":
        sizes_KP = np.eye(1, DIMENSIONS + 1, DIMENSIONS) * 40
        return [rng.normal(size=(CLUSTERS, DIMENSIONS + 1)) + sizes_KP for _ in range(ROUNDS)]
    return [rng.normal(size=(DIMENSIONS + 1,) * 2), rng.normal(size=(DIMENSIONS + 1, CLASSES))]


@pytest.mark.parametrize("kind", ["clusters", "classifier"])
@pytest.mark.parametrize("case", range(6))
def test_a_unit_that_is_taken_out_moves_no_release_by_more_than_its_sensitivity(kind, case, seed, monkeypatch):
    """Given the releases before it; mutants: no rounding towards zero, a row and not a unit, a count of each row."""
    rng = np.random.default_rng((seed, case))
    data, releases = made(rng, most=1000 if case == 0 else 5), written(kind, rng)
    whole, _ = run(kind, data, monkeypatch, releases)
    assert whole.scales == [math.sqrt(2) * SIGMA] * ROUNDS if kind == "clusters" else [SIGMA] * 2
    largest = 0.0
    for unit in range(20):
        rest, _ = run(kind, without(data, unit), monkeypatch, releases)
        for one, other, scale in zip(whole.exact, rest.exact, whole.scales, strict=True):
            moved = (one - other).ravel()
            assert np.array_equal(moved, np.rint(moved)), "whole steps"
            square = sum(int(part) ** 2 for part in moved)
            assert square <= Fraction(scale) ** 2 / Fraction(SIGMA) ** 2 * STEPS**2 * (1 + Fraction(1, 2**50))
            largest = max(largest, math.sqrt(square) / STEPS * SIGMA / scale)
    assert largest > 0.99 * (1.0 if kind == "clusters" else 0.5), "and no sensitivity is stated for nothing"


@pytest.mark.parametrize("kind", ["clusters", "classifier"])
def test_what_is_published_follows_from_the_releases_alone(kind, seed, monkeypatch):
    """Mutants: starts, projection or ridge from the data, counts without noise, rounds until nothing moves."""
    rng = np.random.default_rng(seed)
    releases = written(kind, rng)
    first, published = run(kind, made(rng), monkeypatch, releases)
    for data in (made(rng, units=200), without(made(rng, units=1), 0)):
        second, again = run(kind, data, monkeypatch, releases)
        assert all(np.array_equal(one, other) for one, other in zip(published, again, strict=True))
        assert second.charged == first.charged == list(range(1, len(releases) + 1))


@pytest.mark.parametrize("kind", ["clusters", "classifier"])
def test_every_coordinate_is_noised_by_as_much_as_the_event_says(kind: str, seed: int) -> None:
    """The noise of each is normal, on the lattice, and independent of the others."""
    rng = np.random.default_rng(seed)
    exact = np.trunc(rng.normal(size=(30, 100)) * STEPS)
    scale = (math.sqrt(2) if kind == "clusters" else 1.0) * SIGMA
    noise = embedded._noised(exact, scale) - exact / STEPS
    assert stats.kstest(noise.ravel() / scale, "norm").pvalue > ALARM
    assert np.array_equal(noise * 2**31, np.rint(noise * 2**31))
    assert stats.pearsonr(noise[:, :-1].ravel(), noise[:, 1:].ravel()).pvalue > ALARM


def test_the_events_are_gaussians_of_the_number_of_releases() -> None:
    assert event_of("clusters", 3.0, 7) == SelfComposed(7, Gaussian(3.0))
    assert event_of("classifier", 3.0, 7) == SelfComposed(2, Gaussian(3.0))
    direct = pld.from_gaussian_mechanism(3.0, value_discretization_interval=1e-4).self_compose(7)
    assert epsilon(event_of("clusters", 3.0, 7), 1e-6, "zero_out") == pytest.approx(
        direct.get_epsilon_for_delta(1e-6), rel=1e-6
    )


def start(mean: np.ndarray) -> np.ndarray:
    """Where clusters begin, of the mean of all rows."""
    around = math.sqrt(max(0.0, 1 - mean @ mean)) / 2 * embedded.public_directions(CLUSTERS, DIMENSIONS)
    return mean + around


def blobs(seed: int, units: int = 600) -> Data:
    rng = np.random.default_rng(seed)
    middles = unit_length(rng.normal(size=(CLASSES, DIMENSIONS)))
    labels = np.arange(units) % CLASSES
    return unit_length(middles[labels] + 0.3 * rng.normal(size=(units, DIMENSIONS))), labels, np.arange(units)


def test_with_hardly_any_noise_clusters_are_those_of_scikit_learn(seed: int) -> None:
    rows, _, units = blobs(seed)
    sizes, centres = k_means(rows, units, CLUSTERS, 1e-4, 60, lambda _: None)
    result = KMeans(CLUSTERS, init=start(rows.mean(axis=0)), n_init=1, max_iter=60, tol=0).fit(rows)
    assert centres == pytest.approx(result.cluster_centers_, abs=1e-3)
    assert np.array_equal(nearest(lattice(rows), centres), result.labels_)
    assert np.abs(sizes - np.bincount(result.labels_)).max() <= 1


def test_with_hardly_any_noise_a_classifier_is_least_squares(seed: int) -> None:
    rows, labels, units = blobs(seed)
    sizes, weights = ada_ssp(rows, labels, units, CLASSES, 1e-4, lambda _: None)
    result = LinearRegression().fit(rows, np.eye(CLASSES)[labels])
    scores = embedded.scores(rows, weights)
    assert scores == pytest.approx(result.predict(rows), abs=1e-2)
    assert np.array_equal(scores.argmax(axis=1), result.predict(rows).argmax(axis=1))
    assert sizes.tolist() == [200, 200, 200]


@pytest.mark.parametrize("kind", ["clusters", "classifier"])
def test_counts_err_by_more_than_stated_at_most_once_in_twenty(kind: str, seed: int) -> None:
    rows, labels, units = blobs(seed, 30)
    missed, many, error = 0, 600, embedded.figures("clusters", SIGMA, 2)["error_95"]
    for _ in range(many):
        if kind == "clusters":  # two rounds, of whose first all of the sum is known
            sizes, _ = k_means(rows, units, 2, SIGMA, 2, lambda _: None)
            missed += abs(sizes.sum() - 30) > math.sqrt(2) * (error - 0.5) + 1
        else:
            sizes, _ = ada_ssp(rows, labels, units, CLASSES, SIGMA, lambda _: None)
            missed += abs(sizes[0] - 10) > error
    assert missed <= stats.binom.ppf(1 - ALARM, many, 0.05)
    assert missed >= stats.binom.ppf(ALARM, many, 0.03)


def test_a_cluster_below_the_public_least_size_stays_where_it_started(monkeypatch: pytest.MonkeyPatch) -> None:
    least = embedded.least_size(SIGMA, DIMENSIONS)
    releases = [np.full((CLUSTERS, DIMENSIONS + 1), 0.5) for _ in range(ROUNDS)]
    for release in releases[1:]:
        release[:, -1] = [least, least - 1, -5.0, 2 * least]
    _, (sizes, centres) = run("clusters", blobs(0), monkeypatch, releases)
    mean = np.full(DIMENSIONS, 0.5)  # of the first release, whose count of 0.5 is taken for 1
    stays = embedded.within_ball(start(mean / max(1.0, math.sqrt((mean**2).sum()))))
    assert np.array_equal((centres == stays).all(axis=1), [False, True, True, False])
    assert sizes.tolist() == [least, least - 1, -5, 2 * least]


def test_the_mean_of_a_unit_is_exact_and_never_longer_than_its_rows(seed: int) -> None:
    rng = np.random.default_rng(seed)
    steps = np.rint(rng.normal(size=(1500, 3)) * STEPS)
    units = np.sort(rng.integers(0, 40, 1500)) * 3
    result = embedded.mean_by_unit(steps, units)
    for place, unit in enumerate(np.unique(units)):
        mine = steps[units == unit]
        exact = [Fraction(int(sum(column)), len(mine)) for column in mine.T.astype(int)]
        assert [int(item) for item in result[place]] == [math.trunc(item) for item in exact]
    assert embedded.mean_by_unit(steps[:0], units[:0]).shape == (0, 3)


def test_rows_of_zeros_add_nothing_and_a_unit_of_them_no_count(seed: int) -> None:
    rows, labels, units = blobs(seed)
    more = np.vstack([rows, np.zeros((50, DIMENSIONS))])
    units_too, labels_too = np.append(units, np.arange(600, 650)), np.append(labels, np.zeros(50, int))
    sizes, _ = ada_ssp(more, labels_too, units_too, CLASSES, 1e-4, lambda _: None)
    assert sizes.tolist() == [200, 200, 200]
    assert k_means(more, units_too, 3, 1e-4, 3, lambda _: None)[0].sum() == pytest.approx(600, abs=1)


@pytest.mark.parametrize("size", [4, 40, 700])
def test_a_projected_row_has_length_1_and_the_same_bits_in_any_company(size: int, seed: int) -> None:
    """Mutants: no length of 1, a centre of the rows themselves, a product of floats."""
    rng = np.random.default_rng(seed)
    vectors = unit_length(rng.normal(size=(200, size)))
    vectors[3] = 0.0
    around = Projection(unit_length(rng.normal(size=(1, size)))[0] / 2, 16)
    together = around(vectors)
    alone = np.concatenate([around(vector[None]) for vector in vectors])
    assert together.tobytes() == alone.tobytes()
    lengths = np.sqrt((together**2).sum(axis=1))
    assert np.delete(lengths, 3) == pytest.approx(1.0, abs=1e-12)
    assert not together[3].any()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_has_no_vector(bad: float) -> None:
    rows = unit_length(np.array([[1.0, bad], [3e300, 4e300], [0.0, 0.0], [3e-310, 4e-310]]))
    assert rows.tolist() == [[0, 0], pytest.approx([0.6, 0.8]), [0, 0], pytest.approx([0.6, 0.8], rel=1e-3)]


@pytest.mark.parametrize("units", [1000, 10**6, 3 * 10**8])
def test_with_the_least_noise_a_sum_over_all_units_is_exact(units: int) -> None:
    """Mutant: a quarter of it."""
    scale = embedded.least_noise(units)
    assert units / spacing_of(scale) <= 2**52
    assert units / spacing_of(scale / 4) > 2**52


def test_the_most_noise_that_is_drawn_falls_on_the_lattice_of_the_sums() -> None:
    """More is refused before anything is reserved."""
    scale = math.sqrt(2) * embedded.MOST_NOISE
    assert spacing_of(scale) <= 1 / embedded.STEPS < spacing_of(2 * scale)


def test_sizes_are_those_of_the_released_centres(seed: int) -> None:
    """A mutant moves the centres once more after the last count."""
    rows, _, units = blobs(seed)
    for rounds in (2, 6):
        sizes, centres = k_means(rows, units, CLUSTERS, 1e-3, rounds, lambda _: None)
        assert sizes.tolist() == np.bincount(nearest(lattice(rows), centres), minlength=CLUSTERS).tolist()


def test_public_directions_are_the_same_for_everybody() -> None:
    """A run of another version starts there too."""
    first = embedded.public_directions(2, 3)
    assert first.round(6).tolist() == [[0.493236, -0.646382, 0.582158], [-0.445667, -0.192128, 0.874338]]
    assert embedded.public_directions(2, 3, b"proj").tolist() != first.tolist()
