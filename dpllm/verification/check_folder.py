"""Checks that a release's folder holds exactly the files that its record lists and the texts rendered from it, byte for byte.

Comes in: a release. Goes out: checks. The author's text outside the markers of README.md is not checked, but it may not precede
the marked parts or hide them. Opens regular files only, follows no link and loads no tensor.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Iterator
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import dpllm
from dpllm.files import CARD, SIGNATURE, check_shape, publishable, sha256, unknown
from dpllm.statement import section
from dpllm.statement.privacy_record import PrivacyRecord
from dpllm.verification import values
from dpllm.verification.values import BYTES_OF_VALUE, MOST_BYTES, WRITE_AGAIN, Check, Published, Wrong

MOST_FILES = 10_000
_FORMAT = {"format": "pt"}
MOST_HEADER, MOST_AXES = 2**24, 8  # bytes of a header: 13 million for 100,000 tensors
_BYTES = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2}
_BYTES |= {"U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8}
_UNLISTED, _UNREAD = "not listed", "not read"  # in place of a hash
OF_THE_HUB = (".gitattributes", ".git", ".cache")
"""Added by the Hub, git and downloads at the top of a repository; dpllm never writes them and never uploads them."""
_TRAINING_STATE = re.compile(
    r"exp_avg|momentum_buffer|optimizer|rng|grad_sample|summed_grad|\bmoments?\b", re.IGNORECASE
)


def front_matter(page: Published[Any]) -> Iterator[Check]:
    """Compares the front matter with the record, whose hash it states, and refuses YAML that readers may read differently."""
    if page.artifact.front is None:
        return
    front, record = page.artifact.front(page.record), page.artifact.sources[0]
    if section.ambiguous(page.card):
        raise Wrong(
            "the front matter of README.md has a comment, a document marker, or an invisible or line-ending character, so two "
            f"readers may find different statements in it. {page.again}"
        )
    stated, allowed = section.front_matter(page.card), {*front.due, *front.perhaps, *front.free}
    if unknown_keys := sorted(map(str, stated.keys() - allowed)):
        raise Wrong(
            f"the front matter of README.md has keys that dpllm does not write ({values.listed(unknown_keys)}). Delete them."
        )
    if sha256(page.directory / record, follow=False) != front.due["privacy"]["sha256"]:
        raise Wrong(f"{record} is not laid out as dpllm writes it, so its hash differs. {page.again}")
    # Compared as text, in which 1 and 1.0 differ; YAML has types, such as dates, that JSON lacks.
    text = partial(json.dumps, sort_keys=True, default=repr)
    wrong = [key for key, value in front.due.items() if text(stated.get(key)) != text(value)]
    wrong += [key for key, value in front.perhaps.items() if stated.get(key) not in (None, value)]
    if wrong:
        raise Wrong(
            f"{values.listed(wrong)} in the front matter of README.md do not follow from {page.source}. {page.again}"
        )
    yield values.verified("front matter", f"follows from {page.source}, with the SHA-256 of {record}.")
    tags = stated.get("tags") or []
    if front.never.intersection(map(str, tags if isinstance(tags, list) else [tags])):
        yield values.failed("tags", f"the tags claim differential privacy, but {page.source} states none. {page.again}")


def marked(page: Published[Any]) -> Iterator[Check]:
    """Checks the marked parts of README.md, and that no text precedes them or could hide them."""
    if page.artifact.parts is None:
        return
    expected = page.artifact.parts(page.record)
    parts = section.parts(page.card, tuple(expected))
    if not section.first(page.card, tuple(expected)):
        detail = f"there is text before the {' or the '.join(expected)} part that could hide it. {page.again}"
        yield values.failed("what is seen first", detail)
    outside = page.card
    for part in parts.values():
        outside = outside.replace(part, "")
    if hiding := section.HIDING.search(outside):
        detail = f"{hiding[0].strip()} outside the marked parts can hide the statement. Remove it."
        yield values.failed("what could hide it", detail)
    for name, text in expected.items():
        yield _compared(page, f"{name} in {CARD}", parts[name], text)
    yield values.asserted(
        "text of the author", "title, description, use, citation: outside the marked parts, not checked."
    )


def whole(page: Published[Any]) -> Iterator[Check]:
    """Compares files that are rendered completely from the record, such as the figure."""
    for name, text in page.artifact.whole(page.record).items():
        yield _compared(page, name, values.read_text(page.directory / name), text)


def _compared(page: Published[Any], name: str, published: str, expected: str) -> Check:
    if published == expected:
        return values.verified(name, f"is what {page.source} renders to, byte for byte.")
    lines = enumerate(zip_longest(published.split("\n"), expected.split("\n")), start=1)
    line = next(number for number, (published_line, expected_line) in lines if published_line != expected_line)
    version, advice = page.record.to_json()["software"].get("dpllm"), page.again
    if version != dpllm.__version__:
        advice = f"The card names dpllm {version}; this is {dpllm.__version__}, which has other words."
        advice += " Verify it with that version."
    return values.failed(name, f"differs from what {page.source} renders to, from its line {line}. {advice}")


# Files.


def files(folder: Published[Any]) -> Iterator[Check]:
    """Checks names and hashes of all files: exactly those that the record lists."""
    if folder.artifact.files is None:
        return
    stated, required = folder.artifact.files(folder.record), folder.artifact.due
    unhashed = {CARD, folder.artifact.sources[0], *((SIGNATURE,) if required is None else ())}
    names, problems = regular_files(folder.directory, strict=folder.run is not None)
    for name in names:
        if name not in unhashed:
            folder.hashes[name] = _sha256(folder.directory / name) if name in stated else _UNLISTED
    hashes = folder.hashes
    unread = {name for name, digest in hashes.items() if digest == _UNREAD}
    differences = {
        "changed": {name for name in stated.keys() & hashes.keys() if stated[name] != hashes[name]} - unread,
        "larger than they can be, and not read": unread,
        "missing": stated.keys() - hashes.keys(),
        "not listed, and not read": hashes.keys() - stated.keys(),
        "not what such a release consists of": stated.keys() ^ set(required(folder.record)) if required else set(),
    }
    problems += [f"{problem}: {values.listed(sorted(paths))}" for problem, paths in differences.items() if paths]
    if problems:
        raise Wrong(f"not those of the record: {'; '.join(problems)}. Restore or remove them. {folder.again}")
    number = f"{len(stated)} {'file' if len(stated) == 1 else 'files'}"
    yield values.verified("files", f"SHA-256 of {number} ({values.listed(sorted(stated))}); none missing, none extra.")


def regular_files(directory: Path, *, strict: bool) -> tuple[list[str], list[str]]:
    """Relative names of all regular files, sorted, and a short description of each other entry.

    ``strict``: hidden files that the Hub or git adds are listed as well.
    """
    names: list[str] = []
    strange: list[str] = []
    pending = [directory]
    while pending:
        folder = pending.pop()
        for path in folder.iterdir():
            name, mode = path.relative_to(directory).as_posix(), path.lstat().st_mode
            if stat.S_ISLNK(mode):
                strange.append(f"{name} is a link, which could lead anywhere")
            elif path.name.startswith("."):
                if strict or name not in OF_THE_HUB:
                    strange.append(f"{name} is hidden")
            elif stat.S_ISDIR(mode):
                pending.append(path)
            elif stat.S_ISREG(mode):
                names.append(name)
            else:
                strange.append(f"{name} is not a regular file")
        if len(names) + len(strange) + len(pending) > MOST_FILES:
            raise Wrong(f"more than {MOST_FILES:,} files, which no export holds. Verify one run's export directory.")
    return sorted(names), sorted(strange)


def _sha256(path: Path) -> str:
    """SHA-256 of a file that is no larger than its name, or its own header, allows; else ``_UNREAD``."""
    try:
        if path.suffix == ".safetensors" and path.lstat().st_size > MOST_BYTES:
            _tensors(path)
        with values.regular(path):
            return sha256(path, follow=False)
    except Wrong:
        return _UNREAD


def contents(export: Published[PrivacyRecord]) -> Iterator[Check]:
    """Checks that each file of an export has a known name and known settings."""
    names, problems = regular_files(export.directory, strict=export.run is not None)
    strange = set(unknown(names))
    for name in names:
        problem = "does not belong in an export" if name in strange else ""
        if not problem and export.hashes.get(name) != _UNLISTED:
            problem = _content(export.directory / name, export)
        problems += [f"{name} {problem}"] if problem else []
    if problems:
        raise Wrong(
            f"{values.listed(problems)}. An unknown file may hold private data or run code: restore it, or delete it from "
            "export/, and write the card again."
        )
    yield values.verified(
        "kinds of files",
        f"{len(names)} files of known names; no unknown setting, no code elsewhere, no tensor of the optimizer.",
    )
    if pictures := [name for name in names if name.endswith(".png")]:
        yield values.asserted("pictures", f"{values.listed(pictures)}: not redrawn here, so they may show anything.")


def _content(path: Path, export: Published[PrivacyRecord]) -> str:
    try:
        if path.suffix == ".safetensors":
            has_training_state = any(map(_TRAINING_STATE.search, _tensors(path)))
            return "holds tensors of the optimizer or of the generator" if has_training_state else ""
        if path.name == "tokenizer.json":  # has no settings, and too many values to parse
            check_shape(values.read_bytes(path), MOST_BYTES // BYTES_OF_VALUE)
        elif path.suffix == ".json":
            settings = values.read_object(path)
            allowed = publishable(path.name, settings)
            if changed := sorted(key for key in settings if key not in allowed or allowed[key] != settings[key]):
                return f"has an unknown setting ({values.listed(changed)})"
            base, named = export.record.base_model, (settings.get("base_model_name_or_path"), settings.get("revision"))
            if path.name == "adapter_config.json" and named not in ((base.name, None), (base.name, base.revision)):
                return f"does not name {base.name}, the base model in privacy.json"
        elif path.suffix in (".png", ".parquet"):
            values.read_bytes(path)
        else:
            values.read_text(path)
    except ValueError:
        return "is not JSON"
    except Wrong as error:
        return str(error).removeprefix(f"{path.name} ").partition(". ")[0]
    return ""


def _tensors(path: Path) -> dict[str, Any]:
    """The header of a safetensors file, by tensor; checks that the tensors are contiguous and end with the file."""
    with values.regular(path) as file:
        size, length = os.fstat(file.fileno()).st_size, int.from_bytes(file.read(8), "little")
        text = file.read(min(length, MOST_HEADER))
    try:
        tensors, end = values.parsed(text, MOST_HEADER // BYTES_OF_VALUE), 0
        if tensors.pop("__metadata__", _FORMAT) != _FORMAT:
            raise ValueError("a text that may say anything")
        parts = sorted((*tensor["data_offsets"], tensor["shape"], tensor["dtype"]) for tensor in tensors.values())
        for start, stop, shape, kind in parts:
            valid = {type(number) for number in (start, stop, *shape)} == {int} and min(shape, default=0) >= 0
            if not valid or len(shape) > MOST_AXES or (start, stop - start) != (end, _BYTES[kind] * math.prod(shape)):
                raise ValueError("other bytes than it has, a gap, or one over another")
            end = stop
    except (ValueError, TypeError, LookupError, AttributeError):
        raise Wrong(f"{path.name} is not a safetensors file. {WRITE_AGAIN}") from None
    if size != 8 + length + end:
        raise Wrong(f"{path.name} is shorter or longer than its header says. {WRITE_AGAIN}")
    return tensors
