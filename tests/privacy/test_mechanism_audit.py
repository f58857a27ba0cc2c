"""The audit of the mechanism finds what is broken in the real engine, and nothing where nothing is."""

from __future__ import annotations

import io
import json
import math
from dataclasses import asdict, replace
from typing import Any

import mutants
import numpy as np
import pytest
import tiny_models as tm
import torch
from rich.console import Console
from scipy import stats

from dpllm.auditing import mechanism_report, terminal
from dpllm.auditing.mechanism_report import ALPHA, MechanismReport, Pair, contradictions
from dpllm.errors import ConfigError
from dpllm.lab import mechanism, probe
from dpllm.lab.mechanism import audit_mechanism
from dpllm.lab.replay import replay
from dpllm.privacy.engine import Engine
from dpllm.privacy.noise import GaussianNoise
from dpllm.privacy.plan import Plan, make_plan
from dpllm.privacy.sampling import PoissonSampler
from dpllm.recipe.config import RunConfig
from dpllm.statement.run_files import PlanRecord

MODES = ("flat", "automatic", "per_layer", "adaptive")
STEPS, CANARIES, PAIRS = 50, 100, 2
UNITS = 1000


pytestmark = pytest.mark.usefixtures("one_thread")


def config(batch: int = 200, **privacy: Any) -> RunConfig:
    """Noise that is set: calibrating it takes longer than the audit."""
    settings = {"noise_multiplier": 1.0, "epsilon": 1e4, "max_grad_norm": 0.3, **privacy}
    return tm.recipe(privacy=settings, train={"batch_size": batch, "steps": STEPS})


@pytest.fixture(scope="module")
def plans() -> dict[str, Plan]:
    return {mode: make_plan(config(clipping=mode), UNITS) for mode in MODES}


def audited(plans: dict[str, Plan], entropy: int, mode: str = "flat", **privacy: Any) -> MechanismReport:
    return audit_mechanism(
        config(clipping=mode, **privacy),
        plan=plans[mode],
        steps=STEPS,
        canaries=CANARIES,
        pairs=PAIRS,
        entropy=entropy,
    )


# Broken engines.


@pytest.mark.parametrize("name", {**mutants.PLANNED, **mutants.SUBTLE})
def test_a_broken_engine_is_falsified(name, plans, monkeypatch, seed):
    ({**mutants.PLANNED, **mutants.SUBTLE})[name](monkeypatch)
    report = audited(plans, [seed, 1])
    assert report.verdict == "falsified"
    assert contradictions(report)


@pytest.mark.full
@pytest.mark.parametrize("mode", MODES[1:])
@pytest.mark.parametrize("name", mutants.PLANNED)
def test_a_broken_engine_is_falsified_in_every_clipping_mode(name, mode, plans, monkeypatch, seed):
    mutants.PLANNED[name](monkeypatch)
    assert audited(plans, [seed, 2], mode).verdict == "falsified"


def test_noise_missing_on_the_count_is_falsified(plans, monkeypatch, seed):
    draw = GaussianNoise.draw
    monkeypatch.setattr(GaussianNoise, "draw", lambda self, size: draw(self, size) * float(size > 1))
    report = audited(plans, [seed, 3], "adaptive")
    assert any("count" in line for line in contradictions(report))


@pytest.mark.parametrize("name", ["no clipping", "noise scaled by the wrong batch size"])
def test_the_bound_alone_refutes_what_is_badly_broken(name, monkeypatch, seed):
    """No test of the releases but the coins of the canaries; the noise is large enough for little to be stated."""
    recipe = config(noise_multiplier=12.0)
    plan = make_plan(recipe, UNITS)
    sound = probe.observe(recipe, plan, steps=40, canaries=400, generator=np.random.default_rng([seed, 4]))
    mutants.PLANNED[name](monkeypatch)
    broken = probe.observe(recipe, plan, steps=40, canaries=400, generator=np.random.default_rng([seed, 4]))
    stated = mechanism.accounting.epsilon(plan.event_after(40), 1e-9, "zero_out")
    bounds = [
        mechanism.epsilon_lower_bound(
            mechanism.canary_scores(seen, 0.2, 40), seen.inserted_M, delta=1e-9, alpha=ALPHA, guesses=[100, 200]
        )
        for seen in (sound, broken)
    ]
    assert bounds[0].value <= stated < bounds[1].value


# The unbroken engine.


def test_the_unbroken_engine_is_never_falsified(plans, full, seed):
    """And its p-values are at most p as often as p, for every test."""
    found: dict[str, list[float]] = {}
    for number in range(200 if full else 20):
        report = audited(plans, [seed, 5, number], MODES[number % len(MODES)])
        assert report.verdict == "consistent", report.reason
        for test in report.tests:
            found.setdefault(test.name, []).append(test.p_value)
    for name, p_values in found.items():
        for level in (0.01, 0.1):
            below = sum(p <= level for p in p_values)
            assert stats.binom.sf(below - 1, len(p_values), level) > 1e-8, (name, level, below)


def test_the_recipe_says_how_it_is_computed(plans, seed):
    assert audited(plans, [seed, 6], grad_sample_mode="ghost").verdict == "consistent"


def test_single_rows_are_audited_where_rows_are_sampled(seed):
    recipe = tm.recipe(
        data={"unit": "who", "max_examples_per_unit": 3, "sampling": "example"},
        privacy={"noise_multiplier": 1.0, "epsilon": 1e4},
        train={"batch_size": 200, "steps": STEPS},
    )
    plan = make_plan(recipe, UNITS)
    report = audit_mechanism(recipe, plan=plan, steps=STEPS, canaries=CANARIES, pairs=2, entropy=[seed, 7])
    assert report.verdict == "consistent"
    assert report.epsilon < report.claimed["epsilon"] * 2  # of one row, at a smaller delta
    assert all(pair.rows == 1 for pair in report.pairs)


def test_too_few_draws_are_inconclusive(seed):
    recipe = config(batch=1)
    plan = make_plan(recipe, 10_000)
    report = audit_mechanism(recipe, plan=plan, steps=20, canaries=50, pairs=1, entropy=[seed, 8])
    assert report.verdict == "inconclusive"
    assert report.resolution > mechanism_report.COARSEST


def test_other_randomness_every_time(plans):
    one, other = (audit_mechanism(config(), plan=plans["flat"], steps=2, canaries=20, pairs=1) for _ in range(2))
    assert [test.found for test in one.tests] != [test.found for test in other.tests]


# What is compared with what.


@pytest.mark.parametrize("mode", MODES)
def test_what_is_expected_is_what_the_engine_sums(mode, plans, monkeypatch, seed):
    """Without noise the two are equal: the tests measure the engine, not the audit's own arithmetic."""
    monkeypatch.setattr(GaussianNoise, "draw", lambda self, size: torch.zeros(size))
    seen = probe.observe(
        config(clipping=mode), plans[mode], steps=4, canaries=40, generator=np.random.default_rng([seed, 9])
    )
    assert np.abs(seen.expected_TP).max() > 0.1
    np.testing.assert_allclose(seen.released_TP, seen.expected_TP, atol=2e-6)
    own = np.sqrt(np.asarray(seen.own_MP.multiply(seen.own_MP).sum(axis=1))).ravel()
    assert own.max() <= 1 + 1e-9
    assert np.median(own) > (0.8 if mode == "per_layer" else 0.99)  # a canary's gradient has length C, its own part too
    assert max(seen.contributions) == pytest.approx(1.0, abs=0.12 if mode == "per_layer" else 2e-2)


def test_canaries_reach_coordinates_of_their_own(plans, seed):
    seen = probe.observe(config(), plans["flat"], steps=1, canaries=30, generator=np.random.default_rng([seed, 10]))
    products = np.asarray((seen.own_MP @ seen.own_MP.T).todense())
    assert np.abs(products - np.diag(np.diag(products))).max() == 0.0
    assert np.diag(products).min() > 0.0


def test_coins_are_fair_and_draws_come_from_the_sampler(plans, monkeypatch, seed):
    drawn: list[list[int]] = []
    draw = PoissonSampler.draw
    monkeypatch.setattr(PoissonSampler, "draw", lambda self: drawn.append(draw(self)) or drawn[-1])
    seen = probe.observe(config(), plans["flat"], steps=2, canaries=600, generator=np.random.default_rng([seed, 11]))
    assert seen.draws == drawn
    assert stats.binomtest(int(seen.inserted_M.sum()), 600, 0.5).pvalue > 1e-8


# Neighbouring batches.


@pytest.mark.parametrize("mode", MODES)
def test_one_unit_moves_what_is_released_by_at_most_c(mode, plans, full, seed):
    found: list[Pair] = []
    for number in range(5 if full else 1):
        generator = np.random.default_rng([seed, 12, number])
        found += replay(config(clipping=mode), plans[mode], pairs=8, generator=generator)
    assert all(pair.excess <= 1 for pair in found)
    assert any(pair.rows > 1 for pair in found)
    assert any(pair.physical_batches > 2 for pair in found)
    assert any(pair.rows > 3 for pair in found) or not full  # more than a physical batch holds
    assert found[0].units == 1  # its neighbour is the empty batch
    assert max(pair.released_difference for pair in found) > 0.7  # it is a unit that is left out
    if mode == "adaptive":
        assert max(pair.count_difference or 0.0 for pair in found) == 0.5


@pytest.mark.parametrize("method", [tm.FROZEN, {"method": "lora", "r": 8}, {**tm.LORA, "lora_a": "frozen"}])
def test_the_recipes_adapter_is_replayed(method, plans, seed):
    recipe = tm.recipe(adapter=method)
    found = replay(recipe, plans["flat"], pairs=3, generator=np.random.default_rng([seed, 13]))
    assert 0.5 < max(pair.excess for pair in found) <= 1


BROKEN_SUMS = (
    "no clipping", "a physical batch doubled", "clipping to 1.001 C", "rows clipped, not units",
    "pieces of a unit clipped each", "divided by the realised batch",
)  # fmt: skip


@pytest.mark.parametrize("name", BROKEN_SUMS)
def test_replay_sees_what_moves_more(name, plans, monkeypatch, seed):
    {**mutants.PLANNED, **mutants.SUBTLE}[name](monkeypatch)
    found = replay(config(), plans["flat"], pairs=8, generator=np.random.default_rng([seed, 14]))
    assert max(pair.excess for pair in found) > 1


def test_replay_sees_noise_that_depends_on_the_data(plans, monkeypatch, seed):
    """One variate more is drawn for every unit, so that the two streams part."""
    summed = Engine.clipped_sum

    def drawing(self: Engine, *batches: Any) -> Any:
        found = summed(self, *batches)
        self._noise.draw(1 + found[1].units)
        return found

    monkeypatch.setattr(Engine, "clipped_sum", drawing)
    found = replay(config(), plans["flat"], pairs=2, generator=np.random.default_rng([seed, 15]))
    assert max(pair.released_difference for pair in found) > 1
    assert max(pair.sum_difference for pair in found) <= 1 + 1e-6


# The report.


def test_the_report_is_json_and_a_table(plans, seed):
    report = audited(plans, [seed, 16], "adaptive")
    values = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert values["verdict"] == "consistent"
    assert {test["name"] for test in values["tests"]} == {test.name for test in report.tests}
    assert values["claimed"]["clipping"] == "adaptive"
    assert len(values["pairs"]) == PAIRS
    assert "the model is a small one" in values["scope"]
    console = Console(width=200, file=io.StringIO(), record=True)
    console.print(terminal.mechanism_table(report))
    shown = console.export_text()
    assert "Audit of the mechanism: consistent" in shown
    assert all(test.name in shown for test in report.tests)
    assert "lower bound" in shown
    unbounded = replace(report, epsilon=math.inf, resolution=math.inf)
    assert json.dumps(unbounded.to_json(), allow_nan=False)
    assert "private" not in f"{report.verdict} {report.reason}"


def test_alpha_is_paid_for_every_test_and_the_bound(plans, seed):
    report = audited(plans, [seed, 17])
    assert report.level * len(report.tests) + report.bound.alpha == pytest.approx(ALPHA)
    assert 2 * report.canaries * report.bound.delta <= report.bound.alpha / 100
    off = replace(report, tests=(replace(report.tests[0], p_value=report.level), *report.tests[1:]))
    assert mechanism_report.verdict(off)[0] == "falsified"
    nan = replace(report, tests=(replace(report.tests[0], p_value=math.nan), *report.tests[1:]))
    assert mechanism_report.verdict(nan)[0] == "falsified"
    assert mechanism_report.verdict(replace(report, largest_contribution=1 + 2e-6))[0] == "falsified"
    assert mechanism_report.verdict(replace(report, largest_contribution=math.nan))[0] == "falsified"
    assert (
        mechanism_report.verdict(replace(report, bound=report.bound.model_copy(update={"value": report.epsilon + 1})))[
            0
        ]
        == "falsified"
    )


def test_a_plan_comes_back_from_its_file(plans):
    for plan in plans.values():
        values = json.loads(json.dumps(plan.to_json()))
        again = PlanRecord.pick(values, canary_commitment=None, cross_check=None).to_plan()
        assert asdict(again) == {**asdict(plan), "curve": [list(pair) for pair in plan.curve]}


def test_a_recipe_without_privacy_is_refused():
    public = tm.recipe(privacy={"enabled": False}, data={"public": True})
    with pytest.raises(ConfigError, match="no mechanism to audit"):
        audit_mechanism(public)
