"""Reads the marked parts and the front matter of a card from Markdown that may be untrusted.

Comes in: the text of a README.md. Goes out: the text between its markers, its front matter, or whether readers could interpret
it differently. Must not know what a part says.
"""

from __future__ import annotations

import contextlib
import json
import re
import unicodedata
from collections.abc import Sequence

import yaml

from dpllm.errors import ConfigError
from dpllm.recipe.section import read_yaml
from dpllm.records import Json

PARTS = ("banner", "privacy")
_TAG = re.compile(r"<(?!https?://|[^\s<>@]+@[^\s<>]+>)(?=[a-z/!?])", re.IGNORECASE)
"""The start of HTML, by which a text of a statement could hide the text after it."""
_MATTER = re.compile(r"\A---[ \t]*\n(.*?\n)---[ \t]*(?:\n|$)", re.DOTALL)
_OTHERWISE = re.compile(r"^(?:---|\.\.\.|\s*#)", re.MULTILINE)
_TRICK = re.compile(r"<<\s*:|\S{10000}")  # a merge key, which some readers expand; an endless base-60 number
_MOST_MATTER = 2**16  # characters
HIDING = re.compile(
    r"<(?:style|script|link|iframe|object|embed|meta|base|dialog)\b|[\s\"'/](?:style|class)\s*=", re.IGNORECASE
)
"""HTML that could hide a part of a card if it appeared outside the parts."""


def escaped(text: str) -> str:
    """The text without the start of HTML tags and comments, which could hide the text after them."""
    return _TAG.sub("&lt;", text)


def marked(name: str, text: str) -> str:
    """A part of a card between its markers."""
    start, end = _markers(name)
    return f"{start}\n{text}\n{end}"


def parts(markdown: str, names: Sequence[str] = PARTS) -> dict[str, str]:
    """The marked parts of a card, as ``dpllm.card.card.render`` makes them.

    Args:
        markdown: A complete card, with the line ends of any system.
        names: Names of the parts.

    Raises:
        ConfigError: A marker is missing, doubled or out of order.
    """
    text = _read(markdown).replace("\r", "\n")
    texts = {}
    for name in names:
        start, end = _markers(name)
        counts = (text.count(start), text.count(end))
        if counts != (1, 1) or text.index(start) > text.index(end):
            raise ConfigError(
                f"the card holds {counts[0]} times {start} and {counts[1]} times {end}, so what it says about privacy cannot "
                "be told from what was written by hand. Write it again: dpllm card RUN."
            )
        inside = text[text.index(start) + len(start) : text.index(end)]
        # The line ends of the markers; any other space is part of the text.
        texts[name] = inside[1:-1] if len(inside) > 1 and inside[0] == inside[-1] == "\n" else inside
    return texts


def first(markdown: str, names: Sequence[str] = PARTS) -> bool:
    """Whether nothing but the front matter precedes the marked parts of a card, and nothing is between them."""
    visible = _MATTER.sub("", _read(markdown), count=1).lstrip("\n")
    order = [marker for name in names for marker in _markers(name)]
    between = zip(order[1:-1:2], order[2::2], strict=True)
    return visible.startswith(order[0]) and all(re.search(rf"{end}\n*{start}", visible) for end, start in between)


def front_matter(markdown: str) -> Json:
    """The YAML between the first two rules of a card, which may be untrusted.

    Raises:
        ConfigError: There is none, or it is not a mapping; a key appears twice; or it uses anchors or endless nesting, by which
            a short text can expand to a value of any size.
    """
    text = _read(markdown)
    matter = _MATTER.match(text)
    value = None
    # Readers differ over whether a carriage return alone ends a line.
    if matter and "\r" not in text and len(matter[1]) <= _MOST_MATTER and not _TRICK.search(matter[1]):
        # A tag can request a type that does not fit its value, and an escape can be a lone surrogate, which cannot be encoded.
        with contextlib.suppress(yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError, OverflowError):
            parsed = read_yaml(matter[1])
            json.dumps(parsed, ensure_ascii=False, default=str).encode()
            value = parsed
    if not isinstance(value, dict):
        raise ConfigError(
            "README.md has no front matter of YAML with each key once and no anchors, so nothing that it states can be found. "
            "Take the file from where the model was published, or write it again: dpllm card RUN."
        )
    return value


def ambiguous(markdown: str) -> bool:
    """Whether two YAML readers may interpret the front matter of a card differently.

    An example: PyYAML ends a line, and with it a comment, at U+2028; the Hub's reader does not. So everything that a card of
    dpllm does not need counts as ambiguous: comments, document markers, and line-ending or invisible characters.
    """
    matter = _MATTER.match(_read(markdown))
    text = matter[1] if matter else ""
    strange = any(unicodedata.category(sign) in ("Cc", "Cf", "Zl", "Zp") for sign in text if sign not in "\t\n")
    return strange or _OTHERWISE.search(text) is not None


def has_marker(text: str, names: Sequence[str]) -> bool:
    """Whether a text contains a marker of one of these parts."""
    return any(marker in text for name in names for marker in _markers(name))


def _markers(name: str) -> tuple[str, str]:
    return f"<!-- dpllm:{name} -->", f"<!-- /dpllm:{name} -->"


def _read(markdown: str) -> str:
    """A card with Unix line ends and no byte order mark, which a system or an editor may have changed."""
    return markdown.replace("\r\n", "\n").removeprefix("\ufeff")
