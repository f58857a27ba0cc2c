"""``dpllm synthesize --by inference`` with a model whose longest row would decide about the others: Phi-3's longrope."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import switching
import tiny
from running import done
from voting import Place, shares_of

from dpllm.model.reading import Reader
from dpllm.releases import inference

TOKENS = 16


def test_before_anything_is_paid_records_are_read_alone_where_the_end_of_a_text_switches(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The longest prompt is read as it always was, and so are the three tokens behind it. A mutant knows nothing of T."""
    made: list[Reader] = []
    start, pay, heights = Reader.__init__, inference._Job.pay, list[int]()

    def starting(self: Reader, model: Any, width: int, *arguments: Any, **named: Any) -> None:
        made.append(self)
        start(self, model, width, *arguments, **named)

    def paying(self: Any, path: Path) -> None:
        heights.append(self.reader.height)
        assert not self.source.ledger.runs("notes")
        pay(self, path)

    monkeypatch.setattr(Reader, "__init__", starting)
    monkeypatch.setattr(inference._Job, "pay", paying)
    for name, after in (("plain", 500), ("long", 0)):
        folder = tmp_path / name
        folder.mkdir()
        model = switching.model("longrope", after or made[0]._width + TOKENS - 4)
        model.save_pretrained(folder / "model")
        tiny.tokenizer(chat_template=None).save_pretrained(folder / "model")
        place = Place(folder, folder / "model")
        done(*place.words("--max-new-tokens", TOKENS, "--rows", 1, "--batch", 4))
        assert place.record()["max_new_tokens"] == TOKENS
    assert heights == [5, 1]
    assert len(made) == 2


def test_one_reader_that_was_checked_reads_behind_lines_of_all_lengths(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mutants: one for each length, checked once it has been paid; the width of the first line."""
    checked: list[int] = []
    check = Reader.lower_in_company

    def checking(self: Reader, vocabulary: int) -> bool:
        checked.append(self._width)
        return check(self, vocabulary)

    monkeypatch.setattr(Reader, "lower_in_company", checking)
    place = Place(tmp_path, base)
    more = shares_of(place)
    monkeypatch.setattr(
        "dpllm.text.layouts.code_line", lambda _, values: f"{values[0]} " * (3 if values[0] == "ward" else 1)
    )
    done(*place.words(*more, "--rows", 4))
    assert len(checked) == 1
