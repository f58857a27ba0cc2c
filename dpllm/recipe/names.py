"""Names of models, data and directories as they may be told: paths are cut to their last part.

Comes in: strings, and JSON values that hold some. Goes out: the same without directories. Must not open any file.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

DATA_SUFFIXES = {".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".txt", ".gz", ".zst"}
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
# Not part of a URL or of a relative path, and at least one directory deep.
_ABSOLUTE_PATH = re.compile(r"(?<![\w.:/\\-])(?:file://)?(?:~|[A-Za-z]:)?[/\\][^\s'\"`,;:()]+")


def is_hub_id(name: str) -> bool:
    """Whether a name has the form of a Hugging Face repository and nothing local bears it."""
    return (
        _HUB_ID.fullmatch(name) is not None
        and Path(name).suffix.lower() not in DATA_SUFFIXES
        and not Path(name).exists()
    )


def public_name(name: str) -> str:
    """A dataset by its Hub id or builtin name, and a local path by its last part."""
    if name.startswith("builtin:") or is_hub_id(name):
        return name
    return last_part(name)


def last_part(path: str) -> str:
    """The name of a local file or directory without where it lies."""
    return re.split(r"[/\\]", path.rstrip("/\\"))[-1]


def without_paths(value: Any) -> Any:
    """The same JSON value with every absolute local path in its strings cut to its last part."""
    if isinstance(value, str):
        return _ABSOLUTE_PATH.sub(lambda match: last_part(match[0]), value)
    if isinstance(value, dict):
        return {without_paths(key): without_paths(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [without_paths(inner) for inner in value]
    return value


def is_builtin(name: str) -> bool:
    """Says whether a recipe's value names something embedded, known or not."""
    return name.startswith("builtin:")
