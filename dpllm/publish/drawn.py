"""The tokens that were drawn, as a file from which an interrupted call goes on.

Comes in: settings, tokens. Goes out: the same again. The first line has the settings; each further one is a list of a text's
number and its next token. The number is written, and on the disk, before the token is drawn, so that a draw which a crash lost is
known, and counts as one of the text's.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dpllm.errors import ConfigError


class Drawn:
    """What is drawn so far.

    Attributes:
        facts: What the first call found: its reservation, and what else decides the rows.
        tokens: By text, in the order in which they were drawn; None: lost.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], begin: Callable[[], dict[str, Any]]) -> None:
        """Goes on with what a call of these settings left, or calls ``begin`` for the facts of a new one.

        Raises:
            ConfigError: What lies there has other settings, or cannot be read.
        """
        self.path, self.tokens = path, defaultdict[int, list[int | None]](list)
        try:
            lines = path.read_bytes().split(b"\n") if path.exists() else [b""]
            if len(lines) < 2:  # not even the first line is whole
                self.facts = begin()
                with open(path, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
                    file.write(json.dumps({"settings": settings, **self.facts}).encode() + b"\n")
                    file.flush()
                    os.fsync(file.fileno())
                return
            self.facts = json.loads(lines[0])
            before = self.facts.pop("settings")
            for line in lines[1:-1]:
                self._add(*json.loads(line))
            number, comma, _ = lines[-1].partition(b", ")
            with open(path, "r+b") as file:  # a number that is cut off was not on the disk, so nothing was drawn
                file.truncate(len(b"\n".join(lines[:-1])) + 1 + len(number + comma) * bool(comma))
            if comma:
                self._write("null]\n")
                self._add(int(number.removeprefix(b"[")), None)
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError(
                f"{path}: the state of an interrupted call cannot be read ({type(error).__name__}). What it spent stays spent. "
                "Remove the file, and start again: that is charged anew."
            ) from None
        if changed := sorted(name for name in settings if settings[name] != before.get(name)):
            raise ConfigError(
                f"{path}: an interrupted call began with another {', '.join(changed)}, and its tokens are paid for. Type its "
                "settings to go on with it; or remove the file, and start again: that is charged anew."
            )

    def draw(self, number: int, draw: Callable[[], int]) -> int:
        """The next token of a text."""
        self._write(f"[{number}, ")
        token = draw()
        self._write(f"{token}]\n")
        self._add(number, token)
        return token

    def _add(self, number: int, token: int | None) -> None:
        self.tokens[number].append(token)

    def _write(self, text: str) -> None:
        with open(self.path, "ab") as file:
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
