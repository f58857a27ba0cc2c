"""Labels that are private at the source: the file, its record, its account, and what training makes of them."""

from __future__ import annotations

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import tiny
from published import edit, read
from running import Place, as_trained, calls, done, dpllm_, edit_json, refused, train_until, unverified
from test_preference_runs import MEMORISES, asked, pairs  # noqa: F401

from dpllm.canaries import canaries
from dpllm.ledger import Ledger, RunRequest
from dpllm.ledger.budgets import reserve_all
from dpllm.privacy.events import PureDP
from dpllm.privacy.preference import PairLoss
from dpllm.releases import labels
from dpllm.run.subject import record_of

Json = dict[str, Any]
PUBLIC = ("--privacy.enabled", "false", "--data.public", "true")


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
    swapped = sum(old["chosen"] != new["chosen"] for old, new in zip(before, after, strict=True))
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
        (draw,) = ledger.runs("labels of notes")
        assert (draw.event, draw.reservation.unit, draw.state) == (PureDP(4.0), "who", "completed")
        assert draw.reservation.relation == "label_changed"
        # Nothing of the labels is in the account of the pairs.
        (run,) = ledger.runs("notes")
        assert run.reservation.relation == "zero_out"
        assert ledger.spent("labels of notes", 1e-9) == pytest.approx(4.0, abs=1e-3)


def test_training_knows_how_often_labels_are_wrong(
    flipped: tuple[Place, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    place, output = flipped
    losses = calls(monkeypatch, PairLoss, "__call__", lambda loss, *_: loss)
    answer = done("train", place.recipe, *trained_on(output))
    assert set(losses) == {PairLoss("dpo", 0.5, 1 / (1 + math.e))}
    assert "no lower bound: it stops by the schedule" in " ".join(answer.out.split())
    shown = place.does("card", "verify")
    unprotected = "Prompts and answers are *not* protected by that"
    assert all(words in place.card for words in (unprotected, "ε = 4 for all labels of one `who`", "No file can show"))
    assert "verified  labels: a flip with probability 0.268941" in shown
    assert "asserted  labels: coins" in shown
    block = place.json("export/privacy.json")
    assert "file_sha256" not in block["labels"]
    assert block["labels"]["unit_epsilon"] == 4


def test_label_privacy_alone_promises_nothing_for_texts(flipped: tuple[Place, Path]) -> None:
    place, output = flipped
    done("train", place.recipe, *trained_on(output), *PUBLIC)
    assert "verified  labels" in place.does("card", "verify")
    assert "No differential privacy guarantee" in place.card
    assert "this model may repeat them" in place.card


def test_labels_that_are_drawn_again_on_resume_are_refused(
    flipped: tuple[Place, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody flips the labels of the file once more."""
    place, output = flipped
    options = (*trained_on(output), "--train.checkpoint_every", "1")
    train_until(monkeypatch, 3, place.recipe, *options)
    drawn, content = lines(output), output.read_bytes()
    swapped = [{**row, "chosen": row["rejected"], "rejected": row["chosen"]} for row in drawn[:3]]
    tiny.write_rows(output, [*swapped, *drawn[3:]])
    assert "not the file that data.label_record" in refused("train", place.recipe, *options, "--resume", code=3)
    output.write_bytes(content)
    done("train", place.recipe, *options, "--resume")


def test_a_statement_about_other_labels_does_not_verify(flipped: tuple[Place, Path]) -> None:
    place, output = flipped
    done("train", place.recipe, *trained_on(output))
    done("card", place.run)
    block = place.json("export/privacy.json")
    edit_json(place.run / "export" / "privacy.json", labels={**block["labels"], "unit_epsilon": 1.0})
    assert "failed    card" in unverified(place.run)
    edit_json(place.run / "export" / "privacy.json", labels=block["labels"])
    edit(place.run / "config.yaml", "label_epsilon: 1.0", "label_epsilon: 3.0")
    as_trained(place.run)
    assert "failed    labels" in unverified(place.run)


@pytest.mark.parametrize("case", ["in another ledger", "reserved and not charged"])
def test_labels_that_the_ledger_did_not_charge_do_not_verify(flipped: tuple[Place, Path], case: str) -> None:
    """A mutant asks only whether the entry is there."""
    place, output = flipped
    dataset, elsewhere = json.loads(record_of(output).read_text())["dataset"], case == "in another ledger"
    if elsewhere:
        place.ledger.rename(place.root / "moved.sqlite")
    with Ledger(place.ledger) as ledger:
        (claim,) = reserve_all(ledger, dataset, [RunRequest(PureDP(4.0), 1e-9, 1, "who", "label_changed")])
    if not elsewhere:
        edit_json(record_of(output), entry=claim.entry)
    words = "has no entry" if elsewhere else "charged for 0 steps"
    assert words in unverified(record_of(output), "--ledger", place.ledger)


def test_labels_are_randomised_once(flipped: tuple[Place, Path]) -> None:
    place, output = flipped
    command = ("randomize-labels", "--epsilon", "1", "--ledger", place.ledger, "--output", place.root / "again.jsonl")
    assert "were randomised before (labels of notes in the ledger)" in refused(*command, place.train, code=3)
    assert "were randomised already" in refused(*command, output, code=3)
    # A copy with the answers as they are now, without its record, is the same data.
    shutil.copy(output, place.root / "copy.jsonl")
    assert "were randomised before" in refused(*command, place.root / "copy.jsonl", code=3)
    assert len(place.runs("labels of notes")) == 1


def test_a_draw_that_died_is_paid_and_its_labels_are_drawn_again_only_at_a_second_price(
    flipped: tuple[Place, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    place, _ = flipped
    own = tiny.write_rows(place.root / "own.jsonl", pairs(20, start=3000))
    command = ("randomize-labels", own, "--epsilon", "1", "--ledger", place.ledger, "--dataset", "own")

    with monkeypatch.context() as patch:
        patch.setattr(labels, "flipped", Mock(side_effect=KeyboardInterrupt))
        assert dpllm_(*command).code == 1
    assert not (place.root / "own.randomized.jsonl").exists()
    assert "One draw never ended" in refused(*command, code=3)
    done(*command, "--again")
    assert [run.event for run in place.runs("labels of own")] == [PureDP(1.0)] * 2
    assert "were randomised before" in refused(*command, "--output", place.root / "third.jsonl", code=3)


def test_what_cannot_be_randomised_or_trained_on_is_one_line(flipped: tuple[Place, Path]) -> None:
    place, output = flipped
    other = tiny.write_rows(place.root / "others.jsonl", pairs(40, start=900))
    flip = ("randomize-labels", other, "--ledger", place.ledger)
    assert "more than --max-labels 1 labels" in refused(*flip, "--epsilon", "1", "--unit", "who", "--max-labels", "1")
    assert "go together" in refused(*flip, "--epsilon", "1", "--unit", "who")
    assert "--epsilon" in refused(*flip, "--epsilon", "0")
    assert "exists already" in refused(*flip, "--epsilon", "1", "--output", output)
    text = ("randomize-labels", tiny.write_rows(place.root / "text.jsonl", [{"text": "a"}]), "--ledger", place.ledger)
    assert "which format preference reads" in refused(*text, "--epsilon", "1")
    with Ledger(place.ledger) as ledger:
        assert ledger.datasets() == ["labels of notes"]  # none of these was charged
    train = ("train", place.recipe)
    assert "were randomised (flipped.labels.json is next to it)" in refused(*train, "--data.train", output)
    assert "not the file that" in refused(*train, "--data.train", other, *trained_on(output)[2:], code=3)
    assert "sets how often they are wrong" in refused(*train, *trained_on(output), "--train.label_smoothing", "0.1")
    assert "is not the 1 of data.label_record" in refused(*train, *trained_on(output), "--data.label_epsilon", "2")
    edit_json(record_of(output), probability=0.1)
    assert f"data.label_record {record_of(output)}: " in refused(*train, *trained_on(output))


def test_every_label_gets_a_coin_of_its_own(flipped: tuple[Place, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """All flipped, none flipped: what the coin says is what happens, for each row by itself."""
    place, _ = flipped
    for number, coins in enumerate(([True], [False], [True, False])):
        flips = [coins[row % len(coins)] for row in range(40)]
        turns = iter(flips)
        monkeypatch.setattr(labels, "flipped", lambda epsilon, below, turns=turns: next(turns))
        own = tiny.write_rows(place.root / f"own{number}.jsonl", pairs(40, start=2000 + 200 * number))
        output = place.root / f"out{number}.jsonl"
        done("randomize-labels", own, "--epsilon", "1", "--ledger", place.ledger, "--output", output)
        swapped = [a["chosen"] != b["chosen"] for a, b in zip(lines(own), lines(output), strict=True)]
        assert swapped == flips


def flips(root: Path, rows: list[Json], *more: object, name: str = "given") -> Any:
    """What the command says of these rows, with one ledger; its file is NAME.flipped.jsonl."""
    tiny.write_rows(root / f"{name}.jsonl", rows)
    where = ("--ledger", root / "l.sqlite", "--output", root / f"{name}.flipped.jsonl")
    return dpllm_("randomize-labels", root / f"{name}.jsonl", "--epsilon", "1", *where, *more)


def test_what_else_a_message_says_stays_behind(tmp_path: Path) -> None:
    """A mutant copies the score of the answer that was preferred along with it."""
    user, answer = {"role": "user", "id": 3}, {"role": "assistant", "score": 9.5, "label": "preferred"}
    parts = {"prompt": user, "chosen": answer, "rejected": {"role": "assistant", "weight": 1}}
    rows = [{part: [{**turn, "content": f"{part} {n}"}] for part, turn in parts.items()} for n in range(4)]
    assert flips(tmp_path, rows).code == 0
    result = [turn for row in lines(tmp_path / "given.flipped.jsonl") for field in row.values() for turn in field]
    assert {frozenset(turn) for turn in result} == {frozenset({"role", "content"})}
    rows[0]["chosen"] = [{"role": "assistant", "content": [{"type": "text", "text": "a", "score": 1}]}]
    assert "whose content is not text" in flips(tmp_path, rows, name="parts").err


def test_the_same_labels_in_another_layout_are_not_drawn_again(tmp_path: Path) -> None:
    """A mutant hashes the prompt apart: a common beginning of both answers makes another one."""
    rows = [{"prompt": f"Question {n}:", "chosen": f"the {n} one", "rejected": f"the  other {n}"} for n in range(6)]
    joined = [{name: f"{row['prompt']} {row[name]}" for name in ("chosen", "rejected")} for row in rows]
    assert flips(tmp_path, rows).code == 0
    answer = flips(tmp_path, joined, name="whole")
    assert answer.code == 3
    assert "randomised before" in answer.err


def test_a_pair_that_stands_twice_has_one_label(tmp_path: Path) -> None:
    rows = [{"prompt": "q", "chosen": f"a{n}", "rejected": f"b{n}", "who": "p"} for n in (0, 1, 0)]
    assert "has some pairs twice" in flips(tmp_path, rows).err
    assert flips(tmp_path, rows, "--unit", "who", "--max-labels", 3, name="of one").code == 0


def test_a_part_of_labels_that_were_drawn_is_charged_to_the_same_people(tmp_path: Path) -> None:
    """What is to be typed is an option of this command."""
    flips(tmp_path, pairs(30))
    assert "type --again" in " ".join(flips(tmp_path, pairs(20), name="part").err.split())
    answer = flips(tmp_path, pairs(20), "--again", "--dataset", "other", name="part")
    advice = re.search(r"type --dataset '(.*?)'", " ".join(answer.err.split()))
    assert advice
    assert flips(tmp_path, pairs(20), "--again", "--dataset", advice[1], name="part").code == 0


def test_units_and_outputs_that_cannot_be_are_refused(tmp_path: Path) -> None:
    rows = [{"prompt": "q", "chosen": f"a{n}", "rejected": f"b{n}"} for n in range(3)]
    assert "the label decides" in flips(tmp_path, rows, "--unit", "chosen", "--max-labels", 1).err
    assert "ends with .jsonl" in flips(tmp_path, rows, "--output", tmp_path / "x.json").err
    assert not (tmp_path / "given.flipped.jsonl").exists()


def test_flipped_labels_are_not_taken_as_true_however_they_are_named(flipped: tuple[Place, Path]) -> None:
    place, output = flipped
    for named in (f"[{output}]", f"{str(output)[:-1]}*"):
        assert "its labels were randomised" in dpllm_("plan", place.recipe, "--data.train", named).err


def audited_labels(place: Place, output: Path, *more: str) -> Json:
    """What an audit finds of canaries whose coins are labels."""
    kind = "new_tokens" if "builtin:tiny" in more else "digits"  # the other model's vocabulary is too small
    planted = ("--audit.canaries", f"{{groups: {{1: 10, 16: 40}}, kind: {kind}}}", "--data.max_length", "128")
    done("train", place.recipe, *trained_on(output), *planted, "--data.unit", "example", *PUBLIC, *more)
    assert "Every pair was planted" in " ".join(dpllm_("audit", place.run).out.split())
    return place.json("private/audit/audit.json")


def test_canaries_whose_coins_are_labels_test_the_epsilon_of_a_label(flipped: tuple[Place, Path]) -> None:
    place, output = flipped
    audit_report = audited_labels(place, output)
    assert audit_report["claim"] == {"epsilon": 1.0, "delta": 0.0, "unit": "label"}
    copied = audit_report["repeated"]["16"]["claim"]
    assert (copied["epsilon"], copied["delta"]) == (1.0, 0.0)  # one flip, copied
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
    train = ("train", place.recipe, *trained_on(output), "--data.max_length", "128")
    done(*train, *PUBLIC, "--audit.canaries", "{groups: {1: 40}}")
    assert "canaries are labels" in dpllm_("audit", place.run, "--shadows", "2").err
    private = place.root / "private-run"
    done(*train, "--audit.canaries", "{groups: {1: 40}}", "--output_dir", private)
    done("audit", place.run)
    answer = dpllm_("audit", private, "--positive-control", place.run)
    assert "its canaries are labels that were flipped" in " ".join(answer.err.split())
    done(*train, *PUBLIC, "--audit.canaries", "{groups: {1: 1}}", "--overwrite")
    assert "prefer the same answer" in " ".join(dpllm_("audit", place.run).err.split())


# --- models made from models that learned labels of the same people: their statements of the account ---------------------------


def drawn(place: Place, name: str, start: int, *more: object) -> Path:
    """Three labels for each of 20 annotators, at epsilon 1.5 each."""
    pairs_file = tiny.write_rows(place.root / "data" / f"{name}.jsonl", pairs(60, start))
    output = place.root / "data" / f"{name}.flipped.jsonl"
    options = ("--unit", "who", "--max-labels", "3", "--dataset", "notes", "--ledger", place.ledger)
    done("randomize-labels", pairs_file, "--epsilon", "1.5", *options, "--output", output, *more)
    return output


def trained(place: Place, run: Path, *more: object) -> Json:
    """The statement of a run with a card."""
    done("train", place.recipe, *PUBLIC, "--audit.canaries", "null", "--output_dir", run, *more)
    done("card", run)
    return read(run / "export")


def test_models_on_labels_of_the_same_people_state_all_of_them(asked: Place) -> None:  # noqa: F811
    first, second, third = (asked.root / name for name in ("run", "second", "third"))
    old = drawn(asked, "first", 0)
    trained(asked, first, *trained_on(old))
    assert "charged exactly this" in done("verify", first).out
    new = drawn(asked, "second", 1000)
    assert json.loads(record_of(new).read_text())["account_epsilon"] == 9.0
    # The first card is of the time before the second draw.
    for path in (first, record_of(old)):
        shown = done("verify", path, "--ledger", asked.ledger).out
        assert "charged exactly this" not in shown
        assert re.search(r"asserted  labels: ledger: .* charged 4.5 for this draw, .* holds 9 in all", shown)

    block = trained(asked, second, *trained_on(new), "--model.adapter", first / "export")
    assert (block["labels"]["unit_epsilon"], block["labels"]["account_epsilon"]) == (4.5, 9.0)
    assert [item["unit_epsilon"] for item in block["labels_before"]] == [4.5]
    assert block["lineage"]["same_dataset"]
    assert (
        "this run gives no guarantee" in block["lineage"]["reason"]
    )  # their labels have one account, whose total is stated
    card = (second / "export" / "README.md").read_text()
    assert "ε = 9 for all that its account holds" in card
    assert "`labels of notes` holds ε = 9 for one `who`, 4.5 of it for this draw" in card
    assert f"entry `{block['labels_before'][0]['entry']}`" in card
    shown = done("verify", second).out
    assert re.search(r"verified  labels: ledger: .* charged 4.5 for this draw, and its account holds 9 in all", shown)
    assert "charged exactly this" not in shown

    # A third one learns nothing of labels, and knows of both draws.
    data = tiny.write_rows(asked.root / "third.jsonl", pairs(40, 3000))
    block = trained(asked, third, "--data.train", data, "--model.adapter", second / "export")
    assert "labels" not in block
    assert [item["account_epsilon"] for item in block["labels_before"]] == [9.0, 4.5]
    assert "those that taught the models before this one" in (third / "export" / "README.md").read_text()
    assert "0 failed" in done("verify", third).out


def test_budgets_of_labels_by_command(asked: Place) -> None:  # noqa: F811
    init = ("ledger", "init", "notes", "--epsilon", "9", "--delta", "1e-6", "--unit", "who", "--reason", "a study")
    output = done(*init, "--relation", "label_changed", "--ledger", asked.ledger).out
    assert "labels of notes: epsilon 9" in output
    drawn(asked, "first", 0)
    drawn(asked, "second", 1000)
    third = tiny.write_rows(asked.root / "third.jsonl", pairs(20, 2000))
    more = ("--epsilon", "0.1", "--unit", "who", "--max-labels", "1", "--dataset", "notes", "--ledger", asked.ledger)
    message = refused("randomize-labels", third, *more, code=3)
    assert "100% of epsilon 9 used, and this run would use another 1.11%" in message
    assert "100% of epsilon 9 used" in " ".join(done("ledger", "show", "--ledger", asked.ledger).out.split())


def test_a_second_draw_by_command_states_the_sum(asked: Place) -> None:  # noqa: F811
    data = drawn(asked, "first", 0)
    options = ("--epsilon", "1.5", "--unit", "who", "--max-labels", "3", "--dataset", "notes", "--ledger", asked.ledger)
    command = ("randomize-labels", data.with_name("first.jsonl"), *options, "--output", data.with_name("more.jsonl"))
    assert "costs epsilon 4.5 more for one who, 9 in all" in refused(*command, code=3)
    assert "now holds epsilon 9 for one who" in " ".join(done(*command, "--again").out.split())
