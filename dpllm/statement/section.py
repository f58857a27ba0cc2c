"""What of a card is a function of its privacy block: the first screen, all about privacy and audit, the front matter's entry.

Comes in: a privacy statement, or the Markdown of a card. Goes out: the text between the markers, written or read back. Must not
read any file but its template, nor know the recipe, the record or the audit: whoever has ``privacy.json`` can render the
same text, and jinja2 and pydantic are all that it takes.
"""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections.abc import Callable, Sequence
from typing import Any

import yaml
from jinja2 import TemplateError

from dpllm.errors import ConfigError
from dpllm.files import BLOCK
from dpllm.records import Json
from dpllm.statement import audit_rows, formatting, tradeoff_figure
from dpllm.statement.formatting import template
from dpllm.statement.privacy_record import PrivacyRecord

PARTS = ("banner", "privacy")
_WHOLE = ", over all trained parameters together"
CLIPPING_WORDS = {
    "flat": f"{_WHOLE} (flat clipping), was scaled down to an L2 norm of at most C",
    "automatic": f"{_WHOLE}, was multiplied by C / (its L2 norm + 0.01) (automatic clipping), so that its norm was below C",
}
"""What each clipping function does to a gradient, behind "The gradient of each row"."""
_MAIN = ("guarantee", "reason", "epsilon", "delta", "unit", "neighbouring_relation", "released", "dataset")
"""Fields of a statement that the front matter repeats."""
_TAG = re.compile(r"<(?!https?://|[^\s<>@]+@[^\s<>]+>)(?=[a-z/!?])", re.IGNORECASE)
"""Where HTML would begin: a text of a statement could hide what stands behind it."""
_MATTER = re.compile(r"\A---[ \t]*\n(.*?\n)---[ \t]*(?:\n|$)", re.DOTALL)
_OTHERWISE = re.compile(r"^(?:---|\.\.\.|\s*#)", re.MULTILINE)
_MOST_MATTER = 2**19  # letters; YAML takes ten seconds for a million
HIDING = re.compile(
    r"<(?:style|script|link|iframe|object|embed|meta|base|dialog)\b|[\s\"'/](?:style|class)\s*=", re.IGNORECASE
)
"""What could hide a part of a card, if it stood outside of them."""
_MOST_LEVELS = 60
_MOST_PLAIN = 10_000  # letters of a word without quotes, which may be a number


def render(record: PrivacyRecord) -> dict[str, str]:
    """The marked parts of a card.

    Args:
        record: The privacy statement, as ``privacy_record.read`` makes it of what ``privacy.json`` holds.

    Returns:
        "banner" and "privacy": Markdown, as it stands between the markers. Equal statements give equal text, however their
        keys are ordered, and any two that differ give different text: the last line holds ``digest``.

    Raises:
        ConfigError: A number cannot be put into words, or a text holds a marker.
    """
    return filled(
        PARTS,
        lambda: {
            "w": formatting,
            "clipping_words": CLIPPING_WORDS,
            "rows": audit_rows,
            "b": record,
            "t": record.plan,
            "holds": record.guarantee,
            "figure": tradeoff_figure,
            "digest": digest(record.to_json()),
        },
    )


def filled(names: Sequence[str], context: Callable[[], Json]) -> dict[str, str]:
    """Marked parts of a page: each template of that name, filled with a context, which may be that of a stranger.

    Raises:
        ConfigError: See ``render``.
    """
    try:
        given = context()
        found = {name: _tidy(template(f"{name}.md.j2").render(given)) for name in names}
    # A stranger's statement may keep to the schema and have exposure of one group and extraction of another.
    except (ArithmeticError, LookupError, TypeError, ValueError, TemplateError) as error:
        raise ConfigError(
            f"the privacy statement cannot be put into words ({type(error).__name__}), so no card can be made of it. Restore "
            "privacy.json, or write the card again: dpllm card RUN."
        ) from None
    for name, text in found.items():
        if any(marker in text for part in names for marker in _markers(part)):
            raise ConfigError(
                f"a text in the privacy block holds a marker of the card's {name}, so the card could not be read back. Take "
                "<!-- dpllm: ... --> out of card.contact, card.tuning and the names in the recipe."
            )
    return {name: escaped(text) for name, text in found.items()}


def escaped(text: str) -> str:
    """A text in which nothing begins a tag or a comment of HTML, which could hide what stands behind it."""
    return _TAG.sub("&lt;", text)


def matter(record: PrivacyRecord) -> Json:
    """The ``privacy`` entry of a card's front matter: the main fields of the statement, and where and what the whole is."""
    return {**fields(record, _MAIN), "statement": BLOCK, "sha256": digest(record.to_json())}


def fields(record: PrivacyRecord, names: Sequence[str]) -> Json:
    """Those of a statement and of the Plan that it guarantees; names that it does not have are left out."""
    block = record.to_json()
    known = {**block.get("plan", {}), **block}
    return {name: known[name] for name in names if name in known}


def marked(name: str, text: str) -> str:
    """A part of a card between its markers."""
    start, end = _markers(name)
    return f"{start}\n{text}\n{end}"


def parts(markdown: str, names: Sequence[str] = PARTS) -> dict[str, str]:
    """The marked parts of a card, as ``render`` makes them.

    Args:
        markdown: A whole card. Line ends may be those of any system.
        names: Of the parts.

    Raises:
        ConfigError: A marker is missing, doubled or out of order.
    """
    text = _read(markdown).replace("\r", "\n")
    found = {}
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
        found[name] = inside[1:-1] if len(inside) > 1 and inside[0] == inside[-1] == "\n" else inside
    return found


def first(markdown: str, names: Sequence[str] = PARTS) -> bool:
    """Whether the marked parts of a card come first, one after the other: behind its front matter nothing stands before them."""
    shown = _MATTER.sub("", _read(markdown), count=1).lstrip("\n")
    order = [marker for name in names for marker in _markers(name)]
    between = zip(order[1:-1:2], order[2::2], strict=True)
    return shown.startswith(order[0]) and all(re.search(rf"{end}\n*{start}", shown) for end, start in between)


def front_matter(markdown: str) -> Json:
    """The YAML between the first two rules of a card, which may be a stranger's.

    Raises:
        ConfigError: There is none, or it is no mapping; a key stands twice; or it uses anchors or is nested without end, so that
            a short text stands for a value of any size.
    """
    text = _read(markdown)
    matter = _MATTER.match(text)
    value = None
    try:
        # Readers differ over whether a carriage return alone ends a line.
        if matter and "\r" not in text and len(matter[1]) <= _MOST_MATTER:
            value = _strict_yaml(matter[1])
    except (yaml.YAMLError, ValueError, RecursionError):  # ValueError: a trick, or a date that is none
        value = None
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
    strange = any(unicodedata.category(one) in ("Cc", "Cf", "Zl", "Zp") for one in text if one not in "\t\n")
    return strange or _OTHERWISE.search(text) is not None


def _strict_yaml(text: str) -> Any:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    depth = 0
    for event in yaml.parse(text, Loader=loader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        long = isinstance(event, yaml.ScalarEvent) and event.implicit[0] and len(event.value) > _MOST_PLAIN
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) or depth > _MOST_LEVELS or long:
            raise ValueError("anchors, nested without end, or a number of base 60 that takes minutes")
    pending = [yaml.compose(text, Loader=loader)]
    while pending:
        node = pending.pop()
        if isinstance(node, yaml.MappingNode):
            keys = [key.value if isinstance(key, yaml.ScalarNode) else "?" for key, _ in node.value]
            if len(set(keys)) != len(keys) or "<<" in keys:
                raise ValueError("a key stands twice")
            pending += [value for _, value in node.value]
        elif isinstance(node, yaml.SequenceNode):
            pending += node.value
    return yaml.load(text, Loader=loader)


def dump_block(block: Json) -> str:
    """A privacy block as privacy.json holds it."""
    return json.dumps(block, indent=2, sort_keys=True, allow_nan=False) + "\n"


def digest(block: Json) -> str:
    """SHA-256 of privacy.json with this block."""
    return hashlib.sha256(dump_block(block).encode()).hexdigest()


def _markers(name: str) -> tuple[str, str]:
    return f"<!-- dpllm:{name} -->", f"<!-- /dpllm:{name} -->"


def _tidy(text: str) -> str:
    lines = "\n".join(line.rstrip() for line in text.splitlines())
    return re.sub(r"\n{3,}", "\n\n", lines).strip("\n")


def _read(markdown: str) -> str:
    """A card with the line ends of Unix, as the operating system or an editor may not have left it."""
    return markdown.replace("\r\n", "\n").removeprefix("\ufeff")
