"""What lies in export/: the very files that the block lists, each of a known name and with settings that are known.

Comes in: an export directory and the hashes in its block. Goes out: checks. Opens regular files only, follows no link and
loads no tensor.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from dpllm.files import UNHASHED, publishable, sha256, unknown
from dpllm.verification.reading import read_object, read_text
from dpllm.verification.values import Check, Published, Wrong, failed, listed, verified

MOST_FILES = 10_000
MOST_HEADER = 100 * 2**20
OF_THE_HUB = (".gitattributes", ".git", ".cache")
"""What the Hub, git and a download add at the top of a repository; dpllm never writes them and never uploads them."""
_TRAINING_STATE = re.compile(
    r"exp_avg|momentum_buffer|optimizer|rng|grad_sample|summed_grad|\bmoments?\b", re.IGNORECASE
)


def check(found: Published) -> Iterator[Check]:
    """Names, hashes and contents of all files."""
    names, problems = regular_files(found.directory, strict=found.run is not None)
    strange = set(unknown(names))
    yield _hashes(found, names)
    for name in names:
        why = "is no file of an export" if name in strange else _content(found.directory / name)
        problems += [f"{name} {why}"] if why else []
    if problems:
        detail = (
            f"{listed(problems)}. What is not known may hold private data or run code: delete it from export/ and write the "
            "card again."
        )
        yield failed("kinds of files", detail)
    else:
        yield verified(
            "kinds of files",
            f"{len(names)} files, each of a name that dpllm writes; no setting is unknown or names code elsewhere, and no tensor "
            "is the optimizer's.",
        )


def regular_files(directory: Path, *, strict: bool) -> tuple[list[str], list[str]]:
    """Relative names of all regular files, sorted, and what else lies there, each in a few words.

    Args:
        directory: An export directory.
        strict: Hidden files that the Hub or git adds are strange as well.

    Raises:
        Wrong: There are too many files to look at.
    """
    names: list[str] = []
    strange: list[str] = []
    pending = [directory]
    while pending:
        folder = pending.pop()
        with os.scandir(folder) as entries:
            for entry in entries:
                name = PurePosixPath(Path(entry.path).relative_to(directory)).as_posix()
                mode = entry.stat(follow_symlinks=False).st_mode
                if stat.S_ISLNK(mode):
                    strange.append(f"{name} is a link, which could lead anywhere")
                elif entry.name.startswith("."):
                    if strict or folder != directory or entry.name not in OF_THE_HUB:
                        strange.append(f"{name} is hidden")
                elif stat.S_ISDIR(mode):
                    pending.append(Path(entry.path))
                elif stat.S_ISREG(mode):
                    names.append(name)
                else:
                    strange.append(f"{name} is no regular file")
        if len(names) + len(strange) + len(pending) > MOST_FILES:
            raise Wrong(
                f"more than {MOST_FILES:,} files, which no export holds. Verify the export directory of one run."
            )
    return sorted(names), sorted(strange)


def _hashes(found: Published, names: list[str]) -> Check:
    found.hashes.update({name: sha256(found.directory / name, follow=False) for name in names if name not in UNHASHED})
    stated = found.record.files
    changed = sorted(name for name in stated if name in found.hashes and stated[name] != found.hashes[name])
    missing = sorted(stated.keys() - found.hashes.keys())
    extra = sorted(found.hashes.keys() - stated.keys())
    problems = [
        f"{what}: {listed(which)}"
        for what, which in (("changed", changed), ("missing", missing), ("not listed", extra))
        if which
    ]
    weights = sorted(name for name in found.hashes if name.endswith(".safetensors"))
    released = "adapter weights" if "adapter_model.safetensors" in found.hashes else "model weights"
    if not weights:
        problems.append("there are no weights")
    elif not found.record.merged_from and found.record.released != released:
        problems.append(f"what is released are {released}")
    if problems:
        return failed(
            "files",
            f"not those that the card was written for; {'; '.join(problems)}. Restore them, or write the card again with "
            "dpllm card RUN.",
        )
    return verified(
        "files", f"SHA-256 of {len(stated)} files, weights included ({listed(weights)}); none missing, none extra."
    )


def _content(path: Path) -> str:
    """What is wrong with a file of a known name; empty where nothing."""
    try:
        if path.suffix == ".safetensors":
            return _tensors(path)
        if path.suffix == ".json":
            settings = read_object(path)
            kept = publishable(path.name, settings)
            if more := sorted(key for key in settings if key not in kept or kept[key] != settings[key]):
                return f"has a setting that is not known ({listed(more)})"
        elif path.suffix not in (".png", ".parquet"):
            read_text(path)
    except Wrong as error:
        return str(error).removeprefix(f"{path.name} ").partition(". ")[0]
    return ""


def _tensors(path: Path) -> str:
    """The same of a safetensors file, by the names in its header."""
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
        header = file.read(min(int.from_bytes(file.read(8), "little"), MOST_HEADER))
    try:
        names = list(dict(json.loads(header)))
    except (ValueError, TypeError, RecursionError):
        return "is no safetensors file"
    return "holds tensors of the optimizer or of the generator" if any(map(_TRAINING_STATE.search, names)) else ""
