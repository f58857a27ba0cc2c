"""accelerate launch with two processes is one run: one group, one reservation, every step charged once."""

import json
from pathlib import Path

import pytest
from accelerate import PartialState
from programs import LAUNCH, run_program

from dpllm.errors import ConfigError
from dpllm.ledger import Ledger
from dpllm.model.processes import join


def test_processes_without_a_group_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    PartialState(cpu=True)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="2 processes"):
        join()


@pytest.mark.full
def test_two_launched_processes_are_one_run(tmp_path: Path) -> None:
    ledger = tmp_path / "ledger.sqlite"
    keys = {
        "output_dir": tmp_path / "run",
        "privacy.ledger": ledger,
        "train.steps": 2,
        "audit.canaries.groups": "{1: 4}",
    }
    overrides = [word for key, value in keys.items() for word in (f"--{key}", str(value))]
    run_program(*LAUNCH, "recipes/accelerate/cpu_2.yaml", "recipes/train.py", "recipes/smoke/clinic.yaml", *overrides)
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (record["status"], record["steps_taken"]) == ("completed", 2)
    with Ledger(ledger) as book:
        (run,) = book.runs("builtin:clinic")
    assert (run.steps, run.state, run.reservation.entry) == (2, "completed", record["ledger"]["entry"])
