"""What lies in export/: the names of the card's files, and hashes, by which run.json and the card say of which files they speak.

Comes in: a directory. Goes out: path -> SHA-256. Must not know what a file is for.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection
from pathlib import Path

CARD, BLOCK, SIGNATURE = "README.md", "privacy.json", "privacy.json.sig"
UNHASHED = frozenset({CARD, BLOCK, SIGNATURE})
"""Files of export/ whose hashes the block cannot hold: the card, the block itself and its signature."""


def hashes(directory: Path, without: Collection[str] = ()) -> dict[str, str]:
    """SHA-256 of every file below a directory.

    Args:
        directory: Read to any depth; symbolic links to files are read, those to directories are not followed.
        without: Paths that are left out.

    Returns:
        Path below the directory, with forward slashes -> SHA-256 in hexadecimal; sorted by path.
    """
    found = {path.relative_to(directory).as_posix(): path for path in directory.rglob("*") if path.is_file()}
    return {name: sha256(found[name]) for name in sorted(found) if name not in without}


def sha256(path: Path, *, follow: bool = True) -> str:
    """SHA-256 of a file, read in pieces; a symbolic link is an OSError unless ``follow``."""
    flags = os.O_RDONLY if follow else os.O_RDONLY | os.O_NOFOLLOW
    with open(os.open(path, flags), "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
