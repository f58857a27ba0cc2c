"""Which of a model's texts are taken into a data set.

Comes in: what was asked for, a text. Goes out: why it is dropped. Must not know private text: what a filter looks at is the text
itself, so that filtering is post-processing too.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from dpllm.errors import ConfigError
from dpllm.publish.generate import Sample

DUPLICATE, UNFINISHED = "the same as another", "did not end"
Test = Callable[[Sample], bool]
"""Whether a text is dropped."""

_EMAIL = re.compile(r"[A-Za-z0-9._%+-]+@[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)+")
_CARD = re.compile(r"(?<!\d)\d(?:[ -]?\d){12,18}(?!\d)")
_PHONE = re.compile(r"(?<!\d)(?:\+?\d{1,3}[ .-]?)?(?:\(\d{3}\)[ ]?|\d{3}[ .-]?)\d{3}[ .-]?\d{4}(?!\d)")


def tests(*, keep_unfinished: bool, min_words: int | None, max_words: int | None, no_details: bool) -> dict[str, Test]:
    """Filters by the reason that each gives, in the order in which they are asked.

    Args:
        keep_unfinished: Take texts that the limit of tokens ended.
        min_words: Fewest words, parted by white space.
        max_words: Most words.
        no_details: Drop texts that hold an e-mail address, a card number or a phone number.

    Raises:
        ConfigError: No text could pass.
    """
    if (min_words or 0) < 0 or (max_words is not None and max_words < max(1, min_words or 0)):
        raise ConfigError(
            f"--min-words {min_words} and --max-words {max_words}: no text can fit both. Type a minimum of 0 or more, and a "
            "maximum that is not below it."
        )
    found: dict[str, Test] = {"empty": lambda one: not one.text.strip()}
    if not keep_unfinished:
        found[UNFINISHED] = lambda one: not one.ended
    if min_words is not None:
        found[f"under {min_words} words"] = lambda one: len(one.text.split()) < min_words
    if max_words is not None:
        found[f"over {max_words} words"] = lambda one: len(one.text.split()) > max_words
    if no_details:
        found["e-mail address, card or phone number"] = lambda one: has_details(one.text)
    return found


def has_details(text: str) -> bool:
    """Whether a text looks as if it held an e-mail address, a card number or a phone number."""
    return any(pattern.search(text) for pattern in (_EMAIL, _CARD, _PHONE))
