"""``dpllm sweep``: all runs are reserved before the first, trained, audited, carded and compared; --resume keeps what is done."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from unittest.mock import Mock

import pytest
import tiny
from running import CANARIES, SENTINEL, STEPS, Answer, Place, contents, done, dpllm_, edit_json, make_place, refused

from dpllm.errors import DpllmError, Refused
from dpllm.ledger import Ledger
from dpllm.ledger.admission import group_total
from dpllm.privacy.banded import LearningRate

SWEEP = "[/]sweep"  # a name that rich would read as markup
WRONG, REFUSED = 2, 3
WRONG_LISTS = ("1,x,3", "1,,3", "1,-3", "0,1", "nan,1", "true", "null", "3", "inf", "3,3.0")


def rows(count: int, start: int = 0) -> list[dict[str, str]]:
    """Each prompt stands twice, with two references."""
    numbers = range(start, start + count)
    return [{"prompt": f"{SENTINEL}. note {n // 2}:", "completion": tiny.sentence(n)} for n in numbers]


def make(root: Path, base: Path, **changes: object) -> Place:
    place = make_place(root, base, {"data.public": True, "output_dir": str(root / SWEEP), **changes})
    tiny.write_rows(place.train, rows(40))
    return place


@pytest.fixture
def place(tmp_path: Path, base: Path) -> Place:
    return make(tmp_path / "place", base)


def swept_to(place: Place, epsilons: str, *more: object) -> Answer:
    return dpllm_("sweep", place.recipe, "--privacy.epsilon", epsilons, *more)


def refusal_of_sweep(place: Place, epsilons: str, *more: object, code: int = REFUSED) -> str:
    return refused("sweep", place.recipe, "--privacy.epsilon", epsilons, *more, code=code)


def budget(place: Place, epsilon: float, *terms: object) -> None:
    who = ("--by", "owner", "--reason", "test", "--ledger", place.ledger)
    done("ledger", "init", "notes", "--epsilon", epsilon, "--delta", 1e-3, *terms, *who)


def record(place: Place, name: str) -> dict[str, object]:
    return dict(json.loads((place.root / SWEEP / name / "run.json").read_text()))


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory, base: Path, data_home: Path) -> tuple[Place, Answer]:
    root = tmp_path_factory.mktemp("swept")
    evaluation = tiny.write_rows(root / "data" / "eval.jsonl", rows(8, 500))
    place = make(root, base, **{"data.eval": str(evaluation), "audit.canaries": CANARIES})
    answer = swept_to(place, "8,inf,2", "--tasks", 3)
    assert answer.code == 0, answer.err
    return place, answer


def test_every_run_is_trained_audited_carded_and_compared(swept: tuple[Place, Answer]) -> None:
    place, answer = swept
    root = place.root / SWEEP
    assert {path.name for path in root.iterdir()} == {"eps-2", "eps-8", "eps-inf", "compare", "sweep.json"}
    for name in ("eps-2", "eps-8", "eps-inf"):
        assert record(place, name)["status"] == "completed"
        assert (root / name / "export" / "README.md").exists()
    assert (root / "eps-8" / "export" / "audit" / "audit.json").exists()
    assert not (root / "eps-inf" / "export" / "audit").exists()
    assert (root / "compare").stat().st_mode & 0o077 == 0
    value = json.loads((root / "compare" / "comparison.json").read_text())
    assert [run["name"] for run in value["runs"]] == ["eps-2", "eps-8", "eps-inf"]
    for part in (value["base"], *value["runs"]):
        assert {"loss", "perplexity", "accuracy", "bleu"} <= part.keys()
    assert "Epsilon lower bound" in answer.out
    ledger = record(place, "eps-8")["ledger"]
    assert isinstance(ledger, dict)
    assert value["group"] == ledger["group"]
    assert f"The 2 runs of tuning group {value['group']['name']} come to epsilon" in " ".join(answer.out.split())
    assert contents(root / "compare").keys() == {f"comparison.{kind}" for kind in ("json", "md", "png")}


def test_no_text_of_a_row_leaves_private(swept: tuple[Place, Answer]) -> None:
    place, answer = swept
    root = place.root / SWEEP
    assert SENTINEL not in answer.out + answer.err
    files = {name: text for name, text in contents(root).items() if "/cache/" not in name}
    assert {Path(name).name for name, text in files.items() if SENTINEL.encode() in text} <= {"canaries.json"}


def test_no_figure_of_private_evaluation_data_stands_in_job_logs(swept: tuple[Place, Answer]) -> None:
    place, answer = swept
    value = json.loads((place.root / SWEEP / "compare" / "comparison.json").read_text())
    for part in (value["base"], *value["runs"]):
        assert f"{part['loss']:.3f}" not in answer.out
    assert "BLEU" not in answer.out
    page = (place.root / SWEEP / "compare" / "comparison.md").read_text()
    assert "3 prompts, each with all its references (6 in all); a beam search of 5 for at most " in page


def test_the_ledger_holds_one_group_and_each_run_its_total(swept: tuple[Place, Answer]) -> None:
    place, _ = swept
    with Ledger(place.ledger) as book:
        ((name, runs),) = book.account("notes").groups().items()
        states = [(run.reservation.run, run.state) for run in runs]
        assert states == [(f"{name}/{run}", "completed") for run in ("eps-2", "eps-8")]
        total = group_total(book.account("notes"), name)
        kinds = [entry.kind for entry in book.history("notes")]
        assert kinds[:3] == ["data", "reserve", "reserve"]  # before the first step
    for run in ("eps-2", "eps-8"):
        ledger = record(place, run)["ledger"]
        assert isinstance(ledger, dict)
        assert ledger["group"] == total
        assert total["epsilon"] == pytest.approx(ledger["spent_epsilon"])
    assert record(place, "eps-inf")["ledger"] is None
    assert f"Tuning group {name}" in done("ledger", "show", "--ledger", place.ledger).out
    recipe = (place.root / SWEEP / "eps-8" / "config.yaml").read_text().replace("\n    ", " ")
    assert "One of 3 runs that differ in privacy.epsilon alone (2, 8, inf)" in recipe


def test_a_finished_sweep_is_kept(swept: tuple[Place, Answer]) -> None:
    place, _ = swept
    before, head = contents(place.root / SWEEP), place.head()
    resumed = swept_to(place, "2,8,inf", "--resume", "--tasks", 3)
    assert resumed.code == 0, resumed.err
    after, derived = contents(place.root / SWEEP), ("compare", "README", "privacy.json")
    changed = [name for name in before if after[name] != before[name]]
    assert [name for name in changed if not any(word in name for word in derived)] == []
    assert place.head() == head
    assert "already holds a sweep" in swept_to(place, "2,8,inf").err
    assert "other epsilons" in swept_to(place, "2,8", "--resume").err
    assert "another recipe" in swept_to(place, "2,8,inf", "--resume", "--train.steps", 9).err


def untouched(place: Place) -> bool:
    left = [path for path in (place.root / SWEEP).rglob("*") if path.is_file()]
    with Ledger(place.ledger) as book:
        return not left and all(book.account(name).runs == () for name in ("notes", *book.datasets()))


def test_without_privacy_only_public_data_are_swept(tmp_path: Path, base: Path) -> None:
    place = make(tmp_path / "place", base, **{"data.public": False})
    assert "not declared public" in refusal_of_sweep(place, "2,inf")
    assert not place.ledger.exists()
    assert not list((place.root / SWEEP).glob("eps-*"))


def test_data_that_change_while_a_sweep_is_planned_are_refused(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def meanwhile(config: object) -> None:
        tiny.write_rows(place.train, rows(10))

    monkeypatch.setattr("dpllm.comparison.sweep._check_model", meanwhile)
    assert "changed while the sweep was planned" in refusal_of_sweep(place, "2,4")
    with Ledger(place.ledger) as book:
        assert not book.datasets()


def test_what_the_base_model_forbids_is_refused_first(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def settle(base, config, **_):
        if not config.privacy.enabled:
            raise Refused("a model with differential privacy may not be continued without it.")

    monkeypatch.setattr("dpllm.statement.lineage.compose_with_base", settle)
    assert "may not be continued" in refusal_of_sweep(place, "2,inf")
    assert not place.ledger.exists()


@pytest.mark.parametrize(
    ("epsilons", "more", "words"),
    [
        *((wrong, (), "is no list of two or more different epsilons") for wrong in WRONG_LISTS),
        ("1,3", ("--train.learning_rate", "1e-3,1e-2"), "train.learning_rate"),
        ("1,3", ("--privacy.noise_multiplier", 1.0), "every run would have the same epsilon"),
        ("1,3", ("--privacy.enabled", "false"), "add inf to the list"),
        ("1,3", ("--resume",), "holds no sweep to resume"),
        ("1,3", ("--tasks", -1), "cannot be negative"),
        ("1,3", ("--train.stepz", 3), "did you mean steps?"),
        ("2,8", ("--data.max_length", 4096), "more than the 128 positions"),  # of the model
        ("2,8", ("--adapter.target_modules", "[nonesuch]"), "matches no layer"),
    ],
)
def test_what_no_sweep_takes_is_said_before_anything_is_reserved(
    place: Place, epsilons: str, more: tuple[object, ...], words: str
) -> None:
    assert words in refusal_of_sweep(place, epsilons, *more, code=WRONG)
    assert not place.ledger.exists()


def test_several_processes_do_not_each_sweep(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "dpllm sweep without a launcher" in swept_to(place, "1,3").err


def test_an_interrupted_sweep_goes_on_with_what_was_reserved(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the second run: the first is kept, the second goes on from its checkpoint, and nothing is reserved again."""
    budget(place, 9)
    rate, calls = LearningRate.at, []

    def interrupt(settings, step, num_steps):
        calls.append(step)
        if len(calls) == STEPS + 2:
            os.kill(os.getpid(), signal.SIGINT)
        return rate(settings, step, num_steps)

    with monkeypatch.context() as patch:
        patch.setattr(LearningRate, "at", interrupt)
        answer = swept_to(place, "2,8", "--final")
    assert answer.code == 1
    assert "eps-8 was interrupted after 2 steps" in answer.err
    assert "stopping after this step" in answer.err
    first = contents(place.root / SWEEP / "eps-2")
    with Ledger(place.ledger) as book:
        reserved = [run.reservation.entry for run in book.account("notes").runs]
        assert book.account("notes").final
    assert len(reserved) == 2
    answer = swept_to(place, "2,8", "--resume", "--final")
    assert answer.code == 0, answer.err
    assert "finished before" in answer.out
    after = contents(place.root / SWEEP / "eps-2")
    assert first["export/adapter_model.safetensors"] == after["export/adapter_model.safetensors"]
    assert first["run.json"] == after["run.json"]
    with Ledger(place.ledger) as book:
        runs = book.runs("notes")
        assert [run.reservation.entry for run in runs] == reserved
        assert [(run.state, run.steps) for run in runs] == [("completed", STEPS)] * 2
        assert record(place, "eps-8")["ledger"]["group"] == group_total(
            book.account("notes"), book.run(reserved[1]).reservation.group
        )


def test_a_run_that_fails_leaves_the_others_their_places(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpllm.run.loop.train", Mock(side_effect=DpllmError("the machine went away")))
    answer = swept_to(place, "2,8")
    assert answer.code == 1
    assert "type --resume to go on" in answer.out
    assert [run.state for run in place.runs()] == ["reserved", "reserved"]


def test_a_contradicted_promise_ends_with_its_own_code_once_all_is_written(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = []
    monkeypatch.setattr("dpllm.comparison.sweep._train", lambda *_: None)
    monkeypatch.setattr("dpllm.comparison.sweep._audit", lambda *_: ["eps-2: epsilon is at least 3"])
    monkeypatch.setattr("dpllm.comparison.compare.compare", lambda runs, output, **_: compared.append(output) or Mock())
    monkeypatch.setattr("dpllm.comparison.compare.collect_figures", lambda runs, **_: ({}, None))
    monkeypatch.setattr("dpllm.comparison.shown.table", lambda values: "")
    answer = swept_to(place, "2,8")
    assert answer.code == 4
    assert "eps-2: epsilon is at least 3" in answer.err
    assert len(compared) == 1


def test_a_run_that_lost_its_steps_is_not_trained_for_nothing(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that were charged may have been released, and no checkpoint has them: to repeat them would spend once more."""

    def dies_after_a_step(config, start, **_):
        with Ledger(place.ledger) as book:
            book.charge(start.entry, 1)
        raise DpllmError("killed")

    with monkeypatch.context() as patch:
        patch.setattr("dpllm.run.loop.train", dies_after_a_step)
        assert swept_to(place, "2,8").code == 1
    message = refusal_of_sweep(place, "2,8", "--resume")
    assert "is running after 1 of" in message
    assert "start another sweep" in message
    with Ledger(place.ledger) as book:  # killed between the ledger's last word and run.json
        book.finish(book.runs("notes")[0].reservation.entry, "completed")
    assert "is completed after 1 of" in refusal_of_sweep(place, "2,8", "--resume")


def reserved_only(place: Place, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A sweep that was killed between its reservations and its first run; returns its sweep.json."""
    with monkeypatch.context() as patch:
        patch.setattr("dpllm.comparison.sweep._train", Mock(side_effect=DpllmError("killed")))
        assert swept_to(place, "2,8").code == 1
    return place.root / SWEEP / "sweep.json"


def test_other_peoples_rows_are_not_trained_on_what_was_reserved(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    reserved_only(place, monkeypatch)
    tiny.write_rows(place.train, rows(40, start=1000))
    assert "no longer holds the records" in refusal_of_sweep(place, "2,8", "--resume")
    assert [run.steps for run in place.runs()] == [0, 0]


def test_a_damaged_state_is_not_trained_from(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    state = reserved_only(place, monkeypatch)
    for wrong in (5, None):
        edit_json(state, group=wrong)
        assert "sweep.json was edited" in refusal_of_sweep(place, "2,8", "--resume", code=WRONG)


def test_what_changes_no_promise_may_change_when_a_sweep_goes_on(
    tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A port that is taken, or memory that does not suffice, must not use up a budget."""
    place = make(tmp_path / "place", base, **{"telemetry.textfile": str(tmp_path / "nowhere")})
    assert "is no directory" in swept_to(place, "2,8").err
    train = Mock()
    monkeypatch.setattr("dpllm.comparison.sweep._train", train)
    monkeypatch.setattr("dpllm.comparison.sweep._audit", lambda points, console: [])
    other = ("--telemetry.textfile", "null", "--train.tokens_per_pass", 512, "--train.checkpoint_every", 1)
    assert "another recipe" not in swept_to(place, "2,8", "--resume", *other).err
    assert [call.args[1] for call in train.call_args_list] == [run.reservation.entry for run in place.runs()]
