"""What is drawn before a data set is whole: a file from which an interrupted call goes on.

Comes in: settings, lines of JSON. Goes out: the same again. The first line has the settings and what the first call found; what
was cut off at the end of the file is no line.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dpllm.errors import ConfigError


class Draft:
    """A file of one data set in the making.

    Attributes:
        path: The file.
        facts: What the first call found, such as its seed or its reservation.
    """

    def __init__(
        self,
        path: Path,
        settings: Mapping[str, Any],
        begin: Callable[[], dict[str, Any]],
        take: Callable[[Any], None],
    ) -> None:
        """Goes on with what a call of these settings left, or calls ``begin`` for the facts of a new one.

        Args:
            path: Where the file lies, or will lie once something is added.
            settings: Everything that decides what is drawn.
            begin: See above.
            take: Called with each line of the file, and later with each that is added.

        Raises:
            ConfigError: What lies there has other settings, or cannot be read.
        """
        self.path, self._take, self._first = path, take, None
        try:
            written = path.read_bytes() if path.exists() else b""
            whole = written[: written.rfind(b"\n") + 1]
            lines = [json.loads(line) for line in whole.splitlines()]
            before = lines[0].pop("settings") if lines else settings
            changed = sorted(name for name in settings if settings[name] != before.get(name))
            if not changed:
                for line in lines[1:]:
                    take(line)
                if written:
                    os.truncate(path, len(whole))
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError(
                f"{path}: the state of an interrupted call cannot be read ({type(error).__name__}). Remove it, and start again; "
                "private inference is then charged anew."
            ) from None
        if changed:
            raise ConfigError(
                f"{path}: an interrupted call began with another {', '.join(changed)}, so their rows cannot be mixed. Type its "
                "settings to go on with it; or remove the file, after which private inference is charged anew."
            )
        self.facts: dict[str, Any] = lines[0] if lines else begin()
        if not lines:
            self._first = {"settings": dict(settings), **self.facts}

    def add(self, *lines: Any) -> None:
        """Further lines, which are on the disk when it returns; without any, the first line alone."""
        first = [] if self._first is None else [self._first]
        content = "".join(f"{json.dumps(line)}\n" for line in [*first, *lines])
        with open(self.path, "ab", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(content.encode())
            file.flush()
            os.fsync(file.fileno())
        self._first = None
        for line in lines:
            self._take(line)
