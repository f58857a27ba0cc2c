"""A run that stops goes on with the same reservation and fresh noise, and never spends twice or less than it did."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
from ledger_stores import adopt
from published import edit
from remembered import Once
from running import Place, charged, contents, done, dpllm_, edit_json, make_place, python, refused, rows, train_until
from safetensors.torch import load_file

from dpllm.ledger import Ledger
from dpllm.run.directory import RunDir, open_run
from dpllm.statement.run_files import read_plan

TOTAL = 6
SIGNALS = ("SIGTERM", "SIGKILL")
STOP = """
import os, signal, sys
import peft.tuners.lora, torch, transformers.models.llama.modeling_llama  # once for both
from dpllm.cli import main
from dpllm.privacy.engine import StepEngine
torch.set_num_threads(1)
step, calls = StepEngine.step, []

def stop(engine, *batches):
    calls.append(batches)
    if len(calls) == 3:
        os.kill(os.getpid(), getattr(signal, how))
    return step(engine, *batches)

StepEngine.step = stop
for how in sys.argv[2:]:
    place = os.path.join(sys.argv[1], how)
    if not os.fork():
        os.dup2(os.open(os.path.join(place, "errors"), os.O_WRONLY | os.O_CREAT), 2)
        sys.exit(main(["train", os.path.join(place, "recipe.yaml")]))
    with open(os.path.join(place, "code"), "w") as file:
        file.write(str(os.waitstatus_to_exitcode(os.wait()[1])))
"""


@pytest.fixture(scope="session")
def stopped(once: Once, base: Path, data_home: Path) -> dict[str, tuple[Place, int, str]]:
    """Runs of six steps that got each signal in their third, their exit codes and what they said; only copied."""

    def make(folder: Path) -> None:
        held_out = tiny.write_rows(folder / "eval.jsonl", rows(4, start=500))
        settings = {"train.steps": TOTAL, "train.checkpoint_every": 1, "data.eval": str(held_out)}
        for how in SIGNALS:
            make_place(folder / how, base, settings)
        process = python(STOP, folder, *SIGNALS)
        assert process.returncode == 0, process.stderr

    places = [Place(once("stopped", make) / how, base) for how in SIGNALS]
    texts = [[(place.root / name).read_text() for name in ("code", "errors")] for place in places]
    return {how: (place, int(code), said) for how, place, (code, said) in zip(SIGNALS, places, texts, strict=True)}


def copy(place: Place, root: Path) -> Place:
    """The same state elsewhere, as if it had always been there."""
    other = Place(Path(shutil.copytree(place.root, root)), place.base)
    adopt(other.ledger)
    for recipe in (other.recipe, other.run / "config.yaml"):
        edit(recipe, str(place.root), str(root))
    return other


@pytest.fixture
def terminated(stopped: dict[str, tuple[Place, int, str]], tmp_path: Path) -> Place:
    return copy(stopped["SIGTERM"][0], tmp_path / "copy")


@pytest.fixture
def killed(stopped: dict[str, tuple[Place, int, str]], tmp_path: Path) -> Place:
    return copy(stopped["SIGKILL"][0], tmp_path / "copy")


def newest(place: Place) -> Path:
    """The last checkpoint."""
    return max((place.run / "private" / "resume").iterdir())


def loss_before(place: Place) -> float:
    loss = place.json("private/summary.json")["eval_loss_before"]
    assert loss > 0
    return float(loss)


def commits(place: Place) -> list[tuple[str, int]]:
    """How runs ended; marks on the way are tests/ledger/test_ledger.py's."""
    with Ledger(place.ledger) as ledger:
        assert ledger.verify() == []
        ends = [entry.facts for entry in ledger.history("notes") if entry.kind == "commit"]
    return [(end["status"], end["steps"]) for end in ends if end["status"] != "running"]


def test_a_terminated_run_is_consistent_and_says_so(stopped: dict[str, tuple[Place, int, str]]) -> None:
    place, code, errors = stopped["SIGTERM"]
    assert code == 1
    assert "Traceback" not in errors
    record, plan = place.json("run.json"), place.json("plan.json")
    assert (record["status"], record["steps_taken"], record["steps_planned"]) == ("interrupted", 3, TOTAL)
    assert open_run(RunDir(place.run)).epsilon == plan["epsilon"]  # the full Plan's, although half of it ran
    assert plan["num_steps"] == TOTAL
    assert record["guarantee"]["holds"] is True
    assert any("outside the guarantee" in note for note in record["deviations"])
    assert (place.run / "export" / "adapter_model.safetensors").exists()
    state = json.loads((newest(place) / "state.json").read_text())
    assert (state["step"], state["lost"]) == (3, 0)
    with Ledger(place.ledger) as ledger:
        assert ledger.verify(state["head"]) == []
    assert charged(place) == (1, 3)
    assert commits(place) == [("interrupted", 3)]


def test_a_resumed_run_completes_on_the_same_reservation(terminated: Place) -> None:
    place, before = terminated, terminated.json("run.json")
    deviation = "as of an attempt with telemetry.private_metrics, which this recipe no longer has"
    edit_json(place.run / "run.json", deviations=[*before["deviations"], deviation])
    untrained = loss_before(place)
    done("train", place.recipe, "--resume")
    record = place.json("run.json")
    assert (record["status"], record["steps_taken"]) == ("completed", TOTAL)
    assert record["guarantee"]["holds"] is True
    assert loss_before(place) == untrained  # and not that of the weights it goes on with
    assert deviation in record["deviations"]
    assert not any("interrupted" in note for note in record["deviations"])
    assert record["ledger"]["entry"] == before["ledger"]["entry"]
    assert record["manifest"]["plan.json"] == before["manifest"]["plan.json"]
    assert charged(place) == (1, TOTAL)
    assert commits(place) == [("interrupted", 3), ("completed", TOTAL)]
    lines = place.lines("private/metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, TOTAL + 1))
    assert not (place.run / "private" / "resume").exists()


def test_resuming_twice_draws_other_noise(terminated: Place, tmp_path: Path) -> None:
    weights = []
    for name in ("a", "b"):
        place = copy(terminated, tmp_path / name)
        done("train", place.recipe, "--resume")
        weights.append(load_file(place.run / "export" / "adapter_model.safetensors"))
    assert all(not value.equal(weights[1][name]) for name, value in weights[0].items())


def without_a_ledger(place: Place) -> None:
    for path in place.root.glob("ledger.sqlite*"):
        path.unlink()


def with_damaged_checkpoints(place: Place) -> None:
    for weights in place.run.glob("private/resume/*/trainable.safetensors"):
        weights.write_bytes(weights.read_bytes()[:-4])


def reconciled(place: Place) -> None:
    with Ledger(place.ledger) as ledger:
        ledger.reconcile(ledger.runs("notes")[0].reservation.entry, "alice", "the machine is gone")


def with_a_plan_of_another_event(place: Place) -> None:
    """As if the checkpoint, which names the reservation, were another run's."""
    run, plan, manifest = RunDir(place.run), place.json("plan.json"), place.json("run.json")["manifest"]
    more = plan["num_steps"] + 1
    edit_json(run.plan, event={**plan["event"], "count": more}, num_steps=more)
    edit_json(run.run, manifest={**manifest, "plan.json": read_plan(run).digest})


# Which keys may not change: tests/run/test_same_recipe.py.
REFUSED: dict[str, tuple[Callable[[Place], object], tuple[Any, ...], int, str]] = {
    "another recipe": (lambda place: None, ("--train.steps", TOTAL + 2), 3, "train.steps"),
    "two wishes": (lambda place: None, ("--overwrite",), 2, "one of the two"),
    "other data": (lambda place: tiny.write_rows(place.train, rows(50)), (), 3, "no longer holds the records"),
    "no ledger": (without_a_ledger, (), 2, "is missing, so nothing says"),
    "damaged": (with_damaged_checkpoints, (), 3, "truncated or was edited"),
    "no checkpoint": (lambda place: shutil.rmtree(place.run / "private" / "resume"), (), 2, "holds no checkpoint"),
    "reconciled": (reconciled, (), 3, "was closed"),
    "another event": (with_a_plan_of_another_event, (), 3, "another accounting event than the run reserved"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_cannot_go_on_is_refused_and_changes_nothing(killed: Place, why: str) -> None:
    place, (change, flags, code, words) = killed, REFUSED[why]
    change(place)
    before, spent = contents(place.run), place.head()
    assert words in refused("train", place.recipe, "--resume", *flags, code=code)
    assert {".lock": b"", **contents(place.run)} == before  # the lock is of the process that was killed
    assert place.head() == spent


def test_the_same_rows_of_other_owners_are_refused(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ledger knows texts and not whose they are; steps before and after would protect different people."""
    owners = {"data.unit": "author", "data.max_examples_per_unit": 4}
    place.write({"train.steps": 3, "train.checkpoint_every": 1, "train.batch_size": 4, **owners})
    owned_rows = [{**row, "author": f"p{number % 20}"} for number, row in enumerate(rows())]
    tiny.write_rows(place.train, owned_rows)
    train_until(monkeypatch, 2, place.recipe)
    taken = charged(place)
    others = [{**row, "author": f"p{(number + number // 20) % 20}"} for number, row in enumerate(owned_rows)]
    tiny.write_rows(place.train, others)
    assert "other units than the run began with" in refused("train", place.recipe, "--resume", code=3)
    assert charged(place) == taken
    tiny.write_rows(place.train, owned_rows)
    done("train", place.recipe, "--resume")


def test_a_damaged_checkpoint_gives_way_to_the_one_before_it(terminated: Place) -> None:
    weights = newest(terminated) / "trainable.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4])
    answer = done("train", terminated.recipe, "--resume")
    assert "Resumed: the newest checkpoint was damaged; the one before it, of step 2, was used." in answer.out
    assert "Resumed: 1 charged steps were lost in a crash and are not repeated." in answer.out
    assert f"{TOTAL - 1} of {TOTAL}; 1 more were charged and lost" in answer.out
    record = terminated.json("run.json")
    assert (record["steps_taken"], record["steps_lost"]) == (TOTAL, 1)
    assert any("the newest checkpoint was damaged" in note and "step 2" in note for note in record["deviations"])
    assert any("1 charged steps were lost" in note for note in record["deviations"])
    assert charged(terminated) == (1, TOTAL)


def test_a_killed_run_claims_nothing_and_stays_charged(stopped: dict[str, tuple[Place, int, str]]) -> None:
    place, code, _ = stopped["SIGKILL"]
    assert code == -9
    record = place.json("run.json")
    assert (record["status"], record["steps_taken"]) == ("interrupted", None)
    assert record["guarantee"]["holds"] is False
    assert "killed" in record["guarantee"]["reason"]
    assert not [name for name in record["manifest"] if name.startswith("export/")]
    assert not list((place.run / "export").glob("*.safetensors"))
    assert charged(place) == (1, 3)
    with Ledger(place.ledger) as ledger:
        assert ledger.spent("notes") == pytest.approx(place.json("plan.json")["epsilon"])


def test_steps_that_were_charged_and_lost_are_not_repeated(killed: Place) -> None:
    place = killed
    assert json.loads((newest(place) / "state.json").read_text())["step"] == 2
    untrained = loss_before(place)
    done("train", place.recipe, "--resume")
    record = place.json("run.json")
    assert loss_before(place) == untrained
    assert (record["status"], record["steps_taken"]) == ("completed", TOTAL)
    assert record["guarantee"]["holds"] is True
    assert any("1 charged steps were lost" in note for note in record["deviations"])
    assert charged(place) == (1, TOTAL)
    assert "0 failed" in place.does("card", "verify")
    assert place.json("export/privacy.json")["steps"] == {"planned": TOTAL, "taken": TOTAL, "lost": 1}
    assert f"| Steps | {TOTAL - 1} taken of {TOTAL} planned; 1 more were charged, and lost in a crash |" in place.card
    edit_json(place.run / "run.json", steps_lost=0)
    assert "failed    run: steps.lost" in dpllm_("verify", place.run).out


KILLED_AT_ONCE = """
import os, signal, sys
from dpllm.cli import main
from dpllm.privacy.engine import StepEngine
StepEngine.step = lambda engine, *batches: os.kill(os.getpid(), signal.SIGKILL)
main(["train", *sys.argv[1:]])
"""


@pytest.mark.full
def test_steps_that_are_lost_in_several_crashes_are_all_counted(killed: Place) -> None:
    place = killed
    for _ in range(2):  # each charges one step and dies in it, so that one more is lost
        assert python(KILLED_AT_ONCE, place.recipe, "--resume").returncode == -9
    done("train", place.recipe, "--resume")
    assert charged(place) == (1, TOTAL)
    record, plan = place.json("run.json"), place.json("plan.json")
    assert (record["status"], record["steps_taken"], record["steps_lost"]) == ("completed", TOTAL, 3)
    assert record["guarantee"]["holds"] is True
    assert open_run(RunDir(place.run)).epsilon == plan["epsilon"]  # as if none had been lost


def test_one_process_trains_in_a_run_directory(killed: Place) -> None:
    place, before = killed, contents(killed.run)
    with RunDir(place.run).locked():
        for flag in ("--resume", "--overwrite"):
            assert "another process writes there" in refused("train", place.recipe, flag)
    assert contents(place.run).keys() - before.keys() <= {".lock"}
    done("train", place.recipe, "--resume")
    assert not (place.run / ".lock").exists()


def test_a_complete_run_is_not_resumed(finished: Place, tmp_path: Path) -> None:
    place = copy(finished, tmp_path / "copy")
    before = contents(place.run)
    assert "nothing to resume" in refused("train", place.recipe, "--resume")
    assert contents(place.run) == before


def test_a_baseline_resumes_without_a_ledger(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.write({"privacy.enabled": False, "data.public": True, "train.checkpoint_every": 1})
    begun = train_until(monkeypatch, 3, place.recipe)
    assert place.json("run.json")["steps_taken"] == 2
    done("train", place.recipe, "--resume")
    record = place.json("run.json")
    assert (record["status"], record["steps_taken"], len(begun)) == ("completed", 4, 5)
    assert not place.ledger.exists()
