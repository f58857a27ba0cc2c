"""Metrics, textfiles, the endpoint and trackers, without a run: what has which name, what may leave, what may fail."""

from __future__ import annotations

import math
import os
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
from hypothesis import given, settings
from hypothesis import strategies as st
from ledger_stores import Place, budget, reserve
from metrics_text import Series, free_port, promtool_is_silent, scrape, series, telemetry_config
from tiny_models import recipe

from dpllm.cli import main
from dpllm.errors import ConfigError
from dpllm.ledger import Ledger, budgets
from dpllm.privacy import accounting
from dpllm.run.directory import RunDir
from dpllm.run.promise import plan_of
from dpllm.telemetry import metrics
from dpllm.telemetry.live import EpsilonSpent, Telemetry, publish_audit
from dpllm.telemetry.metrics import ShownRun, exposition, ledger_families, run_families

VALUES = ShownRun(
    {"model": "notes-lora", "dataset": "notes", "run_id": "0f0f"},
    "openai-community/gpt2",
    "running",
    {name: 0.4 for name in metrics.GAUGES if name != "dp_training_private_loss"},
)


def with_figures(**figures: float | None) -> ShownRun:
    return replace(VALUES, figures={**VALUES.figures, **figures})


def of_ledger(book: Ledger) -> Series:
    return series(exposition(ledger_families(book)))


# --- names and values ------------------------------------------------------------------------------------------------


def test_names_and_labels_are_those_that_dashboards_were_built_on(tmp_path: Path) -> None:
    with Ledger(tmp_path / "ledger.sqlite") as book:
        budgets.set_budget(book, "notes", budget(8.0))
        reserve(book)
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


# --- epsilon ---------------------------------------------------------------------------------------------------------


def test_epsilon_on_the_way_is_an_upper_bound_and_costs_five_evaluations(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(recipe(privacy={"noise_multiplier": 1.0, "epsilon": 50.0}, train={"steps": 23}), 500)
    calls = []
    compute = accounting.epsilon
    monkeypatch.setattr(accounting, "epsilon", lambda *a, **k: calls.append(a) or compute(*a, **k))
    spent = EpsilonSpent(plan)
    bounds = [spent(step) for step in range(24)]
    assert len(calls) <= 5
    assert bounds[0] == 0.0
    assert bounds == sorted(bounds)
    assert bounds[-1] == plan.epsilon
    for step in (1, 5, 6, 22):
        exact = compute(plan.event_after(step), plan.delta, plan.neighbouring_relation)
        assert exact <= bounds[step] + 1e-9
    assert EpsilonSpent(None)(3) is None
    assert "no differential privacy" in EpsilonSpent(None).words(3)


# --- the ledger ------------------------------------------------------------------------------------------------------


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
    place = Place(str(tmp_path / "ledger.sqlite"))
    with place.open() as book:
        budgets.set_budget(book, "notes", budget(8.0))
        reserve(book)
    place.edit("UPDATE entries SET payload = replace(payload, '8.0', '80.0') WHERE seq = 1")
    assert main(["ledger", "metrics", "--ledger", place.location]) == 0
    samples = series(capsys.readouterr().out)
    assert samples["dp_ledger_chain_valid", ()] == 0
    assert not [name for name, _ in samples if name.startswith("dp_training")]


def test_the_command_writes_what_it_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, folder = tmp_path / "ledger.sqlite", tmp_path / "collector"
    folder.mkdir()
    with Ledger(path) as book:
        for name in ("notes", "letters/2026", "letters_2026"):
            budgets.set_budget(book, name, budget(8.0))
            reserve(book, name)
    assert main(["ledger", "metrics", "--ledger", str(path)]) == 0
    printed = capsys.readouterr().out
    promtool_is_silent(printed.encode())
    assert main(["ledger", "metrics", "--ledger", str(path), "--textfile", str(folder)]) == 0
    (file,) = folder.iterdir()
    assert (file.name, file.read_text()) == (metrics.LEDGER, printed)
    assert len([1 for name, _ in series(printed) if name == "dp_training_budget"]) == 3
    assert main(["ledger", "metrics", "--ledger", str(path), "--textfile", str(folder / "none")]) == 2
    assert "node exporter" in capsys.readouterr().err


# --- textfiles -------------------------------------------------------------------------------------------------------


def test_a_textfile_is_whole_and_readable_by_the_collector(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        path = metrics.file_of(tmp_path, "notes-lora")
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
def test_two_names_have_two_files(one: str, other: str) -> None:
    paths = [metrics.file_of(Path(), name) for name in (one, other)]
    assert (paths[0] == paths[1]) == (one == other)
    for path in paths:
        assert path.parent == Path()
        assert len(path.name.encode()) < 200
        assert path.name != metrics.LEDGER


@pytest.mark.parametrize("where", ["nowhere", "run/export", "run/private/metrics", "file"])
def test_a_directory_that_nobody_reads_is_refused_before_anything_is_reserved(tmp_path: Path, where: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "run" / "export").mkdir(parents=True)
    (tmp_path / "run" / "private" / "metrics").mkdir(parents=True)
    config = telemetry_config(tmp_path, textfile=str(tmp_path / where))
    with pytest.raises(ConfigError, match=r"telemetry\.textfile"):
        Telemetry(config, RunDir(tmp_path / "run"))


def test_a_failure_to_publish_is_told_and_ends_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = telemetry_config(tmp_path, textfile=str(tmp_path / "gone"))
    publish_audit(RunDir(tmp_path / "run"), config, {})
    assert capsys.readouterr().err.count("metrics could not be written") == 1
    quiet = telemetry_config(tmp_path)
    publish_audit(RunDir(tmp_path / "run"), quiet, {})
    assert capsys.readouterr().err == ""


# --- the endpoint ----------------------------------------------------------------------------------------------------


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


# --- the record ------------------------------------------------------------------------------------------------------


def test_private_metrics_are_named_on_every_card(tmp_path: Path) -> None:
    assert telemetry_config(tmp_path).deviations == []
    (note,) = telemetry_config(tmp_path, private_metrics=True).deviations
    assert "telemetry.private_metrics" in note
    public = recipe(telemetry={"private_metrics": True}, data={"public": True})
    assert public.deviations == []
