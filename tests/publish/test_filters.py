"""Each filter drops what it names, by the text alone."""

from __future__ import annotations

from typing import Any

import pytest

from dpllm.errors import ConfigError
from dpllm.publish import filters
from dpllm.publish.generate import Sample

NONE: dict[str, Any] = {
    "keep_unfinished": True, "min_words": None, "max_words": None, "no_details": False,
}  # fmt: skip


def reason(text: str, *, ended: bool = True, **wanted: Any) -> str | None:
    """The first filter that drops it."""
    tests = filters.tests(**(NONE | wanted))
    return next((name for name, drops in tests.items() if drops(Sample(0, None, text, ended))), None)


def test_texts_are_dropped_for_their_reason_and_no_other() -> None:
    assert reason("one two three") is None
    assert reason(" \n\t") == "empty"
    assert reason("one", ended=False) is None
    assert reason("one", ended=False, keep_unfinished=False) == "did not end"
    assert reason("one two", min_words=2, max_words=2) is None
    assert reason("one", min_words=2, max_words=2) == "under 2 words"
    assert reason("one two three", min_words=2, max_words=2) == "over 2 words"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("write to anna@example.com today", True),
        ("her number is 555-123-4567, after six", True),
        ("paid with 4111 1111 1111 1111 at noon", True),
        ("she bought 7 plums for 12 crowns on 3 May", False),
    ],
)
def test_personal_details_are_dropped_where_asked(text: str, found: bool) -> None:
    assert (reason(text, no_details=True) is not None) == found
    assert reason(text) is None


@pytest.mark.parametrize("wanted", [{"min_words": 3, "max_words": 2}, {"max_words": 0}, {"min_words": -1}])
def test_filters_that_nothing_passes_are_refused(wanted: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="no text can fit both"):
        reason("one", **wanted)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("call (555) 555-0142 now", True),
        ("+1 555-555-0142", True),
        ("5555550142.", True),
        ("card 4000 1234 5678 9010", True),
        ("4000123456789010", True),
        ("4000-1234-5678-901", True),
        ("Ann.Lee+x@Mail.example.org,", True),
        ("in 2024 we saw 12345678 and 1,000,000", False),
        ("a.b@ c@d and 555-0142", False),
    ],
)
def test_details_are_found_however_they_are_written(text: str, found: bool) -> None:
    assert filters.has_details(text) == found
