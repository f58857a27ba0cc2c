"""``dpllm synthesize --by inference``: paid before the first token, one vote a unit, and the same draws after a crash."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import tiny
from running import calls, done, dpllm_, edit_json, refused, results
from voting import ROWS, TOKENS, Place, shares_of

from dpllm.files import read_json
from dpllm.ledger import Ledger
from dpllm.ledger.budgets import Reservation
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
    done("verify", place.output, "--ledger", place.ledger)
    assert not place.draft().exists()
    assert "already exists" in refused(*place.words())
    assert len(place.runs()) == 1


def test_what_is_planned_spends_nothing(place: Place) -> None:
    record = json.loads(done(*place.words("--dry-run", "--json")).out)
    assert record["texts"] == 40 // record["batch_size"]
    assert record["epsilon"] <= 8
    assert not place.ledger.exists()
    assert not place.output.exists()


def test_a_unit_has_one_vote_whatever_it_brings(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    draws = calls(monkeypatch, inference._Job, "_draw")
    votes = calls(monkeypatch, Ballot, "vote", lambda _, rows, public: (len(draws), rows.shape[0]))
    done(*place.words("--unit", "owner", "--max-examples-per-unit", 2, "--batch", 4))
    assert place.record()["num_units"] == 20
    assert votes == [(draw, 2) for draw in range(1, len(draws) + 1) for _ in range(4)]


def test_batches_are_disjoint_and_follow_slots_or_coins(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    def texts(_: Any, number: int, batch: Any, line: str) -> list[str]:
        return [row.parts["text"] for unit in batch for row in unit]

    seen = calls(monkeypatch, inference._Job, "_text", texts)
    done(*place.words("--batch", 8))
    rows = [row["text"] for row in place.rows()]
    assert seen == [rows[8 * n : 8 * n + 8] for n in range(ROWS)]
    seen.clear()
    place.output, place.ledger = place.root / "coins", place.root / "coins.sqlite"
    done(*place.words("--batch", 8, "--data.public_size", 45, "--rows", 5))
    assert place.runs()[-1].reservation.relation == "add_or_remove_one"
    drawn = [item for batch in seen for item in batch]
    assert sorted(drawn) == sorted(rows)  # 45 // 8 texts, and each unit in one of them
    assert len({len(batch) for batch in seen}) > 1


def dies_at(patch: pytest.MonkeyPatch, number: int, *, drawn: bool) -> None:
    """The so-manyth draw ends in a crash, once the ledger has counted it and before the token is known, or once it is written."""
    owner, name = (Draft, "add") if drawn else (Reservation, "charge")
    call, count = getattr(owner, name), [0]

    def dying(self: Any, *of_draw: Any) -> None:
        call(self, *of_draw)
        count[0] += bool(of_draw)  # the first line of a draft is of no draw
        if of_draw and count[0] == number:
            raise RuntimeError("killed")

    patch.setattr(owner, name, dying)


def crash(place: Place, number: int, *options: object, drawn: bool = True) -> None:
    with pytest.MonkeyPatch.context() as patch:
        dies_at(patch, number, drawn=drawn)
        with pytest.raises(RuntimeError, match="killed"):
            dpllm_(*place.words(*options))


@pytest.mark.parametrize("drawn", [True, False])
def test_a_crash_keeps_what_was_drawn_and_what_it_lost_counts(place: Place, drawn: bool) -> None:
    crash(place, 3, drawn=drawn)
    (run,) = place.runs()
    assert run.steps == 3
    before = place.draft().read_bytes()
    with pytest.MonkeyPatch.context() as patch:
        of_text = calls(patch, inference._Job, "_next", lambda _, text, make: text)
        patch.setattr(Path, "unlink", lambda self, missing_ok=False: None)  # so that the draws can be read
        done(*place.words())
    assert [item.reservation.entry for item in place.runs()] == [run.reservation.entry]
    lines = place.draft().read_bytes().splitlines()
    complete_lines = before[: before.rfind(b"\n")].splitlines()
    assert lines[: len(complete_lines)] == complete_lines
    draws = [json.loads(line) for line in lines[1:]]
    assert [token for _, token in draws].count(None) == (0 if drawn else 1)  # of the lost one there is no token
    texts = [text for text, _ in draws]
    assert all(texts.count(n) <= TOKENS for n in range(ROWS))
    assert of_text.count(0) == texts.count(0) - 3  # none of them again
    assert place.record()["texts"] >= ROWS
    assert place.runs()[0].steps == len(draws)


def test_a_draw_lost_between_two_texts_counts_for_the_second(place: Place) -> None:
    crash(place, TOKENS + 1, drawn=False)
    with pytest.MonkeyPatch.context() as patch:
        of_text = calls(patch, inference._Job, "_next", lambda _, text, make: text)
        done(*place.words())
    assert of_text.count(0) == 0
    assert of_text.count(1) == TOKENS - 1


@pytest.mark.parametrize("drawn", [True, False])
def test_of_two_copies_of_a_draft_one_goes_on(place: Place, drawn: bool) -> None:
    """A mutant lets the same records vote again in a copied folder, or from a backup."""
    crash(place, 3, drawn=drawn)
    copy = place.root / "copy"
    copy.mkdir()
    shutil.copy(place.draft(), copy)
    crash(place, 2)
    before = (copy / place.draft().name).read_bytes()
    assert "the same records would vote again" in refused(*place.words("--output", copy / "rows"), code=3)
    assert (copy / place.draft().name).read_bytes() == before
    steps = place.runs()[0].steps
    done(*place.words())
    assert place.runs()[0].steps > steps


def test_a_draft_that_another_process_goes_on_with_draws_no_more(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    draw, draws = inference._Job._draw, list[int]()

    def beside_another(self: Any, *arguments: Any) -> int:
        if len(draws) == 2:
            with Ledger(place.ledger) as ledger:
                ledger.charge(place.runs()[0].reservation.entry, 4)
        draws.append(draw(self, *arguments))
        return draws[-1]

    monkeypatch.setattr(inference._Job, "_draw", beside_another)
    assert "cannot be charged" in refused(*place.words(), code=3)
    assert len(draws) == 3
    assert not place.output.exists()


def test_other_settings_do_not_go_on_with_paid_draws(place: Place) -> None:
    crash(place, 2)
    for other in (("--temperature", 0.9), ("--batch", 9), ("--prompt", "Say {text}"), ("--delta", 1e-4)):
        assert "an interrupted call began with another" in refused(*place.words(*other))
    assert len(place.runs()) == 1
    place.draft().write_bytes(b'{"settings": 1}\nnonsense\n')
    assert "cannot be read" in dpllm_(*place.words()).err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--rows", 41), "no more rows than there are units"),
        (("--epsilon", 1e-9), "gives no guarantee"),
        (("--batch", 41), "0 texts fit"),
        (("--prompt", "Write something."), "in place of the record"),
        (("--data.max_length", 126), "exceed the 128 positions of the model"),
        (("--data.control", "[visit]"), "each needs the other"),
        (("--max-new-tokens", 0), "Type 1 or more of both"),
        (("--seed", 3), "has no effect with --by inference"),
        (("--batch", 0), "batch_size is 0"),
        (("--temperature", 0), "--temperature is 0.0"),
        (("--temperature", "nan"), "--temperature is nan"),
        (("--prompt", "\udcff {text}"), "in place of the record"),
        (("--model.adapter", "somewhere"), "nothing is trained here"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_spent(
    place: Place, more: tuple[object, ...], message: str
) -> None:
    assert message in refused(*place.words(*more))
    assert not place.ledger.exists() or not place.runs()


WHO = ("--by", "ada", "--reason", "test", "--unit", "example")


def test_a_budget_is_asked_first(place: Place) -> None:
    done("ledger", "init", "notes", "--epsilon", 0.5, "--delta", 1e-3, "--ledger", place.ledger, *WHO)
    for more in (("--dry-run",), (), ("--final",)):
        assert dpllm_(*place.words(*more)).code == 3
    assert place.runs() == []
    assert not place.draft().exists()


def test_texts_may_be_final(place: Place) -> None:
    done("ledger", "init", "notes", "--epsilon", 9, "--delta", 1e-3, "--ledger", place.ledger, *WHO)
    done(*place.words("--final"))
    assert [item.reservation.final for item in place.runs()] == [True]
    assert "closed for good" in dpllm_(*place.words("--output", place.root / "again")).err


def rewrite(place: Place, **changes: Any) -> None:
    rows = enumerate(place.rows())
    tiny.write_rows(place.data, [{**row, **{name: of(n) for name, of in changes.items()}} for n, row in rows])


@pytest.mark.parametrize("change", ["owner", "data.public_size", "rows"])
def test_nobody_votes_twice_by_a_change_between_crash_and_resume(place: Place, change: str) -> None:
    """Each would move people between batches; what was drawn of the first ones is out."""
    options = ("--unit", "owner", "--max-examples-per-unit", 1, "--batch", 4, "--data.public_size", 20)
    crash(place, 6, *options)
    if change == "owner":
        rewrite(place, owner=lambda n: "p0" if n < 8 else f"q{n}")
    elif change == "rows":
        rewrite(place, text=lambda n: f"another text {n}")
    size = ("--data.public_size", 40) if change == "data.public_size" else ()
    assert "an interrupted call began with another" in refused(*place.words(*options, *size))
    assert not place.output.exists()


def test_a_closed_reservation_draws_no_more(place: Place) -> None:
    crash(place, 2)
    with Ledger(place.ledger) as ledger:
        ledger.finish(place.runs()[0].reservation.entry, "completed")
    before = place.draft().read_bytes()
    assert "nothing more is drawn by it" in refused(*place.words(), code=3)
    assert place.draft().read_bytes() == before


def test_a_record_is_what_the_ledger_knows_of_its_row(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """A column beside prompt and completion is in no fingerprint."""
    seen = results(monkeypatch, inference._Job, "_record")
    rewrite(place, prompt=lambda n: f"ask {n}", completion=lambda n: f"say {n}", text=lambda n: f"SECRET {n}")
    done(*place.words("--data.format", "prompt_completion"))
    tokenizer = load_tokenizer(ModelConfig(name_or_path=str(place.base)))
    assert {tokenizer.decode(ids) for ids in seen} == {f"ask {n} say {n}" for n in range(40)}


def test_rows_that_cannot_be_read_are_refused_while_that_is_free(place: Place) -> None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    tiny.write_rows(place.data, [{"messages": turns}] * 40)
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
    place.base = Path(shutil.copytree(base, tmp_path / "ends"))
    ends = {"eos_token_id": list(range(3, 384, 3))}
    (place.base / "generation_config.json").write_text(json.dumps(ends), encoding="utf-8")
    words = place.words("--max-new-tokens", 30, "--data.max_length", 9)
    done(*(word for word in words if word != "--keep-unfinished"))
    record = place.record()
    assert record["dropped"]["did not end"] == 0
    assert record["rows"] >= 1


@pytest.mark.parametrize("change", ["unit", "dataset", "entry"])
def test_shares_of_another_account_are_refused(place: Place, change: str) -> None:
    *control, shares = shares_of(place)
    (release,) = json.loads(shares.read_text("utf-8"))["releases"]
    changes = {"unit": "owner", "dataset": "other", "entry": [{**release, "entry": "0123456789abcdef"}]}
    edit_json(shares, **{"releases" if change == "entry" else change: changes[change]})
    assert "that the ledger charged to" in dpllm_(*place.words(*control, shares)).err
    assert len(place.runs()) == 1
    assert "each needs the other" in dpllm_(*place.words("--describe", shares)).err


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
        assert f"was tuned on {learned}" in refused(*words, *more, code=3)
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
    votes = results(monkeypatch, Ballot, "vote")
    monkeypatch.setattr(inference._Job, "_next", lambda self, number, make: (make(), 7)[1])  # the same tokens for both
    for number, first in enumerate(("Anna.", " ".join(["Anna owns seven plums and the old key."] * 4))):
        rewrite(place, text=lambda n, first=first: tiny.sentence(n) if n else first)
        place.output, place.ledger = place.root / f"out{number}", place.root / f"ledger{number}.sqlite"
        done(*place.words("--batch", 8, "--rows", 1))
    assert len(votes) == 2 * 8 * TOKENS
    changed = [(one != two).any() for one, two in zip(votes[: 8 * TOKENS], votes[8 * TOKENS :], strict=True)]
    assert any(changed[0::8])
    assert not any(differs for number, differs in enumerate(changed) if number % 8)


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
