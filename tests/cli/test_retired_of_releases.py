"""What `describe`, `synthesize` and the labels no longer take answers with what to type instead."""

from __future__ import annotations

import pytest

from dpllm.cli import main


@pytest.mark.parametrize(
    ("typed", "instead"),
    [
        ("synthesize run --rows 1 --embedding builtin:tiny", "see TSTR"),
        ("synthesize run --rows 1 --baseline classifier", "dpllm classify FOLDER FILE"),
        ("synthesize run --rows 1 --baseline=classifier --encoder here", "dpllm classify FOLDER FILE"),
        ("synthesize run --rows 1 --schema a.json", "afterwards"),
        ("synthesize run --rows 1 --without-guarantee", "dpllm generate RUN"),
        ("synthesize a.jsonl --by inference --rows 1 --clip 2", "--batch and --epsilon decide"),
        ("describe a.jsonl --epsilon 1 --mean age=0:120", "--quantiles COLUMN=LOW:HIGH:PARTS --at .5"),
        ("describe a.jsonl --epsilon 1 --scripts latin", "--shares COLUMN=latin,cyrillic"),
        ("describe a.jsonl --epsilon 1 --encoder builtin:tiny --clusters 2 --rounds 3", "five rounds"),
        ("synthesize run --rows 1 --encoder here", "dpllm classify has --encoder"),
    ],
)
def test_an_option_that_is_retired_says_what_to_type_instead(
    typed: str, instead: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(typed.split()) == 2
    said = capsys.readouterr().err
    assert " is retired: " in said
    assert instead in said
    assert said.count("\n") == 1
