"""``dpllm synthesize --by inference``: paid before the first token, one vote a unit, and the same draws after a crash."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import tiny
from running import done, dpllm_
from voting import ROWS, TOKENS, Place, shares_of

from dpllm.files import read_json
from dpllm.ledger import Ledger
from dpllm.model import loading
from dpllm.model.loading import load_tokenizer
from dpllm.privacy.accounting import epsilon
from dpllm.privacy.clipped_logits import Ballot
from dpllm.recipe.config import ModelConfig
from dpllm.releases import inference, inference_budget
from dpllm.releases.draft import Draft


@pytest.fixture
def place(tmp_path: Path, base: Path) -> Place:
    return Place(tmp_path, base)


def test_rows_are_written_charged_and_verified(place: Place) -> None:
    output = done(*place.words()).out
    record, (run,) = place.record(), place.runs()
    assert f"{record['rows']} rows of {record['texts']} texts drawn" in output
    assert record["rows"] == ROWS
    assert run.state == "completed"
    assert run.event.to_json() == record["event"]
    assert record["event"]["count"] == TOKENS
    assert record["epsilon"] == epsilon(run.event, record["delta"], "zero_out") <= 8
    assert record["epsilon"] > 7.9 or record["clip"] == inference_budget.MOST_CLIP
    assert done("verify", place.output, "--ledger", place.ledger).code == 0
    assert not place.draft().exists()
    again = dpllm_(*place.words())
    assert again.code == 2
    assert "already exists" in again.err
    assert len(place.runs()) == 1


def test_what_is_planned_spends_nothing(place: Place) -> None:
    record = json.loads(done(*place.words("--dry-run", "--json")).out)
    assert record["texts"] == 40 // record["batch_size"]
    assert record["epsilon"] <= 8
    assert not place.ledger.exists()
    assert not place.output.exists()


@pytest.fixture
def votes(monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[int, ...]]]:
    """Of each draw, the rows of logits of each unit."""
    seen: list[list[tuple[int, ...]]] = []
    draw, vote = Ballot.draw, Ballot.vote

    def watched(self: Ballot, rows: Any, public: Any) -> Any:
        seen[-1].append(rows.shape)
        return vote(self, rows, public)

    def drawing(self: Any, logits: Any, sizes: Any) -> int:
        seen.append([])
        return drawn(self, logits, sizes)

    drawn = inference._Job._draw
    monkeypatch.setattr(Ballot, "vote", watched)
    monkeypatch.setattr(inference._Job, "_draw", drawing)
    assert draw is Ballot.draw
    return seen


def test_a_unit_has_one_vote_whatever_it_brings(place: Place, votes: list[list[tuple[int, ...]]]) -> None:
    done(*place.words("--unit", "owner", "--max-examples-per-unit", 2, "--batch", 4))
    assert place.record()["num_units"] == 20
    assert votes
    assert all(len(of_draw) == 4 and all(rows == 2 for rows, _ in of_draw) for of_draw in votes)


def test_batches_are_disjoint_and_follow_slots_or_coins(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []
    text = inference._Job._text

    def watched(self: Any, number: int, batch: Any, line: str) -> Any:
        seen.append([row.parts["text"] for unit in batch for row in unit])
        return text(self, number, batch, line)

    monkeypatch.setattr(inference._Job, "_text", watched)
    done(*place.words("--batch", 8))
    rows = [json.loads(line)["text"] for line in place.data.read_text("utf-8").splitlines()]
    assert seen == [rows[8 * n : 8 * n + 8] for n in range(ROWS)]
    seen.clear()
    done(
        *place.words(
            "--batch",
            8,
            "--data.public_size",
            45,
            "--output",
            place.root / "coins",
            "--rows",
            5,
            "--ledger",
            place.root / "coins.sqlite",
        )
    )
    place.ledger = place.root / "coins.sqlite"
    assert place.runs()[-1].reservation.relation == "add_or_remove_one"
    drawn = [item for batch in seen for item in batch]
    assert sorted(drawn) == sorted(rows)  # 45 // 8 texts, and each unit in one of them
    assert len({len(batch) for batch in seen}) > 1


def dies_at(patch: pytest.MonkeyPatch, number: int, *, drawn: bool) -> None:
    """The so-manyth draw ends in a crash, before the token is known, or once it is written."""
    add, count = Draft.add, [0]

    def dying(self: Draft, *lines: Any) -> None:
        add(self, *lines)
        here = [len(line) for line in lines] == [2 if drawn else 1]
        count[0] += here
        if here and count[0] == number:
            raise RuntimeError("killed")

    patch.setattr(Draft, "add", dying)


@pytest.mark.parametrize("drawn", [True, False])
def test_a_crash_keeps_what_was_drawn_and_what_it_lost_counts(place: Place, drawn: bool) -> None:
    with pytest.MonkeyPatch.context() as patch:
        dies_at(patch, 3, drawn=drawn)
        with pytest.raises(RuntimeError, match="killed"):
            dpllm_(*place.words())
    (run,) = place.runs()
    assert run.steps == 1
    before = place.draft().read_bytes()
    calls = []
    with pytest.MonkeyPatch.context() as patch:
        real = inference._Job._next
        patch.setattr(inference._Job, "_next", lambda self, text, make: calls.append(text) or real(self, text, make))
        patch.setattr(Path, "unlink", lambda self, missing_ok=False: None)  # so that the draws can be read
        done(*place.words())
    assert [item.reservation.entry for item in place.runs()] == [run.reservation.entry]
    lines = place.draft().read_bytes().splitlines()
    whole = before[: before.rfind(b"\n")].splitlines()
    assert lines[: len(whole)] == whole
    noted = [json.loads(line) for line in lines[1:]]
    begun = [line[0] for line in noted if len(line) == 1]
    assert (len(begun) > len(noted) / 2) == (not drawn)  # of the lost one there is no token
    assert all(begun.count(n) <= TOKENS for n in range(ROWS))
    assert calls.count(0) == begun.count(0) - 3  # none of them again
    assert place.record()["texts"] >= ROWS


def test_other_settings_do_not_go_on_with_paid_draws(place: Place) -> None:
    with pytest.MonkeyPatch.context() as patch:
        dies_at(patch, 2, drawn=True)
        with pytest.raises(RuntimeError):
            dpllm_(*place.words())
    for other in (("--temperature", 0.9), ("--batch", 9), ("--prompt", "Say {text}"), ("--delta", 1e-4)):
        answer = dpllm_(*place.words(*other))
        assert (answer.code, "an interrupted call began with another" in answer.err) == (2, True), answer.err
    assert len(place.runs()) == 1
    place.draft().write_bytes(b'{"settings": 1}\nnonsense\n')
    assert "cannot be read" in dpllm_(*place.words()).err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--rows", 41), "no more rows than there are units"),
        (("--epsilon", 1e-9), "gives no guarantee"),
        (("--batch", 41), "0 texts fit"),
        (("--prompt", "Write something."), "where a record stands"),
        (("--data.max_length", 126), "exceed the 128 that the model reads"),
        (("--data.control", "[visit]"), "the two belong together"),
        (("--max-new-tokens", 0), "Type 1 or more of both"),
        (("--seed", 3), "is of no use with --by inference"),
        (("--batch", 0), "batch_size is 0"),
        (("--temperature", 0), "--temperature is 0.0"),
        (("--temperature", "nan"), "--temperature is nan"),
        (("--prompt", "\udcff {text}"), "where a record stands"),
        (("--model.adapter", "somewhere"), "nothing trains here"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_spent(
    place: Place, more: tuple[object, ...], message: str
) -> None:
    answer = dpllm_(*place.words(*more))
    assert answer.code == 2
    assert message in answer.err
    assert not place.ledger.exists() or not place.runs()


WHO = ("--by", "ada", "--reason", "test", "--unit", "example")


def test_a_budget_is_asked_first(place: Place) -> None:
    done("ledger", "init", "notes", "--epsilon", 0.5, "--delta", 1e-3, "--ledger", place.ledger, *WHO)
    for more in (("--dry-run",), (), ("--final",)):
        answer = dpllm_(*place.words(*more))
        assert answer.code == 3, answer.err
    assert place.runs() == []
    assert not place.draft().exists()


def test_texts_may_be_final(place: Place) -> None:
    done("ledger", "init", "notes", "--epsilon", 9, "--delta", 1e-3, "--ledger", place.ledger, *WHO)
    done(*place.words("--final"))
    assert [item.reservation.final for item in place.runs()] == [True]
    assert "closed for good" in dpllm_(*place.words("--output", place.root / "again")).err


def rewrite(place: Place, **changes: Any) -> None:
    rows = [json.loads(line) for line in place.data.read_text("utf-8").splitlines()]
    tiny.write_rows(
        place.data, [{**row, **{name: of(n) for name, of in changes.items()}} for n, row in enumerate(rows)]
    )


@pytest.mark.parametrize("change", ["owner", "data.public_size", "rows"])
def test_nobody_votes_twice_by_a_change_between_crash_and_resume(place: Place, change: str) -> None:
    """Each would move people between batches; what was drawn of the first ones is out."""
    words = (*place.words("--unit", "owner", "--max-examples-per-unit", 1, "--batch", 4), "--data.public_size", 20)
    with pytest.MonkeyPatch.context() as patch:
        dies_at(patch, 6, drawn=True)
        with pytest.raises(RuntimeError):
            dpllm_(*words)
    if change == "owner":
        rewrite(place, owner=lambda n: "p0" if n < 8 else f"q{n}")
    elif change == "rows":
        rewrite(place, text=lambda n: f"another text {n}")
    answer = dpllm_(*words, *(("--data.public_size", 40) if change == "data.public_size" else ()))
    assert answer.code == 2
    assert "an interrupted call began with another" in answer.err
    assert not place.output.exists()


def test_a_closed_reservation_draws_no_more(place: Place) -> None:
    with pytest.MonkeyPatch.context() as patch:
        dies_at(patch, 2, drawn=True)
        with pytest.raises(RuntimeError):
            dpllm_(*place.words())
    with Ledger(place.ledger) as ledger:
        ledger.finish(place.runs()[0].reservation.entry, "completed")
    before = place.draft().read_bytes()
    answer = dpllm_(*place.words())
    assert (answer.code, "nothing more is drawn by it" in answer.err) == (3, True), answer.err
    assert place.draft().read_bytes() == before


def test_a_record_is_what_the_ledger_knows_of_its_row(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A column beside prompt and completion is in no fingerprint."""
    seen = []
    record = inference._Job._record
    monkeypatch.setattr(inference._Job, "_record", lambda self, row: seen.append(record(self, row)) or seen[-1])
    rewrite(place, prompt=lambda n: f"ask {n}", completion=lambda n: f"say {n}", text=lambda n: f"SECRET {n}")
    done(*place.words("--data.format", "prompt_completion"))
    tokenizer = load_tokenizer(ModelConfig(name_or_path=str(place.base)))
    assert {tokenizer.decode(ids) for ids in seen} == {f"ask {n} say {n}" for n in range(40)}


def test_rows_that_cannot_be_read_are_refused_while_that_is_free(place: Place) -> None:
    tiny.write_rows(
        place.data, [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}] * 40
    )
    assert "rows of messages are conversations" in dpllm_(*place.words()).err
    assert not place.ledger.exists() or not place.runs()


def test_8_bit_products_that_couple_rows_are_refused(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    load = loading.load_base

    def quantised(*arguments: Any) -> Any:
        model = load(*arguments)
        model.config.quantization_config = Mock(load_in_8bit=True, llm_int8_threshold=6.0)
        return model

    monkeypatch.setattr(loading, "load_base", quantised)
    assert "outlier columns" in dpllm_(*place.words()).err
    assert not place.runs()


def test_any_end_token_of_the_model_ends_a_text(place: Place, tmp_path: Path, base: Path) -> None:
    """As in ``dpllm generate``: a chat model's turn may end by another one than the tokenizer's."""
    import shutil

    place.base = Path(shutil.copytree(base, tmp_path / "ends"))
    ends = {"eos_token_id": list(range(3, 384, 3))}
    (place.base / "generation_config.json").write_text(json.dumps(ends), encoding="utf-8")
    words = [
        word for word in place.words("--max-new-tokens", 30, "--data.max_length", 9) if word != "--keep-unfinished"
    ]
    done(*words)
    record = place.record()
    assert record["dropped"]["did not end"] == 0
    assert record["rows"] >= 1


@pytest.mark.parametrize("change", ["unit", "dataset", "entry"])
def test_shares_of_another_account_are_refused(place: Place, change: str) -> None:
    shares = place.root / "describe.json"
    asked = ("--epsilon", 2, "--shares", "visit=home,ward", "--output", shares, "--ledger", place.ledger)
    done("describe", place.data, *asked, "--dataset", "notes")
    record = json.loads(shares.read_text("utf-8"))
    record |= {"unit": {"unit": "owner"}, "dataset": {"dataset": "other"}}.get(change, {})
    if change == "entry":
        record["releases"][0]["entry"] = "0123456789abcdef"
    shares.write_text(json.dumps(record), encoding="utf-8")
    assert "that the ledger knows of" in dpllm_(*place.words("--data.control", "[visit]", "--describe", shares)).err
    assert len(place.runs()) == 1
    assert "the two belong together" in dpllm_(*place.words("--describe", shares)).err


def test_texts_are_asked_for_as_released_shares_say(place: Place) -> None:
    done(*place.words(*shares_of(place)))
    record = place.record()
    assert (record["control"], record["columns"], record["shares"]) == (["visit"], ["visit", "text"], "shares of visit")
    assert record["statistics"]["with_run"] > record["epsilon"]
    rows = [json.loads(line) for line in (place.output / "data" / "train.jsonl").read_text("utf-8").splitlines()]
    assert {row["visit"] for row in rows} <= {"home", "ward"}
    done("verify", place.output)


def test_a_model_that_learned_these_data_is_refused(merged: Path, place: Place) -> None:
    """It tells of them by itself; a mutant states the epsilon of the texts alone."""
    learned = read_json(merged / "privacy.json")["dataset"]
    words = place.words("--model", merged, "--dataset", learned)
    for more in (("--dry-run",), ()):
        answer = dpllm_(*words, *more)
        assert (answer.code, f"was tuned on {learned}" in answer.err) == (3, True), answer.err
    assert not place.ledger.exists() or not place.runs()


def test_the_card_names_a_model_that_learned_other_data(merged: Path, place: Place) -> None:
    done(*place.words("--model", merged, "--dataset", "others"))
    before = place.record()["lineage"]
    assert (before["same_dataset"], before["composed"]) == (False, None)
    done("verify", place.output)


def test_the_vote_of_a_record_has_the_same_bits_beside_any_others(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mutant pads to the longest record of the batch: a longer neighbour would move every other vote."""
    seen: list[list[np.ndarray[Any, Any]]] = []
    vote = Ballot.vote
    monkeypatch.setattr(
        Ballot, "vote", lambda self, rows, public: seen[-1].append(vote(self, rows, public)) or seen[-1][-1]
    )
    monkeypatch.setattr(inference._Job, "_next", lambda self, number, make: (make(), 7)[1])  # the same tokens for both
    for number, first in enumerate(("Anna.", " ".join(["Anna owns seven plums and the old key."] * 4))):
        rows = [json.loads(line) for line in place.data.read_text("utf-8").splitlines()]
        tiny.write_rows(place.data, [{**rows[0], "text": first}, *rows[1:]])
        seen.append([])
        place.output, place.ledger = place.root / f"out{number}", place.root / f"ledger{number}.sqlite"
        done(*place.words("--batch", 8, "--rows", 1))
    changed = [(one != two).any() for one, two in zip(*seen, strict=True)]
    assert len(changed) == 8 * TOKENS
    assert any(changed[0::8])
    assert not any(same for place, same in enumerate(changed) if place % 8)


def test_batch_and_clip_use_what_epsilon_allows() -> None:
    for rows, units, at in ((5, 100, 8.0), (5, 4000, 8.0), (5, 4000, 1.0), (40, 400, 3.0)):
        request = inference_budget.InferenceRequest(rows=rows, epsilon=at, max_new_tokens=40)
        made = inference_budget.quote(request, units, 1e-5, "zero_out")
        assert made.epsilon <= at
        assert made.texts >= rows
        assert made.epsilon > 0.99 * at or made.ballot.clip == 4.0
        fewer = Ballot(max(1, made.ballot.batch_size - 1), 4.0, 1.0).event(40)
        assert made.ballot.clip < 4.0 or epsilon(fewer, 1e-5, "zero_out") > 0.99 * at


def test_a_tokenizer_with_more_tokens_than_its_model_is_refused_before_anything_is_read(place: Place) -> None:
    """A mutant reads records until one has such a token, and ends with an error that tells of it."""
    more = tiny.save_model(place.root / "more")
    tokenizer = load_tokenizer(ModelConfig(name_or_path=str(more)))
    tokenizer.add_tokens([f"zebra{number}" for number in range(1000)])
    tokenizer.save_pretrained(more)
    assert "the tokenizer has" in dpllm_(*place.words("--model", more)).err
    assert not place.runs()
