"""Texts on their way into a data set: options, why a text is dropped, and a file from which an interrupted call goes on.

Comes in: options, texts, lines of JSON. Goes out: a request, reasons, the same lines again. Must not know private text: what a
filter looks at is the text itself, so that filtering is post-processing too.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from dpllm.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from dpllm.text.prompts import Sample

    Request = TypeVar("Request", bound=DataclassInstance)

Filter = Callable[["Sample"], bool]
"""Whether a text is dropped."""
FILES = {"describe", "prompts"}
"""Options that name a file."""
DUPLICATE, UNFINISHED = "the same as another", "did not end"


def request_of(kind: type[Request], by: Literal["training", "inference"], options: Mapping[str, Any]) -> Request:
    """A request of this dataclass; an option that is None has its default.

    Raises:
        ConfigError: The request has no such option, or needs another.
    """
    given_options = {name: value for name, value in options.items() if value is not None}
    given_options |= {name: Path(given_options[name]) for name in FILES & given_options.keys()}
    if strange := given_options.keys() - {field.name for field in fields(kind)}:
        option = f"--{min(strange).replace('_', '-')}"
        raise ConfigError(f"{option}: is of no use --by {by}. Leave it out; see dpllm synthesize --help.")
    if missing := {field.name for field in fields(kind) if field.default is MISSING} - given_options.keys():
        raise ConfigError(f"--{min(missing)} is missing. Type it; see dpllm synthesize --help.")
    return kind(**given_options)


def filters(*, keep_unfinished: bool, min_words: int) -> dict[str, Filter]:
    """Filters by the reason that each gives, in the order in which they are asked.

    Args:
        keep_unfinished: Take texts that the limit of tokens ended.
        min_words: Fewest words, parted by white space.

    Raises:
        ConfigError: Fewer than no words.
    """
    if min_words < 0:
        raise ConfigError(f"--min-words {min_words}: no text has fewer than 0 words. Type 0 or more.")
    dropped: dict[str, Filter] = {"empty": lambda sample: not sample.text.strip()}
    if not keep_unfinished:
        dropped[UNFINISHED] = lambda sample: not sample.ended
    if min_words > 0:
        dropped[f"under {min_words} words"] = lambda sample: len(sample.text.split()) < min_words
    return dropped


def why_dropped(sample: Sample, tests: Mapping[str, Filter], key: Any, taken: Collection[Any]) -> str | None:
    """The first reason why a text is dropped, the last of which is that its ``key`` is ``taken``; None: it passes."""
    reason = next((name for name, drops in tests.items() if drops(sample)), None)
    return DUPLICATE if reason is None and key in taken else reason


class Draft:
    """A file of one data set in the making: its settings and facts, then a line for each thing that was drawn.

    Attributes:
        path: The file.
        facts: What the first call found, such as its seed or its reservation.
        lines: What was added so far, also by calls that were interrupted; what was cut off at the end of the file is no line.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], begin: Callable[[], dict[str, Any]]) -> None:
        """Goes on with what a call of these settings left, or calls ``begin`` for the facts of a new one.

        Args:
            path: Where the file lies, or will lie once something is added.
            settings: Everything that decides what is drawn.
            begin: See above.

        Raises:
            ConfigError: What lies there has other settings, or cannot be read.
        """
        written = path.read_bytes() if path.exists() else b""
        complete = written[: written.rfind(b"\n") + 1]
        try:
            lines = [json.loads(line) for line in complete.splitlines()]
            previous = lines[0].pop("settings").copy() if lines else settings
        except (ValueError, LookupError, TypeError, AttributeError):
            raise ConfigError(
                f"{path}: the state of an interrupted call cannot be read. Remove it, and start again; private inference is then "
                "charged anew."
            ) from None
        if changed := sorted(name for name in settings if settings[name] != previous.get(name)):
            raise ConfigError(
                f"{path}: an interrupted call began with another {', '.join(changed)}, so their rows cannot be mixed. Type its "
                "settings to go on with it; or remove the file, after which private inference is charged anew."
            )
        if written:
            os.truncate(path, len(complete))
        self.path, self.lines = path, lines[1:]
        self.facts: dict[str, Any] = lines[0] if lines else begin()
        self._unwritten = [] if lines else [{"settings": dict(settings), **self.facts}]

    def add(self, *lines: Any) -> None:
        """Further lines, which are on the disk when it returns; without any, the first line alone."""
        content = "".join(f"{json.dumps(line)}\n" for line in [*self._unwritten, *lines])
        with open(self.path, "ab", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(content.encode())
            file.flush()
            os.fsync(file.fileno())
        self._unwritten = []
        self.lines += lines
