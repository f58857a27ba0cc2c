"""Files of strangers, read with limits: JSON as the standard has it, text of bounded length.

Comes in: a path. Goes out: a value, or one sentence about what is wrong. Executes nothing and follows no link.
"""

from __future__ import annotations

import json
import math
import os
import stat
from pathlib import Path
from typing import Any

from dpllm.verification.values import Wrong

MOST_BYTES = 64 * 2**20
"""Of a file that is read as a whole: the largest tokenizer.json has about 35 MB."""
MOST_LEVELS = 60
_RESTORE = "Take the file from where the model was published, or write the card again: dpllm card RUN."


def read_bytes(path: Path, most: int = MOST_BYTES) -> bytes:
    """A regular file of bounded size.

    Raises:
        Wrong: It is missing, a link, no file, too large or not readable.
    """
    try:
        # A link could lead anywhere, and opening a pipe would wait for ever.
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(handle, "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise Wrong(f"{path.name} is no regular file. {_RESTORE}")
            if status.st_size > most:
                raise Wrong(f"{path.name} has {status.st_size:,} bytes, more than {most:,}. {_RESTORE}")
            return file.read(most + 1)
    except FileNotFoundError:
        raise Wrong(f"{path.name} is missing. {_RESTORE}") from None
    except OSError as error:
        raise Wrong(f"{path.name} cannot be read ({error.strerror}). {_RESTORE}") from None


def read_text(path: Path, most: int = MOST_BYTES) -> str:
    """A file of UTF-8.

    Raises:
        Wrong: See ``read_bytes``; or other bytes.
    """
    try:
        return read_bytes(path, most).decode("utf-8")
    except UnicodeDecodeError:
        raise Wrong(f"{path.name} is not UTF-8 text. {_RESTORE}") from None


def read_object(path: Path, most: int = MOST_BYTES) -> dict[str, Any]:
    """A JSON object: no key twice, no NaN, no number beyond a float, no depth without end.

    Raises:
        Wrong: It is none.
    """
    text = read_text(path, most)
    try:
        value = json.loads(text, parse_constant=_finite, parse_float=_finite, object_pairs_hook=_no_key_twice)
        if not isinstance(value, dict):
            raise ValueError("no object")
        _limit_depth(value)
    except RecursionError:
        raise Wrong(f"{path.name} is nested without end. {_RESTORE}") from None
    except ValueError as error:
        reason = error.args[0] if error.args and not isinstance(error, json.JSONDecodeError) else "not valid"
        raise Wrong(f"{path.name} is not a JSON object that dpllm writes ({reason}). {_RESTORE}") from None
    return value


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"it holds {text[:20]}")
    return value


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a key stands twice")
    return value


def _limit_depth(value: Any) -> None:
    level = [value]
    for _ in range(MOST_LEVELS):
        inner = [each for outer in level for each in (outer.values() if isinstance(outer, dict) else outer)]
        level = [each for each in inner if isinstance(each, dict | list)]
        if not level:
            return
    raise ValueError("nested without end")
