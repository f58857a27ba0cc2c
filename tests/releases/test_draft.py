"""What both ways of writing a data set share: options, filters, and a draft from which an interrupted call goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpllm.errors import ConfigError
from dpllm.publish.synthesize import SynthesisRequest
from dpllm.releases.draft import DUPLICATE, Draft, filters, request_of, why_dropped
from dpllm.releases.inference_budget import InferenceRequest
from dpllm.text.prompts import Sample


def reason(text: str, *, ended: bool = True, keep_unfinished: bool = True, min_words: int = 0) -> str | None:
    tests = filters(keep_unfinished=keep_unfinished, min_words=min_words)
    return why_dropped(Sample(0, None, text, ended), tests, text, {"again"})


def test_texts_are_dropped_for_their_reason_and_no_other() -> None:
    assert (reason(""), reason(" \n")) == ("empty", "empty")
    assert reason("one", ended=False, keep_unfinished=False) == "did not end"
    assert reason("one", ended=False) is None
    assert (reason("one two", min_words=2), reason("one", min_words=2)) == (None, "under 2 words")
    assert reason("again") == DUPLICATE


@pytest.mark.parametrize(
    ("options", "message"),
    [({"rows": 1}, "--epsilon is missing"), ({"rows": 1, "epsilon": 2.0, "top_p": 0.5}, "--top-p: has no effect")],
)
def test_an_option_of_another_way_or_none_is_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        request_of(InferenceRequest, "inference", options)


def test_what_was_added_is_there_again_for_its_owner_alone_and_what_was_cut_off_is_not(tmp_path: Path) -> None:
    path = tmp_path / "draft"
    Draft(path, {"rows": 2}, lambda: {"seed": 1}).add([1], {"a": 2})
    assert path.stat().st_mode & 0o077 == 0
    with path.open("ab") as file:
        file.write(b"[1, 2")
    draft = Draft(path, {"rows": 2}, lambda: {"seed": 2})
    assert (draft.facts, draft.lines) == ({"seed": 1}, [[1], {"a": 2}])
    draft.add([3])
    assert draft.lines == [[1], {"a": 2}, [3]]
    assert path.read_bytes().count(b"\n") == 4
    with pytest.raises(ConfigError, match="began with another rows"):
        Draft(path, {"rows": 3}, dict)


@pytest.mark.parametrize(
    "text", ['{"settings": {"rows": 2}, "seed": 1}\nx\n', "{}\n", "[]\n", '{"settings": 1}\n', "1\n"]
)
def test_a_damaged_draft_is_refused_and_stays(tmp_path: Path, text: str) -> None:
    path = tmp_path / "draft"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"cannot be read\. Remove it"):
        Draft(path, {"rows": 2}, dict)
    assert path.read_text() == text


def test_fewer_than_no_words_are_a_mistake() -> None:
    with pytest.raises(ConfigError, match="--min-words -4"):
        filters(keep_unfinished=False, min_words=-4)


def test_files_may_be_named_by_text() -> None:
    request = request_of(SynthesisRequest, "training", {"rows": 2, "prompts": "prompts.jsonl"})
    assert request.prompts == Path("prompts.jsonl")
