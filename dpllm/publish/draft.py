"""Texts that are taken before a data set is whole: a file from which an interrupted call goes on.

Comes in: settings, texts. Goes out: the same again. The file has settings and seed in its first line, and then a line for each
batch; what was cut off at its end is no line.
"""

from __future__ import annotations

import json
import os
import secrets
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dpllm.errors import ConfigError


@dataclass
class Draft:
    """What is drawn so far.

    Attributes:
        seed: Asked for, or the operating system's.
        first: The first line, where it is still to be written: what fails at once leaves no draft.
        texts: Taken ones, by number of row.
        dropped: Why others were not -> how many.
    """

    path: Path
    seed: int
    first: str = ""
    texts: dict[int, str] = field(default_factory=dict)
    dropped: Counter[str] = field(default_factory=Counter)
    batches: int = 0

    @classmethod
    def at(cls, path: Path, settings: Mapping[str, Any], seed: int | None) -> Draft:
        """What an interrupted call left, or a new one.

        Raises:
            ConfigError: It has other settings, or cannot be read.
        """
        try:
            return cls._read(path, settings, seed)
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError(
                f"{path}: the state of an interrupted call cannot be read ({type(error).__name__}). Remove it, and start again."
            ) from None

    @classmethod
    def _read(cls, path: Path, settings: Mapping[str, Any], seed: int | None) -> Draft:
        written = path.read_bytes() if path.exists() else b""
        whole = written.rfind(b"\n") + 1
        if not whole:
            path.unlink(missing_ok=True)
            seed = secrets.randbits(63) if seed is None else seed
            return cls(path, seed, json.dumps({"settings": settings, "seed": seed}))
        first, *batches = map(json.loads, written[:whole].splitlines())
        if changed := sorted(name for name in settings if settings[name] != first["settings"].get(name)):
            raise ConfigError(
                f"{path}: an interrupted call began with another {', '.join(changed)}, so their rows cannot be mixed. Type its "
                "settings to go on with it, or remove the file."
            )
        draft = cls(path, first["seed"])
        for batch in batches:
            draft._add(**batch)
        os.truncate(path, whole)  # which is a draft
        return draft

    @property
    def drawn(self) -> int:
        """Texts, taken or not."""
        return len(self.texts) + self.dropped.total()

    def keep(self, texts: Mapping[str, str], dropped: Mapping[str, int]) -> None:
        """A new batch, which the file gets too."""
        lines = [self.first] * (not self.batches) + [json.dumps({"texts": texts, "dropped": dropped})]
        with open(self.path, "a", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in lines if line)
        self._add(texts, dropped)

    def _add(self, texts: Mapping[str, str], dropped: Mapping[str, int]) -> None:
        self.texts |= {int(row): text for row, text in texts.items()}
        self.dropped.update(dropped)
        self.batches += 1
