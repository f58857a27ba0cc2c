"""The marked parts and the front matter of a card, read back from Markdown that may be a stranger's.

Comes in: the text of a README.md. Goes out: what stands between its markers, its front matter, or what two readers could read
otherwise. Must not know what a part says.
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
"""Where HTML would begin: a text of a statement could hide what stands behind it."""
_MATTER = re.compile(r"\A---[ \t]*\n(.*?\n)---[ \t]*(?:\n|$)", re.DOTALL)
_OTHERWISE = re.compile(r"^(?:---|\.\.\.|\s*#)", re.MULTILINE)
_TRICK = re.compile(r"<<\s*:|\S{10000}")  # a key that some readers take for its values; a number of base 60 without end
_MOST_MATTER = 2**16  # letters
HIDING = re.compile(
    r"<(?:style|script|link|iframe|object|embed|meta|base|dialog)\b|[\s\"'/](?:style|class)\s*=", re.IGNORECASE
)
"""What could hide a part of a card, if it stood outside of them."""


def escaped(text: str) -> str:
    """A text in which nothing begins a tag or a comment of HTML, which could hide what stands behind it."""
    return _TAG.sub("&lt;", text)


def marked(name: str, text: str) -> str:
    """A part of a card between its markers."""
    start, end = _markers(name)
    return f"{start}\n{text}\n{end}"


def parts(markdown: str, names: Sequence[str] = PARTS) -> dict[str, str]:
    """The marked parts of a card, as ``dpllm.card.card.render`` makes them.

    Args:
        markdown: A whole card. Line ends may be those of any system.
        names: Of the parts.

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
    """Whether the marked parts of a card come first, one after the other: behind its front matter nothing stands before them."""
    visible = _MATTER.sub("", _read(markdown), count=1).lstrip("\n")
    order = [marker for name in names for marker in _markers(name)]
    between = zip(order[1:-1:2], order[2::2], strict=True)
    return visible.startswith(order[0]) and all(re.search(rf"{end}\n*{start}", visible) for end, start in between)


def front_matter(markdown: str) -> Json:
    """The YAML between the first two rules of a card, which may be a stranger's.

    Raises:
        ConfigError: There is none, or it is no mapping; a key stands twice; or it uses anchors or is nested without end, so that
            a short text stands for a value of any size.
    """
    text = _read(markdown)
    matter = _MATTER.match(text)
    value = None
    # Readers differ over whether a carriage return alone ends a line.
    if matter and "\r" not in text and len(matter[1]) <= _MOST_MATTER and not _TRICK.search(matter[1]):
        # A tag can ask for a type that its value is not of, and an escape for half a letter, which nobody can write.
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
    """Whether two readers of YAML may find different things in the front matter of a card.

    An example: PyYAML ends a line at U+2028, and with it a comment; the reader of the Hub does not. So nothing is allowed that a
    card of dpllm does not need: neither comments, nor marks of a document, nor letters that end a line or that nobody sees.
    """
    matter = _MATTER.match(_read(markdown))
    text = matter[1] if matter else ""
    strange = any(unicodedata.category(sign) in ("Cc", "Cf", "Zl", "Zp") for sign in text if sign not in "\t\n")
    return strange or _OTHERWISE.search(text) is not None


def has_marker(text: str, names: Sequence[str]) -> bool:
    """Whether a text holds a marker of one of these parts."""
    return any(marker in text for name in names for marker in _markers(name))


def _markers(name: str) -> tuple[str, str]:
    return f"<!-- dpllm:{name} -->", f"<!-- /dpllm:{name} -->"


def _read(markdown: str) -> str:
    """A card with the line ends of Unix, as the operating system or an editor may not have left it."""
    return markdown.replace("\r\n", "\n").removeprefix("\ufeff")
