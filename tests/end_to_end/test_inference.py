"""``dpllm synthesize --by inference``: paid before the first token, one vote a unit, and the same draws after a crash."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from running import done, dpllm_

from dpllm.errors import ConfigError
from dpllm.ledger import Ledger
from dpllm.privacy.accounting import epsilon
from dpllm.privacy.voting import Ballot
from dpllm.publish import inference
from dpllm.publish.drawn import Drawn

Json = dict[str, Any]
TOKENS, ROWS = 5, 3


class Place:
    """Forty rows of twenty people, a model of random weights, a ledger."""

    def __init__(self, root: Path, base: Path) -> None:
        self.root, self.base, self.ledger, self.output = root, base, root / "ledger.sqlite", root / "rows"
        self.data = root / "notes.jsonl"
        rows = [{"text": tiny.sentence(n), "owner": f"p{n // 2}", "visit": ("home", "ward")[n % 2]} for n in range(40)]
        tiny.write_rows(self.data, rows)

    def words(self, *more: object) -> tuple[object, ...]:
        given = ("--model", self.base, "--epsilon", 8, "--rows", ROWS, "--tokens", TOKENS, "--keep-unfinished")
        where = ("--ledger", self.ledger, "--output", self.output, "--dataset", "notes")
        return ("synthesize", self.data, "--by", "inference", *given, *where, "--data.max_length", 24, *more)

    def record(self) -> Json:
        return json.loads((self.output / "inference.json").read_text("utf-8"))

    def draft(self) -> Path:
        return self.root / ".rows.draft.jsonl"

    def runs(self) -> list[Any]:
        with Ledger(self.ledger) as ledger:
            return ledger.runs("notes")


@pytest.fixture
def place(tmp_path: Path, base: Path) -> Place:
    return Place(tmp_path, base)


def test_rows_are_written_charged_and_verified(place: Place) -> None:
    said = done(*place.words()).out
    record, (run,) = place.record(), place.runs()
    assert f"{record['rows']} rows of {record['texts']} texts" in said
    assert record["rows"] == ROWS
    assert run.state == "completed"
    assert run.event.to_json() == record["event"]
    assert record["event"]["count"] == TOKENS
    assert record["epsilon"] == epsilon(run.event, record["delta"], "zero_out") <= 8
    assert record["epsilon"] > 7.9 or record["clip"] == inference.MOST_CLIP
    assert done("verify", place.output, "--ledger", place.ledger).code == 0
    assert not place.draft().exists()
    again = dpllm_(*place.words())
    assert again.code == 2
    assert "already exists" in again.err
    assert len(place.runs()) == 1


def test_what_is_planned_spends_nothing(place: Place) -> None:
    said = json.loads(done(*place.words("--dry-run", "--json")).out)
    assert said["texts"] == 40 // said["batch_size"]
    assert said["epsilon"] <= 8 < said["noise_multiplier"] * 100
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
        seen.append([row["text"] for unit in batch for row in unit])
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
    drawn = [one for batch in seen for one in batch]
    assert sorted(drawn) == sorted(rows)  # 45 // 8 texts, and each unit in one of them
    assert len({len(batch) for batch in seen}) > 1


def dies_at(patch: pytest.MonkeyPatch, number: int, *, drawn: bool) -> None:
    """The so-manyth draw ends in a crash, before the token is known, or once it is written."""
    draw, count = Drawn.draw, [0]

    def dying(self: Drawn, text: int, make: Any) -> int:
        count[0] += 1
        if count[0] == number and not drawn:
            self._write(f"[{text}, ")
            raise RuntimeError("killed")
        token = draw(self, text, make)
        if count[0] == number:
            raise RuntimeError("killed")
        return token

    patch.setattr(Drawn, "draw", dying)


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
        real = Drawn.draw
        patch.setattr(Drawn, "draw", lambda self, text, make: calls.append(text) or real(self, text, make))
        patch.setattr(Path, "unlink", lambda self, missing_ok=False: None)  # so that the draws can be read
        done(*place.words())
    assert [one.reservation.entry for one in place.runs()] == [run.reservation.entry]
    lines = place.draft().read_bytes().splitlines()
    whole = before[: before.rfind(b"\n")].splitlines()
    assert lines[: len(whole)] == whole
    draws = [json.loads(line) for line in lines[1:]]
    of_first = [token for text, token in draws if text == 0]
    assert (None in of_first) == (not drawn)
    assert all(sum(text == n for text, _ in draws) <= TOKENS for n in range(ROWS))
    assert calls.count(0) == len(of_first) - 3  # none of them again
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
    ("more", "said"),
    [
        (("--rows", 41), "no more rows than there are units"),
        (("--epsilon", 0.001, "--clip", 1), "cost epsilon"),
        (("--batch", 41), "0 texts fit"),
        (("--prompt", "Write something."), "where a record stands"),
        (("--data.max_length", 126), "exceed the 128 that the model reads"),
        (("--data.control", "[visit]"), "Type --describe FILE"),
        (("--tokens", 0), "Type 1 or more of both"),
        (("--clip", 30), "hardly any proposal"),
        (("--seed", 3), "is of no use --by inference"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_spent(place: Place, more: tuple[object, ...], said: str) -> None:
    answer = dpllm_(*place.words(*more))
    assert answer.code == 2
    assert said in answer.err
    assert not place.ledger.exists() or not place.runs()


def test_a_budget_is_asked_first(place: Place) -> None:
    who = ("--by", "ada", "--reason", "test", "--unit", "example")
    done("ledger", "init", "notes", "--epsilon", 0.5, "--delta", 1e-3, "--ledger", place.ledger, *who)
    answer = dpllm_(*place.words())
    assert answer.code == 3
    assert place.runs() == []
    assert not place.draft().exists()


def test_texts_are_asked_for_as_released_shares_say(place: Place) -> None:
    shares = place.root / "describe.json"
    asked = ("--epsilon", 2, "--shares", "visit=home,ward", "--output", shares, "--ledger", place.ledger)
    done("describe", place.data, *asked, "--dataset", "notes")
    done(*place.words("--data.control", "[visit]", "--describe", shares))
    record = place.record()
    assert (record["control"], record["columns"], record["shares"]) == (["visit"], ["visit", "text"], "shares of visit")
    assert record["statistics"]["with_run"] > record["epsilon"]
    rows = [json.loads(line) for line in (place.output / "data" / "train.jsonl").read_text("utf-8").splitlines()]
    assert {row["visit"] for row in rows} <= {"home", "ward"}
    done("verify", place.output)


def test_a_model_that_learned_these_data_is_refused(finished: Any, place: Place) -> None:
    done("merge", finished.run, "--output", place.root / "merged")
    learned = json.loads((place.root / "merged" / "privacy.json").read_text("utf-8"))["dataset"]
    words = place.words("--model", place.root / "merged", "--dataset", learned)
    assert "was tuned on" in dpllm_(*words).err


def test_the_vote_of_a_record_has_the_same_bits_beside_any_others(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mutant pads to the longest record of the batch: a longer neighbour would move every other vote."""
    seen: list[list[np.ndarray[Any, Any]]] = []
    vote = Ballot.vote
    monkeypatch.setattr(
        Ballot, "vote", lambda self, rows, public: seen[-1].append(vote(self, rows, public)) or seen[-1][-1]
    )
    monkeypatch.setattr(Drawn, "draw", lambda self, number, make: (make(), 7)[1])  # the same tokens for both
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


def test_a_prompt_stands_around_each_record_and_the_public_one_has_nothing(base: Path) -> None:
    with pytest.raises(ConfigError, match="above 20"):
        inference.offer(inference.Order(rows=1, epsilon=8.0, clip=50.0), 100, 1e-5, "zero_out")
    for rows, units, at in ((5, 100, 8.0), (5, 4000, 8.0), (5, 4000, 1.0), (40, 400, 3.0)):
        order = inference.Order(rows=rows, epsilon=at, max_new_tokens=100)
        made = inference.offer(order, units, 1e-5, "zero_out")
        assert made.epsilon <= at
        assert made.texts >= rows
        assert made.epsilon > 0.99 * at or made.ballot.clip == 4.0
        fewer = Ballot(max(1, made.ballot.batch_size - 1), 4.0, 1.0).event(100)
        assert made.ballot.clip < 4.0 or epsilon(fewer, 1e-5, "zero_out") > 0.99 * at
