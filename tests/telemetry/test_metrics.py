"""Metrics, textfiles, the endpoint and trackers, without a run: what has which name, what may leave, what may fail."""

from __future__ import annotations

import math
import os
import re
import shutil
import socket
import stat
import time
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from ledger_stores import Place, budget, reserve
from metrics_text import Series, free_port, promtool, promtool_is_silent, scrape, series, telemetry_config
from tiny_models import recipe

from dpllm.cli import main
from dpllm.errors import ConfigError
from dpllm.ledger import Ledger, budgets
from dpllm.privacy import accounting
from dpllm.run.directory import RunDir
from dpllm.run.promise import plan_of
from dpllm.telemetry import metrics
from dpllm.telemetry.live import EpsilonSpent, Telemetry, publish_audit
from dpllm.telemetry.metrics import GAUGES, ShownRun, exposition, ledger_families, run_families

VALUES = ShownRun(
    {"model": "notes-lora", "dataset": "notes", "run_id": "0f0f"},
    "openai-community/gpt2",
    "running",
    {name: 0.4 for name in metrics.GAUGES if name != "dp_training_private_loss"},
)


def with_figures(**figures: float | None) -> ShownRun:
    return replace(VALUES, figures={**VALUES.figures, **figures})


def budgeted(folder: Path, *datasets: str) -> Ledger:
    """An open ledger with a budget and a run for each dataset."""
    book = Ledger(folder / "ledger.sqlite")
    for dataset in datasets or ("notes",):
        budgets.set_budget(book, dataset, budget(8.0))
        reserve(book, dataset)
    return book


def of_ledger(book: Ledger) -> Series:
    return series(exposition(ledger_families(book)))


def test_names_and_labels_are_those_that_dashboards_were_built_on(tmp_path: Path) -> None:
    with budgeted(tmp_path) as book:
        book.count_refusal("notes", "over_budget")
        text = exposition([*run_families(VALUES), *ledger_families(book)])
    of_model = (
        *("noise_multiplier", "gradient_clip_fraction", "membership_inference_auc", "membership_inference_auc_lower"),
        *("membership_inference_auc_upper", "audit_epsilon_lower_bound", "stated_epsilon", "training_accuracy_delta"),
        "training_step",
    )
    labels_of = {f"dp_{name}": {"model"} for name in of_model} | {
        "dp_training_epsilon_consumed": {"model", "dataset", "run_id"},
        "dp_training_budget_used": {"dataset"},
        "dp_training_budget": {"dataset"},
        "dp_ledger_refused_total": {"reason"},
        "dp_ledger_reservations": {"dataset", "state"},
        "dp_reservation_heartbeat_timestamp_seconds": {"dataset", "run_id", "state"},
        "dp_ledger_entries": set(),
        "dp_ledger_chain_valid": set(),
        "dp_training_state": {"model", "state"},
    }
    samples = {name: {label for label, _ in pairs} for name, pairs in series(text)}
    assert {name: samples[name] for name in labels_of} == labels_of
    promtool_is_silent(text)


def test_metrics_show_of_a_run_this_list_alone() -> None:
    """A new name is a new way out for private data: check what it is computed from, then add it here."""
    public = {"training_epsilon_consumed", "stated_epsilon", "stated_delta", "noise_multiplier", "training_step"}
    public |= {"training_steps_planned", "training_accuracy_delta"}
    audited = {f"membership_inference_auc{end}" for end in ("", "_lower", "_upper", "_allowed")}
    private = {"training_private_loss", "gradient_clip_fraction"}
    assert {f"dp_{name}" for name in public | audited | private | {"audit_epsilon_lower_bound"}} == set(metrics.GAUGES)
    with pytest.raises(KeyError):
        run_families(with_figures(dp_longest_row=512.0))


@given(st.one_of(st.none(), st.floats()), st.sampled_from(sorted(metrics.GAUGES)))
@settings(derandomize=True, max_examples=60, deadline=None)
def test_values_that_are_not_finite_are_left_out(value: float | None, name: str) -> None:
    samples = series(exposition(run_families(with_figures(**{name: value}))))
    shown = {name: value for (name, _), value in samples.items()}
    assert shown.get(name) == (value if value is not None and math.isfinite(value) else None)
    assert ("dp_training_private_loss" in shown) == (name == "dp_training_private_loss" and shown.get(name) is not None)


@given(st.text(min_size=1, max_size=20).filter(str.isprintable))
@settings(derandomize=True, max_examples=40, deadline=None)
def test_any_name_is_one_label(name: str) -> None:
    samples = series(exposition(run_families(replace(VALUES, names={**VALUES.names, "model": name}))))
    assert samples["dp_noise_multiplier", (("model", name),)] == 0.4


def test_epsilon_on_the_way_is_an_upper_bound_and_costs_five_evaluations(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(recipe(privacy={"noise_multiplier": 1.0, "epsilon": 50.0}, train={"steps": 23}), 500)
    compute = accounting.epsilon
    accountant = Mock(side_effect=compute)
    monkeypatch.setattr(accounting, "epsilon", accountant)
    spent = EpsilonSpent(plan)
    bounds = [spent(step) for step in range(24)]
    assert accountant.call_count <= 5
    assert bounds[0] == 0.0
    assert bounds == sorted(bounds)
    assert bounds[-1] == plan.epsilon
    for step in (1, 5, 6, 22):
        exact = compute(plan.event_after(step), plan.delta, plan.neighbouring_relation)
        assert exact <= bounds[step] + 1e-9
    assert EpsilonSpent(None)(3) is None
    assert "no differential privacy" in EpsilonSpent(None).words(3)


def test_the_ledger_in_both_stores(ledger: Ledger) -> None:
    budgets.set_budget(ledger, "notes", budget(8.0))
    first = reserve(ledger)
    ledger.charge(first.entry, 1)
    ledger.count_refusal("notes", "over_budget")
    ledger.count_refusal("letters", "over_budget")
    ledger.count_refusal("", "tampered")
    samples = of_ledger(ledger)
    assert samples["dp_ledger_refused_total", (("reason", "over_budget"),)] == 2
    assert samples["dp_ledger_refused_total", (("reason", "tampered"),)] == 1
    assert samples["dp_ledger_entries", ()] == len(ledger.history())
    assert samples["dp_ledger_chain_valid", ()] == 1
    assert samples["dp_training_budget_used", (("dataset", "notes"),)] == ledger.used("notes")
    assert states_of(samples) == {"running": 1}
    beat = (("dataset", "notes"), ("run_id", first.entry), ("state", "running"))
    assert abs(samples["dp_reservation_heartbeat_timestamp_seconds", beat] - time.time()) < 60


def states_of(samples: Series) -> dict[str, float]:
    """State -> number of reservations, of the states that occur."""
    reservations = {pairs[1][1]: value for (name, pairs), value in samples.items() if name == "dp_ledger_reservations"}
    return {state: number for state, number in reservations.items() if number}


def beating(book: Ledger) -> set[tuple[str, str]]:
    beats = [dict(pairs) for name, pairs in of_ledger(book) if name == "dp_reservation_heartbeat_timestamp_seconds"]
    return {(pairs["run_id"], pairs["state"]) for pairs in beats}


@pytest.mark.parametrize("status", ["completed", "interrupted"])
def test_a_finished_reservation_has_no_heartbeat(tmp_path: Path, status: Any) -> None:
    with Ledger(tmp_path / "ledger.sqlite") as book:
        entry = reserve(book).entry
        assert beating(book) == {(entry, "reserved")}
        book.charge(entry, 1)
        assert beating(book) == {(entry, "running")}
        book.finish(entry, status)
        assert beating(book) == set()
        assert states_of(of_ledger(book)) == {status: 1}
        assert not [name for name, _ in of_ledger(book) if name.startswith("dp_training_budget")]


def test_a_broken_chain_shows_and_no_figure_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    budgeted(tmp_path).close()
    place = Place(str(tmp_path / "ledger.sqlite"))
    place.edit("UPDATE entries SET payload = replace(payload, '8.0', '80.0') WHERE seq = 1")
    assert main(["ledger", "metrics", "--ledger", place.location]) == 0
    samples = series(capsys.readouterr().out)
    assert samples["dp_ledger_chain_valid", ()] == 0
    assert not [name for name, _ in samples if name.startswith("dp_training")]


def test_the_command_writes_what_it_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "collector"
    folder.mkdir()
    budgeted(tmp_path, "notes", "letters/2026", "letters_2026").close()
    command = ["ledger", "metrics", "--ledger", str(tmp_path / "ledger.sqlite")]
    assert main(command) == 0
    printed = capsys.readouterr().out
    promtool_is_silent(printed.encode())
    assert main([*command, "--textfile", str(folder)]) == 0
    (file,) = folder.iterdir()
    assert (file.name, file.read_text()) == (metrics.LEDGER, printed)
    assert [name for name, _ in series(printed)].count("dp_training_budget") == 3
    assert main([*command, "--textfile", str(folder / "none")]) == 2
    assert "node exporter" in capsys.readouterr().err


def test_a_textfile_is_whole_and_readable_by_the_collector(tmp_path: Path) -> None:
    path = metrics.file_of(tmp_path, "notes-lora")
    before = os.umask(0o077)
    try:
        metrics.write(path, run_families(VALUES))
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert path.suffix == ".prom"
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    assert path.read_bytes() == exposition(run_families(VALUES))


def test_a_disk_that_fails_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = metrics.file_of(tmp_path, "notes-lora")
    metrics.write(path, run_families(VALUES))
    before = path.read_bytes()

    monkeypatch.setattr(os, "rename", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        metrics.write(path, run_families(with_figures(dp_training_step=4.0)))
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == {path.name: before}


@given(st.text(min_size=1), st.text(min_size=1))
@settings(derandomize=True, max_examples=100, deadline=None)
def test_two_names_have_two_files(first: str, second: str) -> None:
    paths = [metrics.file_of(Path(), name) for name in (first, second)]
    assert (paths[0] == paths[1]) == (first == second)
    for path in paths:
        assert path.parent == Path()
        assert len(path.name.encode()) < 200
        assert path.name != metrics.LEDGER


@pytest.mark.parametrize("where", ["run/export", "run/private/metrics", "file"])
def test_a_directory_that_nobody_reads_is_refused(tmp_path: Path, where: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "run" / "export").mkdir(parents=True)
    (tmp_path / "run" / "private" / "metrics").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"telemetry\.textfile"):
        Telemetry(telemetry_config(tmp_path, textfile=str(tmp_path / where)), RunDir(tmp_path / "run"))


def test_a_failure_to_publish_is_told_and_ends_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for telemetry, times in (({"textfile": str(tmp_path / "gone")}, 1), ({}, 0)):
        publish_audit(RunDir(tmp_path / "run"), telemetry_config(tmp_path, **telemetry), {})
        assert capsys.readouterr().err.count("metrics could not be written") == times


def test_the_endpoint_listens_on_loopback_until_it_is_closed(tmp_path: Path) -> None:
    port = free_port()
    with Telemetry(telemetry_config(tmp_path, port=port), RunDir(tmp_path / "run")) as telemetry:
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.2", port), timeout=5)  # whoever listens everywhere answers there too
        assert series(scrape(port)) == {}
        telemetry._page.now = tuple(run_families(VALUES))
        assert series(scrape(port)) == series(exposition(run_families(VALUES)))
        with pytest.raises(ConfigError, match=rf"telemetry\.port {port}: cannot be opened"):
            Telemetry(telemetry_config(tmp_path, port=port), RunDir(tmp_path / "run"))
    with pytest.raises(urllib.error.URLError):
        scrape(port)


def test_private_metrics_are_named_on_every_card(tmp_path: Path) -> None:
    assert telemetry_config(tmp_path).deviations == []
    (note,) = telemetry_config(tmp_path, private_metrics=True).deviations
    assert "telemetry.private_metrics" in note
    public = recipe(telemetry={"private_metrics": True}, data={"public": True})
    assert public.deviations == []


OPS = Path(__file__).parents[2] / "ops" / "prometheus"
RULES = yaml.safe_load((OPS / "alerts.yml").read_text("utf-8"))["groups"][0]["rules"]
TESTS = yaml.safe_load((OPS / "alerts_test.yml").read_text("utf-8"))["tests"]


def test_the_rules_are_valid_and_pass_their_tests() -> None:
    answer = promtool("check", "rules", OPS / "alerts.yml")
    assert (answer.returncode, answer.stderr) == (0, b""), answer.stdout
    answer = promtool("test", "rules", OPS / "alerts_test.yml")
    assert answer.returncode == 0, answer.stderr


@pytest.mark.full
@pytest.mark.parametrize(
    ("rule", "broken"),
    [
        ("dp_training_budget_used > 0.9", "dp_training_budget_used > 0.96"),
        ("dp_training_budget_used > 0.9", "dp_training_budget_used > 0.5"),
        ('{state="running"} > 3600', "> 3600"),
        ('{state="running"} > 3600', '{state="running"} > 60'),
        ("> 86400", "> 100000"),
        ("dp_audit_epsilon_lower_bound > dp_stated_epsilon", "dp_audit_epsilon_lower_bound >= dp_stated_epsilon"),
        ("dp_audit_epsilon_lower_bound > dp_stated_epsilon", "dp_audit_epsilon_lower_bound > 3"),
        (" and dp_membership_inference_auc_lower > 0.5", ""),
        ("dp_membership_inference_auc > 0.60", "dp_membership_inference_auc > 0.55"),
        ("for: 10m", "for: 1m"),
        ("> 0.90", ">= 0.90"),
        ("dp_ledger_chain_valid == 0", "dp_ledger_chain_valid == 1"),
    ],
)
def test_a_rule_that_is_changed_fails_its_tests(rule: str, broken: str, tmp_path: Path) -> None:
    text = (OPS / "alerts.yml").read_text("utf-8")
    assert text.count(rule) == 1
    (tmp_path / "alerts.yml").write_text(text.replace(rule, broken), encoding="utf-8")
    shutil.copy(OPS / "alerts_test.yml", tmp_path)
    assert promtool("check", "rules", tmp_path / "alerts.yml").returncode == 0
    assert promtool("test", "rules", tmp_path / "alerts_test.yml").returncode == 1


def test_every_alert_is_seen_to_fire_and_not_to_fire() -> None:
    fires, quiet = set(), set()
    for case in TESTS:
        for moment in case["alert_rule_test"]:
            (fires if moment["exp_alerts"] else quiet).add(moment["alertname"])
            if len(case["input_series"]) > 1 and moment["exp_alerts"]:  # another series, for which it must not
                quiet.add(moment["alertname"])
    assert fires == quiet == {rule["alert"] for rule in RULES}


def test_alerts_are_about_metrics_that_exist(tmp_path: Path) -> None:
    with budgeted(tmp_path) as book:
        families = ledger_families(book)
    metric_names = {sample.name for family in families for sample in family.samples} | set(GAUGES)
    for rule in RULES:
        names_in_rule = set(re.findall(r"\bdp_\w+", rule["expr"] + " " + rule["annotations"]["description"]))
        assert names_in_rule, rule["alert"]
        assert names_in_rule <= metric_names, rule["alert"]
        assert rule["labels"]["severity"] in ("page", "warn")


def test_what_contradicts_a_promise_wakes_somebody() -> None:
    pages = {rule["alert"] for rule in RULES if rule["labels"]["severity"] == "page"}
    assert pages == {"DPAuditContradictsClaim", "DPLedgerChainBroken"}
