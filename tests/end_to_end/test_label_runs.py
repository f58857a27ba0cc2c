"""Labels that are private at the source: the file, its record, its account, and what training makes of them."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
from running import Place, as_trained, done, dpllm_, fails_in_step
from test_preference_runs import MEMORISES, asked, pairs  # noqa: F401

from dpllm.canaries import canaries
from dpllm.ledger import Ledger, RunRequest
from dpllm.ledger.budgets import reserve_all
from dpllm.privacy.events import PureDP
from dpllm.privacy.preference import PairLoss
from dpllm.releases import labels
from dpllm.run.subject import record_of

Json = dict[str, Any]


def lines(path: Path) -> list[Json]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def flipped(asked: Place) -> tuple[Place, Path]:  # noqa: F811
    """The place, whose training labels were randomised at epsilon 1 each, four for each of 20 annotators."""
    scored = [{**row, "score": 0.9, "rating": 5} for row in pairs(80)]
    tiny.write_rows(asked.train, scored)
    options = ("--unit", "who", "--max-labels", "4", "--dataset", "notes", "--ledger", asked.ledger)
    output = asked.root / "data" / "flipped.jsonl"
    done("randomize-labels", asked.train, "--epsilon", "1", *options, "--output", output)
    return asked, output


def trained_on(output: Path) -> tuple[str, ...]:
    return "--data.train", str(output), "--data.label_record", str(record_of(output))


def test_the_new_file_has_the_same_pairs_and_nothing_that_tells_a_label(flipped: tuple[Place, Path]) -> None:
    place, output = flipped
    before, after = lines(place.train), lines(output)
    assert {frozenset(row) for row in after} == {frozenset({"who", "prompt", "chosen", "rejected"})}
    assert [{row["chosen"], row["rejected"]} for row in after] == [{r["chosen"], r["rejected"]} for r in before]
    assert [(row["who"], row["prompt"]) for row in after] == [(row["who"], row["prompt"]) for row in before]
    swapped = sum(one["chosen"] != other["chosen"] for one, other in zip(before, after, strict=True))
    assert 5 <= swapped <= 45  # of 80, each with probability 0.269


def test_the_record_holds_no_coin_and_is_verified(flipped: tuple[Place, Path]) -> None:
    place, output = flipped
    record = json.loads(record_of(output).read_text())
    assert record.pop("probability") == pytest.approx(1 / (1 + math.e))
    assert record.keys() == {
        *("schema_version", "mechanism", "neighbouring_relation", "epsilon", "unit", "max_labels", "unit_epsilon"),
        *("dataset", "entry", "date", "file_sha256", "account_epsilon"),
    }
    assert (record["epsilon"], record["max_labels"], record["unit_epsilon"]) == (1.0, 4, 4.0)
    assert record["account_epsilon"] == 4.0
    printed = done("verify", record_of(output), "--ledger", place.ledger).out
    assert "epsilon 1, 4 for the 4 of one unit" in printed
    assert "4 verified" not in printed
    assert printed.count("asserted  ") == 1  # that coins were tossed


def test_the_ledger_keeps_labels_in_an_account_of_their_own(flipped: tuple[Place, Path]) -> None:
    place, output = flipped
    done("train", place.recipe, *trained_on(output))
    with Ledger(place.ledger) as ledger:
        assert set(ledger.datasets()) == {"labels of notes", "notes"}
        (mine,) = ledger.runs("labels of notes")
        assert (mine.event, mine.reservation.unit, mine.state) == (PureDP(4.0), "who", "completed")
        assert mine.reservation.relation == "label_changed"
        # Nothing of the labels is in the account of the pairs.
        (run,) = ledger.runs("notes")
        assert run.reservation.relation == "zero_out"
        assert ledger.spent("labels of notes", 1e-9) == pytest.approx(4.0, abs=1e-3)


def test_training_knows_how_often_labels_are_wrong(
    flipped: tuple[Place, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    place, output = flipped
    seen, call = set(), PairLoss.__call__

    def look(self: PairLoss, *arguments: Any) -> Any:
        seen.add(self)
        return call(self, *arguments)

    monkeypatch.setattr(PairLoss, "__call__", look)
    answer = done("train", place.recipe, *trained_on(output))
    assert seen == {PairLoss("dpo", 0.5, 1 / (1 + math.e))}
    assert "no lower bound: it stops by the schedule" in " ".join(answer.out.split())
    done("card", place.run)
    card = (place.run / "export" / "README.md").read_text()
    for words in (
        "Prompts and answers are *not* protected by that",
        "ε = 4 for all labels of one `who`",
        "No file can show",
    ):
        assert words in card
    shown = done("verify", place.run).out
    assert "verified  labels: a flip with probability 0.268941" in shown
    assert "asserted  labels: coins" in shown
    block = json.loads((place.run / "export" / "privacy.json").read_text())
    assert "file_sha256" not in block["labels"]
    assert block["labels"]["unit_epsilon"] == 4


def test_label_privacy_alone_promises_nothing_for_texts(flipped: tuple[Place, Path]) -> None:
    place, output = flipped
    done("train", place.recipe, *trained_on(output), "--privacy.enabled", "false", "--data.public", "true")
    done("card", place.run)
    card = (place.run / "export" / "README.md").read_text()
    assert "No differential privacy guarantee" in card
    assert "this model may repeat them" in card
    assert "verified  labels" in done("verify", place.run).out


# --- mutants ---------------------------------------------------------------------------------------------------------------


def drawn_again(place: Place, output: Path) -> None:
    """Somebody flips the labels of the file once more."""
    some = [{**row, "chosen": row["rejected"], "rejected": row["chosen"]} for row in lines(output)[:3]]
    tiny.write_rows(output, [*some, *lines(output)[3:]])


def test_labels_that_are_drawn_again_on_resume_are_refused(flipped: tuple[Place, Path]) -> None:
    place, output = flipped
    with pytest.MonkeyPatch.context() as patch:
        fails_in_step(patch, 3)
        with pytest.raises(RuntimeError):
            dpllm_("train", place.recipe, *trained_on(output), "--train.checkpoint_every", "1")
    again = (*trained_on(output), "--train.checkpoint_every", "1", "--resume")
    kept = output.read_bytes()
    drawn_again(place, output)
    answer = dpllm_("train", place.recipe, *again)
    assert answer.code == 3
    assert "not the file that data.label_record" in answer.err
    output.write_bytes(kept)
    done("train", place.recipe, *again)


def other_epsilon(run: Path) -> None:
    recipe = run / "config.yaml"
    recipe.write_text(recipe.read_text().replace("label_epsilon: 1.0", "label_epsilon: 3.0"))
    as_trained(run)


def other_figures(run: Path) -> None:
    block = json.loads((run / "export" / "privacy.json").read_text())
    block["labels"]["unit_epsilon"] = 1.0
    (run / "export" / "privacy.json").write_text(json.dumps(block))


@pytest.mark.parametrize(("break_", "line"), [(other_epsilon, "labels"), (other_figures, "card")])
def test_a_statement_about_other_labels_does_not_verify(
    flipped: tuple[Place, Path], break_: Callable[[Path], None], line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import dpllm.verification.verify as verification

    place, output = flipped
    done("train", place.recipe, *trained_on(output))
    done("card", place.run)
    with pytest.MonkeyPatch.context() as patch:  # a card that does not verify is not even written
        patch.setattr(verification, "insist", lambda *arguments: None)
        break_(place.run)
    answer = dpllm_("verify", place.run)
    assert answer.code == 4
    assert f"failed    {line}" in answer.out


def test_a_ledger_without_these_labels_is_seen(flipped: tuple[Place, Path], tmp_path: Path) -> None:
    _, output = flipped
    with Ledger(tmp_path / "other.sqlite"):
        pass
    answer = dpllm_("verify", record_of(output), "--ledger", tmp_path / "other.sqlite")
    assert answer.code == 4
    assert "has no entry" in answer.out


# --- bad input, one line each ------------------------------------------------------------------------------------------------


def refused(code: int, words: str, *arguments: object) -> None:
    answer = dpllm_(*arguments)
    assert answer.code == code, answer
    assert words in answer.err
    assert answer.err.count("\n") == 1


def test_labels_are_randomised_once(flipped: tuple[Place, Path]) -> None:
    place, output = flipped
    command = ("randomize-labels", "--epsilon", "1", "--ledger", place.ledger, "--output", place.root / "again.jsonl")
    refused(3, "were randomised before (labels of notes in the ledger)", *command, place.train)
    refused(3, "were randomised already", *command, output)
    # A copy with the answers as they are now, without its record, is the same data.
    shutil.copy(output, place.root / "copy.jsonl")
    refused(3, "were randomised before", *command, place.root / "copy.jsonl")
    with Ledger(place.ledger) as ledger:
        assert len(ledger.runs("labels of notes")) == 1


def test_a_draw_that_died_is_paid_and_its_labels_are_drawn_again_only_at_a_second_price(
    flipped: tuple[Place, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    place, _ = flipped
    own = tiny.write_rows(place.root / "own.jsonl", pairs(20, start=3000))
    command = ("randomize-labels", own, "--epsilon", "1", "--ledger", place.ledger, "--dataset", "own")

    def dies(*_: Any) -> bool:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(labels, "flipped", dies)
        assert dpllm_(*command).code == 1
    assert not (place.root / "own.randomized.jsonl").exists()
    refused(3, "One draw never ended", *command)
    done(*command, "--again")
    with Ledger(place.ledger) as ledger:
        assert [run.event for run in ledger.runs("labels of own")] == [PureDP(1.0)] * 2
    refused(3, "were randomised before", *command, "--output", place.root / "third.jsonl")


def test_what_cannot_be_randomised_or_trained_on_is_one_line(flipped: tuple[Place, Path]) -> None:
    place, output = flipped
    other = tiny.write_rows(place.root / "others.jsonl", pairs(40, start=900))
    flip = ("randomize-labels", other, "--ledger", place.ledger)
    refused(2, "more than --max-labels 1 labels", *flip, "--epsilon", "1", "--unit", "who", "--max-labels", "1")
    refused(2, "go together", *flip, "--epsilon", "1", "--unit", "who")
    refused(2, "--epsilon", *flip, "--epsilon", "0")
    refused(2, "exists already", *flip, "--epsilon", "1", "--output", output)
    text = tiny.write_rows(place.root / "text.jsonl", [{"text": "a"}])
    refused(2, "which format preference reads", "randomize-labels", text, "--ledger", place.ledger, "--epsilon", "1")
    with Ledger(place.ledger) as ledger:
        assert ledger.datasets() == ["labels of notes"]  # none of these was charged
    train = ("train", place.recipe)
    refused(2, "were randomised (flipped.labels.json is next to it)", *train, "--data.train", output)
    refused(3, "not the file that", *train, "--data.train", other, *trained_on(output)[2:])
    refused(2, "sets how often they are wrong", *train, *trained_on(output), "--train.label_smoothing", "0.1")
    refused(2, "is not the 1 of data.label_record", *train, *trained_on(output), "--data.label_epsilon", "2")
    stored = json.loads(record_of(output).read_text("utf-8"))
    record_of(output).write_text(json.dumps(stored | {"probability": 0.1}), encoding="utf-8")
    refused(2, f"data.label_record {record_of(output)}: ", *train, *trained_on(output))


def test_every_label_gets_a_coin_of_its_own(flipped: tuple[Place, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """All flipped, none flipped: what the coin says is what happens, for each row by itself."""
    place, _ = flipped
    for number, coins in enumerate(([True], [False], [True, False])):
        said = [coins[row % len(coins)] for row in range(40)]
        turns = iter(said)
        monkeypatch.setattr(labels, "flipped", lambda epsilon, below, turns=turns: next(turns))
        own = tiny.write_rows(place.root / f"own{number}.jsonl", pairs(40, start=2000 + 200 * number))
        output = place.root / f"out{number}.jsonl"
        done("randomize-labels", own, "--epsilon", "1", "--ledger", place.ledger, "--output", output)
        swapped = [a["chosen"] != b["chosen"] for a, b in zip(lines(own), lines(output), strict=True)]
        assert swapped == said


def flips(root: Path, rows: list[Json], *more: object, name: str = "given") -> Any:
    """What the command says of these rows, with one ledger; its file is NAME.flipped.jsonl."""
    tiny.write_rows(root / f"{name}.jsonl", rows)
    where = ("--ledger", root / "l.sqlite", "--output", root / f"{name}.flipped.jsonl")
    return dpllm_("randomize-labels", root / f"{name}.jsonl", "--epsilon", "1", *where, *more)


def test_what_else_a_message_says_stays_behind(tmp_path: Path) -> None:
    """A mutant copies the score of the answer that was preferred along with it."""
    turn = {"role": "assistant", "score": 9.5, "label": "preferred"}
    rows = [
        {"prompt": [{"role": "user", "content": f"q{n}", "id": n}], "chosen": [{**turn, "content": f"a{n}"}]}
        for n in range(4)
    ]
    rows = [{**row, "rejected": [{"role": "assistant", "content": f"b{n}", "weight": 1}]} for n, row in enumerate(rows)]
    assert flips(tmp_path, rows).code == 0
    result = [turn for row in lines(tmp_path / "given.flipped.jsonl") for field in row.values() for turn in field]
    assert {frozenset(turn) for turn in result} == {frozenset({"role", "content"})}
    rows[0]["chosen"] = [{"role": "assistant", "content": [{"type": "text", "text": "a", "score": 1}]}]
    assert "whose content is not text" in flips(tmp_path, rows, name="parts").err


def test_the_same_labels_in_another_layout_are_not_drawn_again(tmp_path: Path) -> None:
    """A mutant hashes the prompt apart: a common beginning of both answers makes another one."""
    rows = [{"prompt": f"Question {n}:", "chosen": f"the {n} one", "rejected": f"the  other {n}"} for n in range(6)]
    whole = [{name: f"{row['prompt']} {row[name]}" for name in ("chosen", "rejected")} for row in rows]
    assert flips(tmp_path, rows).code == 0
    answer = flips(tmp_path, whole, name="whole")
    assert answer.code == 3
    assert "randomised before" in answer.err


def test_a_pair_that_stands_twice_has_one_label(tmp_path: Path) -> None:
    rows = [{"prompt": "q", "chosen": f"a{n}", "rejected": f"b{n}", "who": "p"} for n in (0, 1, 0)]
    assert "has some pairs twice" in flips(tmp_path, rows).err
    assert flips(tmp_path, rows, "--unit", "who", "--max-labels", 3, name="of one").code == 0


def test_a_part_of_labels_that_were_drawn_is_charged_to_the_same_people(tmp_path: Path) -> None:
    """What is to be typed is an option of this command."""
    flips(tmp_path, pairs(30))
    part = tiny.write_rows(tmp_path / "part.jsonl", pairs(20))
    options = (
        "randomize-labels",
        part,
        "--epsilon",
        "1",
        "--ledger",
        tmp_path / "l.sqlite",
        "--output",
        tmp_path / "part.flipped.jsonl",
    )
    assert "type --again" in " ".join(dpllm_(*options).err.split())
    advice = re.search(
        r"type --dataset '(.*?)'", " ".join(dpllm_(*options, "--again", "--dataset", "other").err.split())
    )
    assert advice
    done(*options, "--again", "--dataset", advice[1])


def test_units_and_outputs_that_cannot_be_are_refused(tmp_path: Path) -> None:
    rows = [{"prompt": "q", "chosen": f"a{n}", "rejected": f"b{n}"} for n in range(3)]
    assert "the label decides" in flips(tmp_path, rows, "--unit", "chosen", "--max-labels", 1).err
    assert "ends with .jsonl" in flips(tmp_path, rows, "--output", tmp_path / "x.json").err
    assert not (tmp_path / "given.flipped.jsonl").exists()


@pytest.mark.parametrize("way", ["list", "glob"])
def test_flipped_labels_are_not_taken_as_true_however_they_are_named(flipped: tuple[Place, Path], way: str) -> None:
    place, output = flipped
    named = f"[{output}]" if way == "list" else f"{str(output)[:-1]}*"
    assert "its labels were randomised" in dpllm_("plan", place.recipe, "--data.train", named).err


@pytest.mark.parametrize("changed", [{"epsilon": 1e4}, {"epsilon": 1e-17}, {"epsilon": 3.0}, {"unit_epsilon": 1.0}])
def test_a_record_that_contradicts_itself_trains_nothing(flipped: tuple[Place, Path], changed: Json) -> None:
    place, output = flipped
    record = json.loads(record_of(output).read_text())
    record_of(output).write_text(json.dumps({**record, **changed}))
    answer = dpllm_("plan", place.recipe, *trained_on(output))
    assert answer.code in (2, 3)
    assert answer.err.count("\n") == 1


def test_labels_whose_entry_was_reserved_and_not_charged_do_not_verify(flipped: tuple[Place, Path]) -> None:
    """A mutant asks only whether the entry is there."""
    place, output = flipped
    record = json.loads(record_of(output).read_text())
    with Ledger(place.ledger) as ledger:
        claim = reserve_all(ledger, record["dataset"], [RunRequest(PureDP(4.0), 1e-9, 1, "who", "label_changed")])[0]
    record_of(output).write_text(json.dumps({**record, "entry": claim.entry}))
    answer = dpllm_("verify", record_of(output), "--ledger", place.ledger)
    assert answer.code != 0
    assert "charged for 0 steps" in answer.out


def audited_labels(place: Place, output: Path, *more: str) -> Json:
    """What an audit finds of canaries whose coins are labels."""
    kind = "new_tokens" if "builtin:tiny" in more else "digits"  # the other model's vocabulary is too small
    planted = ("--audit.canaries", f"{{groups: {{1: 10, 16: 40}}, kind: {kind}}}", "--data.max_length", "128")
    unit = ("--data.unit", "example", "--privacy.enabled", "false", "--data.public", "true")
    done("train", place.recipe, *trained_on(output), *planted, *unit, *more)
    answer = dpllm_("audit", place.run)
    assert "Every pair was planted" in " ".join(answer.out.split())
    record: Json = json.loads((place.run / "private" / "audit" / "audit.json").read_text())
    return record


def test_canaries_whose_coins_are_labels_test_the_epsilon_of_a_label(flipped: tuple[Place, Path]) -> None:
    place, output = flipped
    audit_report = audited_labels(place, output)
    assert audit_report["claim"] == {"epsilon": 1.0, "delta": 0.0, "unit": "label"}
    assert {audit_report["repeated"]["16"]["claim"][name] for name in ("epsilon", "delta")} == {
        1.0,
        0.0,
    }  # one flip, copied
    assert audit_report["canaries"]["references"] == 0
    assert not audit_report["published"]
    assert audit_report["verdict"] != "falsified"


@pytest.mark.full
@pytest.mark.parametrize("flips", [True, False])
def test_labels_of_canaries_falsify_the_claim_only_where_they_were_not_flipped(
    flipped: tuple[Place, Path], monkeypatch: pytest.MonkeyPatch, flips: bool
) -> None:
    if not flips:
        monkeypatch.setattr(canaries, "flipped", lambda epsilon, below: False)
    audit_report = audited_labels(*flipped, *MEMORISES)
    assert (audit_report["verdict"] == "falsified") is not flips
    assert audit_report["repeated"]["16"]["attacks"]["ratio"]["auc"] > 0.5


def test_what_a_label_audit_cannot_be_is_one_line(flipped: tuple[Place, Path]) -> None:
    place, output = flipped
    plain = ("--privacy.enabled", "false", "--data.public", "true", *trained_on(output), "--data.max_length", "128")
    done("train", place.recipe, *plain, "--audit.canaries", "{groups: {1: 40}}")
    assert "canaries are labels" in dpllm_("audit", place.run, "--shadows", "2").err
    private = place.root / "private-run"
    done(
        "train",
        place.recipe,
        *trained_on(output),
        *plain[-2:],
        "--audit.canaries",
        "{groups: {1: 40}}",
        "--output_dir",
        private,
    )
    done("audit", place.run)
    assert "its canaries are labels that were flipped" in " ".join(
        dpllm_("audit", private, "--positive-control", place.run).err.split()
    )
    done("train", place.recipe, *plain, "--audit.canaries", "{groups: {1: 1}}", "--overwrite")
    assert "prefer the same answer" in " ".join(dpllm_("audit", place.run).err.split())
