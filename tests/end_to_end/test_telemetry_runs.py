"""Whole runs with metrics, an endpoint and a tracker: what is shown, when, and that nothing un-noised is among it."""

from __future__ import annotations

import math
import re
import socket
import time
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
from metrics_text import Series, free_port, promtool_is_silent, scrape, series, value
from running import SENTINEL, STEPS, Place, calls, contents, done, make_place, refused, rows, train_until

from dpllm.auditing import run as audits
from dpllm.auditing import shadows
from dpllm.model import evaluate
from dpllm.privacy.engine import Diagnostics, StepEngine
from dpllm.recipe.config import load_config
from dpllm.run.directory import RunDir, open_run
from dpllm.statement.audit import read_audit
from dpllm.telemetry import metrics
from dpllm.telemetry.live import publish_audit

# Far from what noise makes of a share or of C, so that a released value is never taken for one of them.
LOSS, UNITS, CLIPPED, HELD_OUT, ACCURACY = 765.4321, 1009, 31079, 654.321, 17.654321
SECRETS = (LOSS, UNITS, CLIPPED, CLIPPED / UNITS, 1 - CLIPPED / UNITS, HELD_OUT, ACCURACY)
# Every metric of a private run that keeps its figures to itself, and the labels whose values are names.
PUBLIC = {
    *("dp_training_info", "dp_training_state", "dp_training_epsilon_consumed", "dp_training_step"),
    *("dp_training_steps_planned", "dp_stated_epsilon", "dp_stated_delta", "dp_noise_multiplier"),
}
TAGS = {"epsilon_consumed", "learning_rate"}


class Watched:
    """A run of recognisable private figures, and what was scraped before each of its steps."""

    def __init__(self, root: Path, base: Path, **changes: Any) -> None:
        self.collector, self.port = root / "collector", free_port()
        self.collector.mkdir(parents=True)
        telemetry = {"textfile": str(self.collector), "port": self.port, "trackers": ["tensorboard"]}
        held_out = tiny.write_rows(root / "data" / "eval.jsonl", rows(4, start=500))
        telemetry |= changes.get("telemetry", {})
        self.place = make_place(root, base, {"data.eval": str(held_out), **changes, "telemetry": telemetry})
        self.scraped: list[str] = []
        step, held_out = StepEngine.step, evaluate.held_out_loss

        def with_known_figures(engine: StepEngine, *batches: Any) -> Diagnostics:
            self.scraped.append(scrape(self.port).decode())
            step(engine, *batches)
            return Diagnostics(LOSS * UNITS, UNITS, CLIPPED)

        def with_known_scores(*arguments: Any) -> evaluate.HeldOut:
            held_out(*arguments)
            return evaluate.HeldOut(HELD_OUT + len(self.scraped), ACCURACY + len(self.scraped) / 100, 40)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(StepEngine, "step", with_known_figures)
            patch.setattr(evaluate, "held_out_loss", with_known_scores)
            patch.setattr("dpllm.telemetry.live.INTERVAL_SECONDS", 0.0)
            self.answer = done("train", self.place.recipe)

    def files(self) -> dict[str, str]:
        return {path.name: path.read_text("utf-8") for path in sorted(self.collector.iterdir())}

    def tracked(self) -> dict[str, list[float]]:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(self.place.run / "private" / "trackers" / "dpllm"))
        events.Reload()
        return {tag: [event.value for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory, base: Path, data_home: Path) -> Watched:
    """A private run, which keeps its figures to itself."""
    return Watched(tmp_path_factory.mktemp("watched"), base, **{"train.eval_every": 2})


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory, base: Path, data_home: Path) -> Watched:
    """A run whose recipe lets private figures out, and whose evaluation data are public."""
    changes = {"telemetry": {"private_metrics": True}, "data.eval_public": True}
    return Watched(tmp_path_factory.mktemp("opened"), base, **changes)


def test_a_run_is_shown_from_its_start_to_its_end(watched: Watched) -> None:
    before = [series(text) for text in watched.scraped]
    assert [value(item, "dp_training_step") for item in before] == list(range(STEPS))
    assert value(before[0], "dp_training_epsilon_consumed") == 0.0
    spent = [value(item, "dp_training_epsilon_consumed") for item in before]
    assert spent == sorted(spent)
    assert all(item["dp_training_state", (("model", "run"), ("state", "running"))] == 1 for item in before)
    last = {key: number for text in watched.files().values() for key, number in series(text).items()}
    plan = watched.place.json("plan.json")
    assert last["dp_training_state", (("model", "run"), ("state", "completed"))] == 1
    assert value(last, "dp_training_epsilon_consumed") == value(last, "dp_stated_epsilon") == plan["epsilon"]
    assert value(last, "dp_noise_multiplier") == plan["noise_multiplier"]
    assert value(last, "dp_training_step") == STEPS
    with pytest.raises(urllib.error.URLError):
        scrape(watched.port)


def test_promtool_finds_nothing_to_complain_about(watched: Watched, opened: Watched) -> None:
    for run in (watched, opened):
        promtool_is_silent(run.scraped[-1].encode())
        for text in run.files().values():
            promtool_is_silent(text.encode())
        assert len(series("".join(run.files().values()))) == sum(len(series(text)) for text in run.files().values())


def test_nothing_unnoised_is_shown(watched: Watched) -> None:
    run_id = watched.place.json("run.json")["ledger"]["entry"]
    known = {"run", "tiny-base", "notes", run_id, "running", "completed", "interrupted"}
    shown = list(watched.tracked().items())
    assert {tag for tag, _ in shown} == TAGS
    for text in (*watched.scraped, *watched.files().values()):
        samples = series(text)
        assert {name for name, _ in samples} <= PUBLIC
        assert {label for _, pairs in samples for _, label in pairs} <= known
        shown += [(name, [number]) for (name, _), number in samples.items()]
        assert not any(word in text for word in ("Sigrid", "4711", SENTINEL, str(watched.place.root)))
    for name, numbers in shown:
        close = [number for number in numbers for secret in SECRETS if math.isclose(number, secret, rel_tol=1e-3)]
        assert close == [], name


def test_files_of_trackers_are_private_and_name_no_path(watched: Watched) -> None:
    files = contents(watched.place.run / "private" / "trackers")
    assert files
    for word in ("Sigrid", str(watched.place.root), str(watched.place.base)):
        assert not [name for name, content in files.items() if word.encode() in content], word
    assert not [path for path in watched.place.run.rglob("events.out*") if "private" not in path.parts]


def test_private_figures_leave_where_the_recipe_says_so_and_the_record_names_it(opened: Watched) -> None:
    tags = opened.tracked()
    shown = {"epsilon_consumed", "learning_rate", "private_loss", "private_clip_fraction", "eval_loss", "eval_accuracy"}
    assert set(tags) == shown
    assert all(math.isclose(number, LOSS, rel_tol=1e-6) for number in tags["private_loss"])
    last = series("".join(opened.files().values()))
    assert value(last, "dp_training_private_loss") == LOSS
    assert value(last, "dp_gradient_clip_fraction") == CLIPPED / UNITS
    assert any("telemetry.private_metrics" in note for note in opened.place.json("run.json")["deviations"])
    assert opened.place.json("run.json")["guarantee"]["holds"] is True


def test_accuracy_is_shown_of_public_evaluation_data_alone(watched: Watched, opened: Watched) -> None:
    public = opened.place.json("run.json")["metrics"]["public"]
    assert public["eval_accuracy_after"] - public["eval_accuracy_before"] == pytest.approx(STEPS / 100)
    shown = value(series("".join(opened.files().values())), "dp_training_accuracy_delta")
    assert shown == public["eval_accuracy_after"] - public["eval_accuracy_before"]
    run = RunDir(opened.place.run)
    unprotected = run.load_config().changed({"data.public": False, "privacy.insecure_seed": 3})
    shown = metrics.of_record(run, unprotected, promised=unprotected.flaw is None)
    assert "dp_training_accuracy_delta" not in shown.figures
    assert watched.place.json("run.json")["metrics"]["public"] == {}
    assert watched.place.json("private/summary.json")["eval_accuracy_before"] == ACCURACY


def test_what_a_run_took_is_private(finished: Place) -> None:
    """Time and memory grow with the longest row."""
    took = finished.json("private/summary.json")
    assert 2**26 < took["peak_memory_bytes"] < 2**40
    assert took["peak_memory_bytes"] % 2**20 == 0
    assert took["duration_seconds"] > 0
    export = finished.run / "export"
    for path in [finished.run / "run.json", *export.rglob("*.json"), export / "README.md"]:
        # When it began is told, to the second, and a run may end within that second.
        text = re.sub(r'"started_at": "[^"]*"', "", path.read_text("utf-8"))
        assert not any(word in text for word in ("peak", "duration", str(took["finished_at"]))), path


def audited(place: Place, tmp_path: Path) -> Series:
    """What the collector reads after an audit of a run, whose own textfile lay elsewhere."""
    run = RunDir(place.run)
    config = load_config(run.config, {"telemetry.textfile": str(tmp_path)})
    path = run.audit_dir(True) / "audit.json"
    publish_audit(run, config, audits.figures(read_audit(path)) if path.exists() else {})
    text = metrics.file_of(tmp_path, run.root.name).read_text("utf-8")
    promtool_is_silent(text.encode())
    return series(text)


def test_a_published_audit_is_shown_beside_the_claim(finished: Place, tmp_path: Path) -> None:
    record, report = audited(finished, tmp_path), finished.json("export/audit/audit.json")
    attack = report["attacks"]["calibrated"]
    assert value(record, "dp_membership_inference_auc") == attack["auc"]
    assert value(record, "dp_membership_inference_auc_lower") == attack["auc_interval"][0]
    assert value(record, "dp_membership_inference_auc_upper") == attack["auc_interval"][1]
    assert value(record, "dp_audit_epsilon_lower_bound") == report["epsilon_lower_bound"]["value"]
    assert value(record, "dp_stated_epsilon") == finished.json("plan.json")["epsilon"]
    public = finished.json("run.json")["metrics"]["public"]
    delta = public["eval_accuracy_after"] - public["eval_accuracy_before"]
    assert value(record, "dp_training_accuracy_delta") == delta


def test_a_private_audit_is_not_shown(baseline: Place, tmp_path: Path) -> None:
    names = {name for name, _ in audited(baseline, tmp_path)}
    assert (baseline.run / "private" / "audit" / "audit.json").exists()
    assert not [name for name in names if "audit" in name or "membership" in name or "epsilon" in name]


def test_the_audit_command_publishes(copy: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    called = calls(monkeypatch, audits, "publish_audit", lambda run, *_: run.root)
    done("audit", copy.run)
    assert called == [copy.run]


def test_shadow_runs_show_nothing(baseline: Place, tmp_path: Path) -> None:
    overrides = {"telemetry.textfile": str(tmp_path), "telemetry.port": 9464, "telemetry.trackers": ["wandb"]}
    shown = replace(open_run(RunDir(baseline.run)), config=load_config(RunDir(baseline.run).config, overrides))
    quiet = shadows._recipe(shown, RunDir(tmp_path / "shadow")).telemetry
    assert (quiet.textfile, quiet.port, quiet.trackers) == (None, None, [])


@pytest.mark.parametrize(
    ("key", "setting", "words"),
    [
        ("port", None, "cannot be opened"),
        ("textfile", "nowhere", "is no directory outside"),
        ("trackers", ["trackio"], "pip install trackio"),
    ],
)
def test_what_cannot_be_watched_is_refused_before_anything_is_reserved(
    place: Place, key: str, setting: Any, words: str
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        place.write({f"telemetry.{key}": setting or taken.getsockname()[1]})
        assert words in refused("train", place.recipe)
    assert not place.ledger.exists()
    assert not any(path.is_file() for path in place.run.rglob("*"))


def test_a_refused_run_is_counted(place: Place) -> None:
    terms = ("--epsilon", "0.5", "--delta", "1e-3", "--by", "alice", "--reason", "a test")
    done("ledger", "init", "notes", *terms, "--ledger", place.ledger)
    refused("train", place.recipe, code=3)
    samples = series(done("ledger", "metrics", "--ledger", place.ledger).out)
    assert samples["dp_ledger_refused_total", (("reason", "over_budget"),)] == 1
    assert samples["dp_training_budget", (("dataset", "notes"),)] == 0.5


def test_a_run_that_fails_says_so_and_the_ledger_keeps_its_heartbeat(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place.root / "collector").mkdir()
    place.write({"telemetry.textfile": str(place.root / "collector")})
    train_until(monkeypatch, 3, place.recipe)
    samples = series("".join(path.read_text() for path in (place.root / "collector").iterdir()))
    assert samples["dp_training_state", (("model", "run"), ("state", "interrupted"))] == 1
    assert value(samples, "dp_training_step") == 2
    assert 0 < value(samples, "dp_training_epsilon_consumed") < value(samples, "dp_stated_epsilon")
    printed = series(done("ledger", "metrics", "--ledger", place.ledger).out)
    assert value(printed, "dp_reservation_heartbeat_timestamp_seconds") > time.time() - 600
