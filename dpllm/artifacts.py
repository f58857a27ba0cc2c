"""What lies in export/, as hashes: by these run.json and the card say which files they speak of.

Comes in: a directory. Goes out: path -> SHA-256. Must not know what a file is for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from pathlib import Path


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


def sha256(path: Path) -> str:
    """SHA-256 of a file, read in pieces."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
