"""What lies in export/: the very files that the block lists, and none of a kind that is never published.

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

from dpllm.artifacts import UNHASHED, sha256
from dpllm.report.checks.values import Check, Published, Wrong, failed, listed, verified

MOST_FILES = 10_000
MOST_HEADER = 100 * 2**20
OF_THE_HUB = (".gitattributes", ".git", ".cache")
"""What the Hub, git and a download add at the top of a repository; dpllm never writes them and never uploads them."""
PRIVATE_SUFFIXES = frozenset(
    f".{kind}"
    for kinds in (
        "pt pth bin pkl pickle ckpt joblib npy npz h5",
        "sqlite db log jsonl",
        "zip tar gz tgz xz bz2 zst 7z rar",
        "py pyc so",
    )
    for kind in kinds.split()
)
_TOKENS = "audit/tokens.parquet"
_PRIVATE_NAME = re.compile(
    r"(metrics|audits)\.jsonl|canaries\.json|summary\.json|state\.json|config\.yaml|plan\.json|run\.json|"
    r".*(optimizer|scheduler|rng_state|rng-state|trainer_state|training_args|shadow).*",
    re.IGNORECASE,
)
_MAGIC = {
    b"PK\x03\x04": "an archive, as torch.save writes it",
    b"SQLite format 3\x00": "a database",
    b"\x1f\x8b": "a compressed file",
    b"\xfd7zXZ": "a compressed file",
    b"BZh": "a compressed file",
    b"\x28\xb5\x2f\xfd": "a compressed file",
    b"7z\xbc\xaf": "an archive",
    b"Rar!": "an archive",
    b"\x7fELF": "a program",
    b"\x93NUMPY": "an array, which may hold pickled objects",
}
_TRAINING_STATE = re.compile(
    r"exp_avg|momentum_buffer|optimizer|rng|grad_sample|summed_grad|\bmoments?\b", re.IGNORECASE
)


def check(found: Published) -> Iterator[Check]:
    """Names, hashes and kinds of all files."""
    names, strange = regular_files(found.directory, strict=found.run is not None)
    problems = strange + [f"{name} {why}" for name in names if (why := _private_kind(name))]
    for name in names:
        content = _private_content(found.directory / name)
        problems += [f"{name} {content}"] if content else []
    yield _hashes(found, names)
    if problems:
        detail = (
            f"{listed(problems)}. Such a file may hold private data: delete it from export/ and write the card again."
        )
        yield failed("kinds of files", detail)
    else:
        yield verified(
            "kinds of files",
            f"{len(names)} files: no pickle, archive, database, link or hidden file, and no state of training; every "
            "safetensors file holds tensors and nothing behind them.",
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
    stated = found.block.get("files")
    if not isinstance(stated, dict) or not all(isinstance(value, str) for value in stated.values()):
        raise Wrong(
            "privacy.json lists no files, so nothing ties it to these weights. Write the card again: dpllm card RUN."
        )
    found.hashes.update({name: sha256(found.directory / name, follow=False) for name in names if name not in UNHASHED})
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
    elif not found.block.get("merged_from") and found.block.get("released") != released:
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


def _private_kind(name: str) -> str:
    path = PurePosixPath(name)
    if path.suffix.lower() in PRIVATE_SUFFIXES:
        return f"is of a kind that is never published ({path.suffix})"
    if path.suffix.lower() in (".parquet", ".arrow", ".feather") and name != _TOKENS:
        return "is a table, which may hold text"
    return "has the name of a private file" if _PRIVATE_NAME.fullmatch(path.name) else ""


def _private_content(path: Path) -> str:
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
        start = file.read(16)
        for magic, what in _MAGIC.items():
            if start.startswith(magic):
                return f"is {what}"
        if path.suffix != ".safetensors":
            return (
                "is a pickle" if start[:1] == b"\x80" and start[1:2] in b"\x02\x03\x04\x05" and len(start) > 1 else ""
            )
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(start[:8], "little")
        if len(start) < 9 or length > min(MOST_HEADER, size - 8):
            return "is no safetensors file"
        file.seek(8)
        header = file.read(length)
    return _tensors(header, size - 8 - length)


def _tensors(header: bytes, size: int) -> str:
    """What is wrong with the header of a safetensors file whose tensors have so many bytes."""
    try:
        values = json.loads(header)
        described = values.pop("__metadata__", {})
        spans = sorted(tuple(entry["data_offsets"]) for entry in values.values())
        end = 0
        for first, last in spans:
            if first != end or last < first:
                return "has gaps between its tensors, in which anything could be kept"
            end = last
        if end != size:
            return "holds something else than its tensors"
        if any(_TRAINING_STATE.search(name) for name in values):
            return "holds tensors of the optimizer or of the generator"
        if len(json.dumps(described)) > 10_000:
            return "holds more text than a description"
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return "is no safetensors file"
    return ""
