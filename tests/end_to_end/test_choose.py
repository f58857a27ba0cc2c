"""``dpllm sweep --choose``: the best of a secret number of runs; what is told of the others, and of their number, is nothing."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import running
import tiny
from running import Answer, Place, contents, done, dpllm_, make_place, refused, rows

from dpllm.comparison import choose
from dpllm.comparison.choose import Draws
from dpllm.errors import Refused
from dpllm.ledger import Ledger
from dpllm.privacy import selection
from dpllm.privacy.accounting import epsilon
from dpllm.privacy.events import PureDP, RepeatAndSelect
from dpllm.run import loop

RATES = "train.learning_rate: [0.0001, 0.01]"
INTERRUPTED, USAGE, REFUSED = 1, 2, 3
SETTINGS: dict[str, Any] = {"data.eval_public": True, "audit.gradient_canaries": 8}


def place_of(root: Path, base: Path, **changes: Any) -> Place:
    evaluation = tiny.write_rows(root / "data" / "eval.jsonl", rows(8, start=500))
    return make_place(root, base, {"data.eval": str(evaluation), **SETTINGS, **changes})


@pytest.fixture
def place(tmp_path: Path, base: Path) -> Place:
    return place_of(tmp_path / "place", base)


def chosen(place: Place, *more: object, over: str = RATES, mean: object = 3) -> Answer:
    return dpllm_("sweep", place.recipe, "--choose", "--mean-runs", mean, "--over", over, *more)


def succeeds(place: Place, *more: object) -> Answer:
    answer = chosen(place, *more)
    assert answer.code == 0, answer.err
    return answer


@pytest.fixture
def draws(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Decides which settings are drawn, in place of chance."""

    def settings(*numbers: int) -> None:
        monkeypatch.setattr(Draws, "drawn", lambda *of: Draws(list(numbers), list(range(len(numbers))), []))

    return settings


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory, base: Path, data_home: Path) -> tuple[Place, Answer]:
    """The best of three runs, of which the second has the better setting."""
    place = place_of(tmp_path_factory.mktemp("chosen") / "place", base)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Draws, "drawn", lambda *of: Draws([0, 1, 0], [5, 6, 7], []))
        return place, succeeds(place)


def test_the_best_run_is_released_with_the_epsilon_of_the_choice(released: tuple[Place, Answer]) -> None:
    place, _ = released
    plan, record = place.json("plan.json"), place.json("run.json")
    assert "learning_rate: 0.01" in (place.run / "config.yaml").read_text("utf-8")  # that of setting 1
    assert plan["event"]["type"] == "repeat_and_select"
    assert 7.9 < plan["epsilon"] <= 8.0
    assert record["metrics"]["public"]["eval_loss_after"] < record["metrics"]["public"]["eval_loss_before"]
    place.does("audit", "card")
    assert "0 failed" in done("verify", place.run).out
    audit = place.json("export/audit/audit.json")
    assert audit["claim"]["epsilon"] == plan["epsilon"]
    assert "this choice is counted in" in place.card


def test_nothing_says_how_many_runs_there_were(
    released: tuple[Place, Answer], tmp_path: Path, base: Path, draws: Callable[..., None]
) -> None:
    place, answer = released
    other = place_of(tmp_path / "place", base)
    draws(1)  # one run alone
    both = ((place, answer), (other, succeeds(other)))
    for chosen_place, text in both:
        record = chosen_place.json("run.json")
        assert record["started_at"].endswith("T00:00:00+00:00")
        assert {record["finished_at"], record["duration_seconds"], record["peak_memory_bytes"]} == {None}
        with Ledger(chosen_place.ledger) as book:
            kinds = [link.kind for link in book.history("notes")]
            (run,) = book.account("notes").runs
            assert kinds == ["data", "reserve", "commit", "commit"]  # the mark of its one step, and its end
            assert (run.state, run.steps) == ("completed", 1)
            assert record["ledger"]["head"] == book.head()  # nothing came after the reservation was closed
            assert run.heartbeat <= (chosen_place.run / "private" / "metrics.jsonl").stat().st_mtime
        weights = (chosen_place.run / "export" / "adapter_model.safetensors").stat()
        assert weights.st_mtime % 86_400 == 0
        assert not list(chosen_place.run.rglob("choice"))
        assert len(text.out.splitlines() + text.err.splitlines()) < 8
    assert contents(place.run / "export").keys() >= contents(other.run / "export").keys()
    assert place.json("run.json").keys() == other.json("run.json").keys()
    printed = {re.sub(r"run-\w+", "", text.out.replace(str(chosen_place.root), "")) for chosen_place, text in both}
    assert len(printed) == 1
    for name, content in contents(place.run).items():
        assert b"choice/runs" not in content, name


def test_an_interrupted_choice_goes_on_with_the_same_runs(
    place: Place, monkeypatch: pytest.MonkeyPatch, draws: Callable[..., None]
) -> None:
    draws(0, 1, 0)
    with monkeypatch.context() as patch:
        begun = running.fails_in_step(patch, 6)  # the second one of the second run
        with pytest.raises(RuntimeError):
            chosen(place)
    first = place.json("private/choice/draws.json")
    assert len(first["scores"]) == 1
    assert chosen(place).code == USAGE  # it is not begun anew
    assert chosen(place, "--resume", mean=4).code == USAGE  # nor with another number
    draws(1)  # were it drawn again, one run alone
    with monkeypatch.context() as patch:
        trained = running.calls(patch, loop, "train", lambda config, *_, **__: Path(config.output_dir).name)
        succeeds(place, "--resume")
    # The run that the crash ended had taken a step and had no checkpoint: it is not made again.
    assert trained == ["2"]
    assert len(begun) == 6
    assert place.json("run.json")["status"] == "completed"
    assert len(place.runs()) == 1


@pytest.mark.parametrize("killed_in", ["move", "tidy"])
def test_a_choice_that_is_killed_at_its_end_goes_on_without_another_draw(
    place: Place, monkeypatch: pytest.MonkeyPatch, draws: Callable[..., None], killed_in: str
) -> None:
    draws(1)
    replace, remove = os.replace, shutil.rmtree

    def no_move(source: Path, target: Path) -> None:
        if Path(target) == place.run / "run.json":
            raise KeyboardInterrupt
        replace(source, target)

    def no_tidying(path: Path, **more: Any) -> None:
        if Path(path).name == "choice":
            (Path(path) / "draws.json").unlink()
            raise KeyboardInterrupt
        remove(path, **more)

    with monkeypatch.context() as patch:
        if killed_in == "move":
            patch.setattr(choose.os, "replace", no_move)
        else:
            patch.setattr(choose.shutil, "rmtree", no_tidying)
        assert chosen(place).code == INTERRUPTED
    weights = (place.run / "export" / "adapter_model.safetensors").read_bytes()
    draws(0, 0)
    with monkeypatch.context() as patch:
        patch.setattr(loop, "train", None)
        succeeds(place, "--resume")
    assert (place.run / "export" / "adapter_model.safetensors").read_bytes() == weights
    assert not (place.run / "private" / "choice").exists()
    assert "0 failed" in done("verify", place.run).out


def test_a_run_that_is_killed_before_its_first_step_begins_anew_with_the_canaries_of_all(
    place: Place, monkeypatch: pytest.MonkeyPatch, draws: Callable[..., None]
) -> None:
    draws(1)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "Recorder", Mock(side_effect=KeyboardInterrupt))
        assert chosen(place).code == INTERRUPTED
    folder = place.run / "private" / "choice"
    assert (folder / "runs" / "0" / "config.yaml").exists()  # and canaries beside it, from which a run begins anew
    planted = json.loads((folder / "canaries.json").read_text("utf-8"))
    succeeds(place, "--resume")
    assert place.json("private/canaries.json") == planted


def test_a_run_that_diverges_has_the_worst_score(
    place: Place, monkeypatch: pytest.MonkeyPatch, draws: Callable[..., None]
) -> None:
    draws(0, 1)
    diverges_first = Mock(side_effect=[Refused("not finite"), None])
    monkeypatch.setattr("dpllm.run.record.loading.check_finite", diverges_first)
    succeeds(place)
    assert diverges_first.call_count == 2
    assert "learning_rate: 0.01" in (place.run / "config.yaml").read_text("utf-8")


def test_where_every_run_diverges_nothing_is_released(
    place: Place, monkeypatch: pytest.MonkeyPatch, draws: Callable[..., None]
) -> None:
    draws(0, 1)
    monkeypatch.setattr(choose, "_score", lambda *of: None)
    assert chosen(place).code == 1
    assert not (place.run / "run.json").exists()
    assert [run.state for run in place.runs()] == ["completed"]  # and stays spent


def test_equal_scores_are_ordered_by_secret_numbers() -> None:
    assert Draws([0, 0, 0], [9, 3, 5], [1.0, 1.0, 1.0]).best == 1
    assert Draws([0, 0, 0], [9, 3, 5], [1.0, 2.0, 0.5]).best == 2
    assert Draws([0, 0, 0], [9, 3, 5], [None, 2.0, None]).best == 1
    drawn = [Draws.drawn(3, 10.0) for _ in range(400)]
    assert len({tie for draw in drawn for tie in draw.ties}) == sum(len(draw.ties) for draw in drawn)
    assert {setting for draw in drawn for setting in draw.settings} == {0, 1, 2}
    assert len({len(draw.settings) for draw in drawn}) > 5


def test_what_the_best_run_says_is_as_likely_without_one_unit_as_the_epsilon_allows() -> None:
    """Two settings, of which each answers a yes-or-no question about one unit by a coin, and the rarer answer scores higher."""
    truth = {0: 0.7, 1: 0.55}  # probability of a high score with the unit, by setting; 1 - p without it
    event = RepeatAndSelect(tuple(PureDP(math.log(p / (1 - p))) for p in truth.values()), 10.0, choose.DISTRIBUTION)
    limit = epsilon(event, 1e-6, "zero_out")
    chance = np.random.default_rng(1)

    def high(with_unit: bool, runs: int = 100_000) -> float:
        """How often the best of a choice has a high score."""
        count = 0
        for _ in range(runs):
            number = selection.draw(10.0, choose.DISTRIBUTION, chance.random())
            settings = chance.integers(2, size=number)
            likely = np.where(settings == 0, truth[0], truth[1])
            scores = np.where(chance.random(number) < (likely if with_unit else 1 - likely), 0.0, 1.0)
            best = Draws(list(settings), list(range(number)), [float(score) for score in scores]).best
            count += scores[best] == 0.0
        return count / runs

    p, q = high(True, 20_000), high(False, 20_000)
    error = 4 * math.sqrt(0.25 / 20_000)
    assert p <= math.exp(limit) * q + error
    assert 1 - q <= math.exp(limit) * (1 - p) + error * math.exp(limit)
    # The best of ten runs, always ten, is far outside: it hardly ever is low with the unit, and often is without it.
    low = np.prod([1 - (truth[0] + truth[1]) / 2] * 10), np.prod([(truth[0] + truth[1]) / 2] * 10)
    assert low[1] > 3 * math.exp(limit) * low[0]


WRONG_LISTS = (
    *("train.learning_rate: [0.1]", "train.learning_rate: [0.1, 0.1]", "train.learning_rate: 0.1"),
    *("train.learning_rate: [0.1, 0.2", "train.no_such_key: [1, 2]", f"{RATES}; {RATES}", ""),
    *("data.train: [a.jsonl, b.jsonl]", "data.max_length: [32, 64]"),  # of different data
    *("privacy.epsilon: [1, 2]", "privacy.noise_multiplier: [1, 2]", "audit.gradient_canaries: [0, 8]"),
    *("train.beta: [0.1, 0.2]", f"train.steps: {list(range(1, 30))}"),
)
WRONG_RECIPES: tuple[dict[str, Any], ...] = (
    {"data.eval_public": False},  # a private score, without noise
    *({"data.eval": None}, {"privacy.enabled": False}, {"privacy.noise_multiplier": 1.0}, {"privacy.fit_budget": True}),
    *({"privacy.insecure_seed": 1}, {"telemetry.private_metrics": True}),
)


@pytest.mark.parametrize(
    ("over", "mean", "changes"),
    [
        *((RATES, mean, {}) for mean in (1, "nan", 1e9)),
        *((over, 3, {}) for over in WRONG_LISTS),
        *((RATES, 3, changes) for changes in WRONG_RECIPES),
    ],
    ids=str,
)
def test_what_no_choice_can_be_made_of_is_refused_before_anything_is_written(
    tmp_path: Path, base: Path, over: str, mean: object, changes: dict[str, Any]
) -> None:
    place = place_of(tmp_path / "place", base, **changes)
    before = contents(tmp_path)
    refused("sweep", place.recipe, "--choose", "--mean-runs", mean, "--over", over)
    assert contents(tmp_path) == before


def test_an_evaluation_set_that_trains_is_refused(place: Place) -> None:
    place.write({"data.eval": str(place.train), **SETTINGS})
    assert chosen(place).code == REFUSED
    assert not place.run.exists()


def test_a_budget_for_one_run_alone_does_not_hold_a_choice(place: Place) -> None:
    who = ("--by", "owner", "--reason", "test", "--ledger", place.ledger)
    done("ledger", "init", "notes", "--epsilon", 7.0, "--delta", 1e-3, *who)
    answer = chosen(place)
    assert answer.code == REFUSED, answer.err
    assert not list(place.run.rglob("draws.json"))
    succeeds(place, "--privacy.epsilon", 3)  # in the same directory, of which nothing was left
    with Ledger(place.ledger) as book:
        assert 0 < (book.used("notes") or 0) <= 1


def test_plan_says_what_each_run_may_cost_and_how_often_one_is_alone(place: Place) -> None:
    value = json.loads(done("plan", place.recipe, "--choose", "--mean-runs", 10, "--over", RATES, "--json").out)
    assert 0.99 * 8 < value["epsilon"] <= 8
    assert value["chance_of_one_run"] == pytest.approx(0.27, abs=0.005)
    assert all(3.5 < setting["epsilon"] < value["epsilon"] for setting in value["settings"])
    assert not place.ledger.exists()
    assert dpllm_("plan", place.recipe, "--choose").code == USAGE


def test_a_statement_of_a_choice_is_recomputed(released: tuple[Place, Answer], tmp_path: Path) -> None:
    place, _ = released
    good = place.json("export/privacy.json")
    event = good["plan"]["event"]
    export = Path(shutil.copytree(place.run / "export", tmp_path / "export"))
    others = ({**event, "mean": 2.0}, {**event, "distribution": "geometric"}, {**event, "events": event["events"][:1]})
    for changed in (*others, event["events"][1]):
        running.edit_json(export / "privacy.json", plan={**good["plan"], "event": changed})
        running.unverified(export)
