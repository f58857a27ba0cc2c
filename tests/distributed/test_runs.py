"""Whole runs of several processes: the same run as one process's, and one end for all of them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import PartialState
from numpy.typing import NDArray
from programs import LAUNCH, run_program
from remembered import Once
from safetensors.torch import load_file
from scipy import stats

from dpllm import cli
from dpllm.errors import ConfigError
from dpllm.ledger import Ledger
from dpllm.model import loading
from dpllm.model.processes import join
from dpllm.privacy import banded
from dpllm.recipe.config import load_config

STEPS = 4
ALARM = 1e-9  # p-value below which noise is called wrong
COMPLETE = ["seeded_1", "seeded_2", "seeded_3"]
STOPPED, KILLED = ["stopped", "resumed_on_3"], ["killed", "resumed_on_1"]
SHARDED = ["banded", "banded_sharded", "sharded_stopped", "sharded_resumed"]
BANDED_STEPS, BANDS = 8, 3
FAILED = {
    "broken": (1, "process 1: ValueError"),
    "hanging": (1, "step 2 did not end within 2 s"),
    "moved": (3, "after step 3 the processes no longer hold the same weights"),
    "other_recipe": (2, "the recipe's train.learning_rate is 0.01 in process 0 and 0.5 in process 1"),
    "other_train": (3, "changed while the run was starting"),
    "other_version": (2, "peft is"),
    "other_eval": (2, "the held-out data, as tokens, is"),
    "other_processor": (3, "in process 1, so they would round the same unit differently"),
    "rounds_bf16": (3, "the gradient sum of a pass of "),
    "rounds_fp32": (3, "the gradient sum of a pass of "),
    "no_model": (2, "process 1: model.name_or_path 'nowhere'"),
    "over_target": (3, "above the target privacy.epsilon"),
    "too_many": (2, "Start at most 2, or raise train.batch_size"),
}
SLOW = {"hanging", "rounds_bf16", "rounds_fp32", "other_version", "other_eval", "over_target"}
"""Under --full: several seconds each, or a comparison, or a refusal, of which others are tried too."""


def run(folder: Path, names: list[str]) -> None:
    run_program(Path(__file__).with_name("run_worker.py"), folder, *names, timeout=900)


@pytest.fixture(scope="session")
def ended(once: Once, full: bool) -> Path:
    """What the processes of runs left that were completed, some of them on a second start."""
    names = COMPLETE + STOPPED + (KILLED + SHARDED if full else [])
    return once("runs_ended", lambda folder: run(folder, names))


@pytest.fixture(scope="session")
def failed(once: Once, full: bool) -> Path:
    return once("runs_failed", lambda folder: run(folder, [name for name in FAILED if full or name not in SLOW]))


def codes(folder: Path, name: str) -> list[int]:
    report: list[int] = json.loads((folder / f"{name}.json").read_text())["codes"]
    return report


def record(folder: Path, name: str) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((folder / name / "run" / "run.json").read_text())
    return report


def charged(folder: Path, name: str) -> list[tuple[int, str]]:
    with Ledger(folder / name / "ledger.sqlite") as ledger:
        return [(run.steps, run.state) for run in ledger.runs("builtin:clinic")]


def test_any_number_of_processes_is_one_run_with_one_reservation(ended: Path) -> None:
    for name in COMPLETE:
        assert set(codes(ended, name)) == {0}, (ended / f"{name}.0.err").read_text()
        assert (record(ended, name)["status"], record(ended, name)["steps_taken"]) == ("completed", STEPS)
        assert charged(ended, name) == [(STEPS, "completed")]
    plans = [json.loads((ended / name / "run" / "plan.json").read_text()) for name in COMPLETE]
    assert plans[0] == plans[1] == plans[2]


def test_any_number_of_processes_trains_the_same_adapter_which_loads_in_one(ended: Path) -> None:
    # Same secret draws, fixed for this test: the same batches and the same noise at the same places.
    one, two, three = (load_file(ended / name / "run" / "export" / "adapter_model.safetensors") for name in COMPLETE)
    for name, tensor in one.items():
        for other in (two, three):  # AdamW divides by the size of small gradients, so rounding grows
            assert float((other[name] - tensor).norm()) <= 2e-3 * float(tensor.norm()), name
    import torch

    run = ended / "seeded_2" / "run"
    models = loading.load_for_scoring(load_config(run / "config.yaml"), run / "export", torch.device("cpu"))
    saved = load_file(run / "export" / "adapter_model.safetensors")
    held = {name.replace(".default", ""): p for name, p in models.tuned.named_parameters() if "lora_" in name}
    assert held.keys() == saved.keys()
    assert all(torch.equal(held[name], tensor) for name, tensor in saved.items())


def test_diagnostics_count_all_processes(ended: Path) -> None:
    lines = [(ended / name / "run" / "private" / "metrics.jsonl").read_text().splitlines() for name in COMPLETE]
    steps = [[row for row in map(json.loads, some) if "units" in row] for some in lines]
    units = [[row["units"] for row in some] for some in steps]
    assert units[0] == units[1] == units[2]
    for one, two, three in zip(*steps, strict=True):
        assert one["loss"] == pytest.approx(two["loss"], rel=1e-3) == pytest.approx(three["loss"], rel=1e-3)
        for number, *others in zip(*(row["clipped_by_layer"] for row in (one, two, three)), strict=True):
            assert max(abs(number - other) for other in others) <= 1  # of a norm that is just about the bound


def test_a_stop_signal_to_one_process_stops_all_after_the_same_step_and_three_go_on(ended: Path) -> None:
    assert codes(ended, "stopped") == [1, 1]
    assert codes(ended, "resumed_on_3") == [0, 0, 0], (ended / "resumed_on_3.0.err").read_text()
    assert (record(ended, "stopped")["status"], record(ended, "stopped")["steps_taken"]) == ("completed", STEPS)
    assert charged(ended, "stopped") == [(STEPS, "completed")]


@pytest.mark.full
def test_a_killed_process_ends_the_run_with_its_steps_charged_and_one_goes_on(ended: Path) -> None:
    assert codes(ended, "killed") == [1, -9]
    assert "ended without a message" in (ended / "killed.0.err").read_text()
    assert codes(ended, "resumed_on_1") == [0], (ended / "resumed_on_1.0.err").read_text()
    result = record(ended, "killed")
    assert result["status"] == "completed"
    assert any("1 charged step" in note for note in result["resumes"]), result  # step 3, which no checkpoint has
    assert charged(ended, "killed") == [(STEPS, "completed")]


def noise_of(folder: Path, name: str) -> NDArray[np.float64]:
    """Of each step that a scenario took, over its standard deviation, times C: independent if the noise is as planned."""
    assert not (folder / f"{name}.noise1.pt").exists()  # the other rank added none, and holds none
    plan = json.loads((folder / name.replace("resumed", "stopped") / "run" / "plan.json").read_text())
    rows_TP: NDArray[np.float64] = torch.load(folder / f"{name}.noise0.pt", weights_only=True).numpy()
    return banded.whiten(plan["coefficients"], rows_TP)


@pytest.mark.full
def test_banded_noise_of_a_sharded_base_is_that_of_a_whole_one(ended: Path) -> None:
    """Same secret draws: the same groups in turn, and the same noise, of which rank 0 takes back what it added."""
    for name in SHARDED[:2]:
        assert set(codes(ended, name)) == {0}, (ended / f"{name}.0.err").read_text()
    plans = [json.loads((ended / name / "run" / "plan.json").read_text()) for name in SHARDED[:2]]
    assert plans[0] == plans[1]
    assert (plans[0]["event"]["bands"], plans[0]["event"]["count"]) == (BANDS, BANDED_STEPS)
    ours, whole = (load_file(ended / name / "run" / "export" / "adapter_model.safetensors") for name in SHARDED[:2])
    for name, tensor in whole.items():
        assert float((ours[name] - tensor).norm()) <= 2e-3 * float(tensor.norm()), name
    white_TP = noise_of(ended, "banded_sharded")
    assert len(white_TP) == BANDED_STEPS
    assert min(stats.kstest(row_P, "norm").pvalue for row_P in white_TP) > ALARM
    assert np.abs(np.corrcoef(white_TP)[np.triu_indices(BANDED_STEPS, 1)]).max() < 7 / white_TP.shape[1] ** 0.5


@pytest.mark.full
def test_a_sharded_run_with_banded_noise_goes_on_with_empty_buffers_and_its_card_verifies(ended: Path) -> None:
    assert codes(ended, "sharded_stopped") == [1, 1]
    assert codes(ended, "sharded_resumed") == [0, 0], (ended / "sharded_resumed.0.err").read_text()
    assert charged(ended, "sharded_stopped") == [(BANDED_STEPS, "completed")]
    white_TP = noise_of(ended, "sharded_resumed")  # as if nothing had been added before
    assert len(white_TP) == BANDED_STEPS - 3
    assert min(stats.kstest(row_P, "norm").pvalue for row_P in white_TP) > ALARM
    place = ended / "sharded_stopped" / "run"
    assert json.loads((place / "private" / "groups.json").read_text())["starts"] == [0, 3]
    for command in ("audit", "card", "verify"):
        assert cli.main([command, str(place)]) == 0
    report = json.loads((place / "export" / "privacy.json").read_text())
    assert (report["guarantee"], report["plan"]["mechanism"]) == (True, "dp-bandmf")
    audit = report["audit"]["gradient"]
    assert audit["steps"] == BANDED_STEPS
    low, high = audit["noise_interval"]  # of 95%: four standard errors, and twice as many are never seen
    assert abs(audit["noise"] - audit["noise_planned"]) < 2 * (high - low)


@pytest.mark.full
def test_the_others_end_where_the_first_machine_is_lost(tmp_path: Path) -> None:
    run(tmp_path, ["lost"])
    assert codes(tmp_path, "lost") == [-9, 1]  # rank 0 stands still until the worker gives it up
    assert "the first process does not answer" in (tmp_path / "lost.1.err").read_text()
    assert charged(tmp_path, "lost")[0][0] == 2


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.full] * (name in SLOW)) for name in FAILED])
def test_one_message_all_processes_end_and_the_ledger_tells_the_truth(failed: Path, name: str) -> None:
    if name.startswith("rounds_") and torch.backends.cpu.get_cpu_capability() != "AVX512":
        pytest.skip("an older processor is played on one with AVX-512")
    code, words = FAILED[name]
    report = json.loads((failed / f"{name}.json").read_text())
    assert set(report["codes"]) == {code}
    assert report["seconds"] < 80  # 90 is where a process that hangs is killed
    said = [path.read_text() for path in sorted(failed.glob(f"{name}.*.err"))]
    assert said[0].count("dpllm train:") == 1, said[0]
    assert words in said[0]
    assert "Traceback" not in said[0]
    if name == "broken":
        assert "ValueError: a secret" in said[1]  # on its own machine only
        assert "a secret" not in said[0]
    else:
        assert not any(said[1:]), said
    steps = {"broken": 2, "hanging": 2, "moved": 3}.get(name)
    if steps is None:
        assert not (failed / name / "ledger.sqlite").exists()
        assert not (failed / name / "run" / "export").exists()
        return
    ((charged_steps, state),) = charged(failed, name)
    assert charged_steps == steps
    assert state != "completed"
    assert record(failed, name)["status"] == "interrupted"
    assert not (failed / name / "run" / "export" / "adapter_model.safetensors").exists()


def test_processes_without_a_group_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    PartialState(cpu=True)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="2 processes"):
        join()


@pytest.mark.full
def test_two_launched_processes_are_one_run(tmp_path: Path) -> None:
    ledger = tmp_path / "ledger.sqlite"
    keys = {"output_dir": tmp_path / "run", "privacy.ledger": ledger, "train.steps": 2}
    keys["audit.canaries.groups"] = "{1: 4}"
    overrides = [word for key, value in keys.items() for word in (f"--{key}", str(value))]
    run_program(*LAUNCH, "recipes/accelerate/cpu_2.yaml", "recipes/train.py", "recipes/smoke/clinic.yaml", *overrides)
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (record["status"], record["steps_taken"]) == ("completed", 2)
    with Ledger(ledger) as book:
        (run,) = book.runs("builtin:clinic")
    assert (run.steps, run.state, run.reservation.entry) == (2, "completed", record["ledger"]["entry"])
