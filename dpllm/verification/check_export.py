"""What lies in export/: the page that follows from the block, and the very files that the block lists.

Comes in: an export directory. Goes out: checks. What an author writes outside the markers is not looked at; nothing of it may
stand before the banner. Opens regular files only, follows no link and loads no tensor.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Collection, Iterator, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any

import dpllm
from dpllm.card import card
from dpllm.files import BLOCK, UNHASHED, check_shape, publishable, sha256, unknown
from dpllm.statement import privacy_record, section, tradeoff_figure
from dpllm.verification.values import (
    BYTES_OF_VALUE,
    MOST_BYTES,
    WRITE_AGAIN,
    Check,
    Published,
    Wrong,
    asserted,
    failed,
    listed,
    parsed,
    read_bytes,
    read_object,
    read_text,
    regular,
    verified,
)

MOST_FILES = 10_000
_FORMAT = {"format": "pt"}
MOST_HEADER, MOST_AXES = 2**24, 8  # bytes of a header: 13 million for 100,000 tensors
_BYTES = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2}
_BYTES |= {"U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8}
_UNLISTED, _UNREAD = "not listed", "not read"  # in place of a hash
OF_THE_HUB = (".gitattributes", ".git", ".cache")
"""What the Hub, git and a download add at the top of a repository; dpllm never writes them and never uploads them."""
_TRAINING_STATE = re.compile(
    r"exp_avg|momentum_buffer|optimizer|rng|grad_sample|summed_grad|\bmoments?\b", re.IGNORECASE
)
_KEYS = {"base_model", "library_name", "pipeline_tag", "tags", "license", "language", "datasets", "privacy"}
_KEYS |= {"license_name", "license_link"}
"""Of the front matter: what dpllm writes, and two that the Hub asks for beside a licence of one's own."""


def schema(export: Published) -> Iterator[Check]:
    """privacy.json against the schema that the package ships."""
    if (version := export.statement.get("schema_version")) != privacy_record.SCHEMA_VERSION:
        raise Wrong(
            f"privacy.json has schema version {version!r}, and this version of dpllm reads {privacy_record.SCHEMA_VERSION} "
            "alone. Verify it with the version that wrote it, which software.dpllm names."
        )
    yield verified("schema", f"privacy.json follows schema version {export.record.schema_version}.")


def front_matter(export: Published) -> Iterator[Check]:
    """The ``privacy`` entry of the front matter against privacy.json, whose fields and hash it states."""
    stated = matter_of(export.card, _KEYS)
    if sha256(export.directory / BLOCK, follow=False) != card.digest(export.statement):
        raise Wrong(f"privacy.json is not laid out as dpllm writes it, so its hash differs. {WRITE_AGAIN}")
    if not same(stated.get("privacy"), card.matter(export.record)):
        raise Wrong(f"the front matter of README.md and privacy.json state different things. {WRITE_AGAIN}")
    base = export.record.base_model
    if stated.get("base_model") not in (None, base.name if base.revision else None):
        raise Wrong(f"base_model in the front matter is not {base.name}, which privacy.json names. {WRITE_AGAIN}")
    yield verified("front matter", "README.md states the main fields and the SHA-256 of privacy.json.")
    tags = stated.get("tags") or []
    claims = any(tag in ("differential-privacy", "dp-sgd") for tag in (tags if isinstance(tags, list) else [tags]))
    if claims and not export.record.guarantee:
        yield failed(
            "tags", f"the tags claim differential privacy, but privacy.json states no guarantee. {WRITE_AGAIN}"
        )


def matter_of(card: str, keys: Collection[str]) -> dict[str, Any]:
    """The front matter of a card, which all readers read alike, and which has no other keys.

    Raises:
        Wrong: It is otherwise.
        ConfigError: There is none.
    """
    if section.ambiguous(card):
        raise Wrong(
            "the front matter of README.md has a comment, a document marker, or an invisible or line-ending character, so "
            f"two readers may find different statements in it. {WRITE_AGAIN}"
        )
    stated = section.front_matter(card)
    if more := sorted(map(str, stated.keys() - set(keys))):
        raise Wrong(f"the front matter of README.md has keys that dpllm does not write ({listed(more)}). Delete them.")
    return stated


def same(value: Any, other: Any) -> bool:
    """Whether two values of YAML are equal."""
    # As text, in which 1 and 1.0 differ; YAML has words, such as dates, that JSON has not.
    return json.dumps(value, sort_keys=True, default=repr) == json.dumps(other, sort_keys=True)


def marked(export: Published) -> Iterator[Check]:
    """The banner and the privacy part against what the block renders to, byte for byte."""
    yield from page(export.card, card.render(export.record), BLOCK, _version(export))


def page(card: str, expected: Mapping[str, str], source: str, again: str) -> Iterator[Check]:
    """The marked parts of a page against what they follow from, byte for byte; nothing stands before them or could hide them.

    Args:
        card: README.md.
        expected: Name of a part -> what ``source`` renders to.
        source: Name of a file.
        again: What to do about another text.

    Raises:
        ConfigError: A marker is missing, doubled or out of order.
    """
    names = tuple(expected)
    parts = section.parts(card, names)
    if not section.first(card, names):
        detail = f"there is text before the {' or the '.join(names)} part that could hide it. {WRITE_AGAIN}"
        yield failed("what is seen first", detail)
    beside = card
    for part in parts.values():
        beside = beside.replace(part, "")
    if hiding := section.HIDING.search(beside):
        yield failed(
            "what could hide it", f"{hiding[0].strip()} outside the marked parts can hide the statement. Remove it."
        )
    for name in names:
        label = f"{name} in README.md"
        if parts[name] == expected[name]:
            yield verified(label, f"is what {source} renders to, byte for byte.")
            continue
        lines = zip_longest(parts[name].split("\n"), expected[name].split("\n"))
        line = next(number for number, (one, other) in enumerate(lines, start=1) if one != other)
        yield failed(label, f"differs from what {source} renders to, from line {line} of the part. {again}")
    yield asserted(
        "text of the author", "title, description, use, training, citation: outside the marked parts, not checked."
    )


def figure(export: Published) -> Iterator[Check]:
    """The picture of what a tester can do against what the block draws; the other pictures by name."""
    there = tradeoff_figure.FILE in export.hashes
    if others := sorted(name for name in export.hashes if name.endswith(".png")):
        yield asserted("pictures", f"{listed(others)}: not redrawn here, so they may show anything.")
    if not export.record.guarantee:
        if there:
            raise Wrong(f"{tradeoff_figure.FILE} shows a guarantee, but there is none. {WRITE_AGAIN}")
        return
    if not there or read_text(export.directory / tradeoff_figure.FILE) != tradeoff_figure.figure(export.record.plan):
        raise Wrong(f"{tradeoff_figure.FILE} is not the figure that privacy.json gives. {_version(export)}")
    yield verified("figure", f"{tradeoff_figure.FILE} is what privacy.json gives, byte for byte.")


def _version(export: Published) -> str:
    """What to do about a page that is not as this version writes it."""
    wrote = export.record.software.get("dpllm")
    if wrote == dpllm.__version__:
        return WRITE_AGAIN
    return f"The card names dpllm {wrote}; this is {dpllm.__version__}, which has other words. Verify it with that version."


def files(export: Published) -> Iterator[Check]:
    """Names, hashes and contents of all files: the very ones that the block lists, each of a known name with known settings."""
    names, problems = regular_files(export.directory, strict=export.run is not None)
    strange = set(unknown(names))
    yield _hashes(export, names)
    for name in names:
        why = "does not belong in an export" if name in strange else ""
        if not why and export.hashes.get(name) != _UNLISTED:
            why = _content(export.directory / name, export)
        problems += [f"{name} {why}"] if why else []
    if problems:
        detail = (
            f"{listed(problems)}. An unknown file may hold private data or run code: restore it, or delete it from export/, "
            "and write the card again."
        )
        yield failed("kinds of files", detail)
    else:
        yield verified(
            "kinds of files",
            f"{len(names)} files of known names; no unknown setting, no code elsewhere, no tensor of the optimizer.",
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


def _hashes(export: Published, names: list[str]) -> Check:
    stated = export.record.files
    for name in names:
        if name not in UNHASHED:
            export.hashes[name] = _sha256(export.directory / name) if name in stated else _UNLISTED
    unread = {name for name, digest in export.hashes.items() if digest == _UNREAD}
    differing = {
        "changed": {name for name in stated.keys() & export.hashes.keys() if stated[name] != export.hashes[name]}
        - unread,
        "larger than they can be, and not read": unread,
        "missing": stated.keys() - export.hashes.keys(),
        "not listed, and not read": export.hashes.keys() - stated.keys(),
    }
    problems = [f"{what}: {listed(sorted(which))}" for what, which in differing.items() if which]
    weights = sorted(name for name in export.hashes if name.endswith(".safetensors"))
    released = "adapter weights" if "adapter_model.safetensors" in export.hashes else "model weights"
    if not weights:
        problems.append("there are no weights")
    elif not export.record.merged_from and export.record.released != released:
        problems.append(f"the released files are {released}")
    if problems:
        return failed(
            "files",
            f"not those of the card: {'; '.join(problems)}. Restore them, or write the card again: dpllm card RUN.",
        )
    return verified("files", f"SHA-256 of {len(stated)} files, with {listed(weights)}; none missing, none extra.")


def _sha256(path: Path) -> str:
    """Of a file that is no larger than its name, or its own header, allows; else ``_UNREAD``."""
    try:
        if path.suffix == ".safetensors" and path.lstat().st_size > MOST_BYTES:
            _tensors(path)
        with regular(path):
            return sha256(path, follow=False)
    except Wrong:
        return _UNREAD


def _content(path: Path, export: Published) -> str:
    """What is wrong with a file of a known name; empty where nothing."""
    try:
        if path.suffix == ".safetensors":
            state = any(map(_TRAINING_STATE.search, _tensors(path)))
            return "holds tensors of the optimizer or of the generator" if state else ""
        if path.name == "tokenizer.json":  # has no settings, and too many values to be parsed
            check_shape(read_bytes(path), MOST_BYTES // BYTES_OF_VALUE)
        elif path.suffix == ".json":
            settings = read_object(path)
            kept = publishable(path.name, settings)
            if more := sorted(key for key in settings if key not in kept or kept[key] != settings[key]):
                return f"has an unknown setting ({listed(more)})"
            base, other = export.record.base_model, (settings.get("base_model_name_or_path"), settings.get("revision"))
            if path.name == "adapter_config.json" and other not in ((base.name, None), (base.name, base.revision)):
                return f"does not name {base.name}, the base model in privacy.json"
        elif path.suffix in (".png", ".parquet"):
            read_bytes(path)
        else:
            read_text(path)
    except ValueError:
        return "is not JSON"
    except Wrong as error:
        return str(error).removeprefix(f"{path.name} ").partition(". ")[0]
    return ""


def _tensors(path: Path) -> dict[str, Any]:
    """What the header of a safetensors file says of each tensor; they lie one behind the other, to the last byte of the file."""
    with regular(path) as file:
        size, length = os.fstat(file.fileno()).st_size, int.from_bytes(file.read(8), "little")
        text = file.read(min(length, MOST_HEADER))
    try:
        tensors, end = parsed(text, MOST_HEADER // BYTES_OF_VALUE), 0
        if tensors.pop("__metadata__", _FORMAT) != _FORMAT:
            raise ValueError("a text that may say anything")
        parts = sorted((*one["data_offsets"], one["shape"], one["dtype"]) for one in tensors.values())
        for begin, then, shape, kind in parts:
            whole = {type(number) for number in (begin, then, *shape)} == {int} and min(shape, default=0) >= 0
            if not whole or len(shape) > MOST_AXES or (begin, then - begin) != (end, _BYTES[kind] * math.prod(shape)):
                raise ValueError("other bytes than it has, a gap, or one over another")
            end = then
    except (ValueError, TypeError, LookupError, AttributeError):
        raise Wrong(f"{path.name} is not a safetensors file. {WRITE_AGAIN}") from None
    if size != 8 + length + end:
        raise Wrong(f"{path.name} is shorter or longer than its header says. {WRITE_AGAIN}")
    return tensors
