"""Drafts of synthetic data sets: options, filters of texts, and a file from which an interrupted call continues.

Comes in: options, texts, lines of JSON. Goes out: a request, reasons, the same lines again. Must not know private text: a filter
reads only the generated text, so filtering is post-processing.
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
"""Returns whether a text is dropped."""
FILES = {"describe", "prompts"}
"""Options that name a file."""
DUPLICATE, UNFINISHED = "the same as another", "did not end"


def request_of(kind: type[Request], by: Literal["training", "inference"], options: Mapping[str, Any]) -> Request:
    """A request of this dataclass; an option that is None has its default.

    Raises:
        ConfigError: The request has no such option, or a required option is missing.
    """
    settings = {name: value for name, value in options.items() if value is not None}
    settings |= {name: Path(settings[name]) for name in FILES & settings.keys()}
    if unknown := settings.keys() - {field.name for field in fields(kind)}:
        option = f"--{min(unknown).replace('_', '-')}"
        raise ConfigError(f"{option}: has no effect with --by {by}. Leave it out; see dpllm synthesize --help.")
    if missing := {field.name for field in fields(kind) if field.default is MISSING} - settings.keys():
        raise ConfigError(f"--{min(missing)} is missing. Type it; see dpllm synthesize --help.")
    return kind(**settings)


def filters(*, keep_unfinished: bool, min_words: int) -> dict[str, Filter]:
    """Reason -> filter, in the order of application.

    Args:
        keep_unfinished: Keep texts that the limit of tokens ended.
        min_words: Minimum number of words between white space, >= 0.

    Raises:
        ConfigError: ``min_words`` is negative.
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
    """The first reason to drop a text; a ``key`` that is ``taken`` is the last reason; None: the text is kept."""
    reason = next((name for name, drops in tests.items() if drops(sample)), None)
    return DUPLICATE if reason is None and key in taken else reason


class Draft:
    """The file of an unfinished data set: its settings and facts, then a line for each draw.

    Attributes:
        path: The file.
        facts: Facts of the first call, such as its seed or its reservation.
        lines: Lines that were added so far, by interrupted calls too; a partial last line is dropped.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], begin: Callable[[], dict[str, Any]]) -> None:
        """Continues the draft of a call with these settings, or begins a new one.

        Args:
            path: The file; it is made by the first ``add``.
            settings: Everything that affects the draws.
            begin: Returns the facts of a new draft.

        Raises:
            ConfigError: The file has other settings, or cannot be read.
        """
        content = path.read_bytes() if path.exists() else b""
        complete = content[: content.rfind(b"\n") + 1]
        try:
            lines = [json.loads(line) for line in complete.splitlines()]
            previous = lines[0].pop("settings").copy() if lines else settings
        except (ValueError, LookupError, TypeError, AttributeError):
            raise ConfigError(
                f"{path}: the state of an interrupted call cannot be read. Remove it, and start again; private inference is then "
                "charged again."
            ) from None
        if changed := sorted(name for name in settings if settings[name] != previous.get(name)):
            raise ConfigError(
                f"{path}: an interrupted call began with another {', '.join(changed)}, so their rows cannot be mixed. Type its "
                "settings to continue it; or remove the file, after which private inference is charged again."
            )
        if content:
            os.truncate(path, len(complete))
        self.path, self.lines = path, lines[1:]
        self.facts: dict[str, Any] = lines[0] if lines else begin()
        self._unwritten = [] if lines else [{"settings": dict(settings), **self.facts}]

    def add(self, *lines: Any) -> None:
        """Appends lines, which are on disk when it returns; without arguments, writes only the first line."""
        content = "".join(f"{json.dumps(line)}\n" for line in [*self._unwritten, *lines])
        with open(self.path, "ab", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(content.encode())
            file.flush()
            os.fsync(file.fileno())
        self._unwritten = []
        self.lines += lines
