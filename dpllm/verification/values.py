"""What is verified, and what came of it; files of strangers, read with limits.

Comes in: a path. Goes out: JSON as the standard has it and text of bounded length, or one sentence about what is wrong; lines of
"verified", "asserted" or "failed". Executes nothing, follows no link, and knows no check.
"""

from __future__ import annotations

import json
import math
import os
import resource
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, Generic, Literal, NamedTuple

from dpllm.card.artifact import Artifact, Promise, Stated
from dpllm.errors import DpllmError
from dpllm.files import check_shape
from dpllm.records import Json, NotAStatement
from dpllm.run.directory import RunDir

Status = Literal["verified", "asserted", "failed"]

TOLERANCE = 1e-9
"""Relative; between the same computation on two machines."""
LONGEST = 400
_MOST_VALUE = 40
MOST_BYTES = 64 * 2**20
MOST = {"README.md": 2**22, "config.yaml": 2**16, "tokenizer.json": MOST_BYTES, "tokenizer_config.json": 2**23}
MOST |= {"model.safetensors.index.json": 2**24, "canaries.json": 2**24, "audits.jsonl": 2**24, ".png": 2**24}
MOST |= {"train.jsonl": 2**32, ".safetensors": 2**43, ".parquet": MOST_BYTES, ".npy": MOST_BYTES, ".csv": MOST_BYTES}
"""Bytes of a file of that name, or else of that kind: some times what the largest one has that is known."""
MOST_OTHER = 2**20
BYTES_OF_VALUE = 16
"""Of JSON: a file holds at most one value for so many of the bytes that it may have."""
MOST_MEMORY = 2**30
WRITE_AGAIN = "Write the card again: dpllm card RUN."
_RESTORE = "Take the file from where the model was published, or write the card again: dpllm card RUN."


class Wrong(Exception):
    """Something that contradicts what is stated, as one sentence or more: what, and what to do."""


@dataclass(frozen=True)
class Check:
    """One line: what was looked at, and whether it holds, is only said, or does not hold."""

    name: str
    status: Status
    detail: str


@dataclass(frozen=True)
class Verification:
    """All checks of one published run."""

    path: str
    checks: tuple[Check, ...]

    @property
    def failed(self) -> bool:
        """Whether any check failed."""
        return any(check.status == "failed" for check in self.checks)

    def __repr__(self) -> str:
        counts = self.to_json()["counts"]
        return f"Verification of {self.path}: " + ", ".join(f"{number} {status}" for status, number in counts.items())

    def to_json(self) -> Json:
        """As ``dpllm verify --json`` prints it."""
        checks = [asdict(check) for check in self.checks]
        counts = {status: sum(c.status == status for c in self.checks) for status in ("verified", "asserted", "failed")}
        return {"path": self.path, "failed": self.failed, "counts": counts, "checks": checks}


@dataclass(frozen=True)
class Published(Generic[Stated]):
    """One release as a reader finds it.

    ``record`` keeps to its schema, and ``card`` is README.md. ``run`` is the run directory that it lies in, where it does, and
    ``ledger`` where to look for the ledger, if not where the run says. The check of the files fills ``hashes``, SHA-256 by path.
    """

    artifact: Artifact[Stated]
    directory: Path
    record: Stated
    card: str = ""
    run: RunDir | None = None
    ledger: str | None = None
    hashes: dict[str, str] = field(default_factory=dict)

    @cached_property
    def promise(self) -> Promise:
        """What is promised."""
        return self.artifact.promise(self.record)

    @property
    def again(self) -> str:
        """What to do about what is wrong."""
        return self.artifact.again

    @property
    def source(self) -> str:
        """The files that all else follows from, in words."""
        return " and ".join(self.artifact.sources)


def read_facts(artifact: Artifact[Stated], directory: Path) -> Stated:
    """The facts of a release; Wrong where a file cannot be read, is of another version, or does not follow its schema."""
    return facts_of(artifact, [read_object(directory / name) for name in artifact.sources])


def facts_of(artifact: Artifact[Stated], values: Sequence[Json]) -> Stated:
    """The same of the JSON of its sources."""
    name, version = artifact.sources[0], values[0].get("schema_version")
    if json.dumps(version) != json.dumps(artifact.version):  # 1.0 and true are other values
        raise Wrong(
            f"{name} has schema version {version!r}, and this version of dpllm reads {artifact.version} alone. Verify it with "
            "the version that wrote it."
        )
    try:
        return artifact.read(*values)
    except NotAStatement as error:
        problems = "; ".join(error.problems[:3])
        raise Wrong(f"{name} does not follow its schema: {problems}. {artifact.again}") from None
    except Exception as error:  # whatever a stranger's numbers make a computation do
        raise Wrong(f"{name} cannot be computed with ({type(error).__name__}). {artifact.again}") from None


def hold(rules: Mapping[str, bool], advice: str) -> None:
    """Refuses, with ``Wrong``, what is wrong where a rule does not hold; ``again``: what to do about it."""
    if wrong := [problem for problem, holds in rules.items() if not holds]:
        raise Wrong(f"{listed(wrong)}. {advice}")


def guarded(name: str, check: Callable[..., Iterator[Check]], *arguments: object) -> Iterator[Check]:
    """The lines of one check; one more where it finds something wrong, or where the files are not as dpllm writes them."""
    try:
        yield from check(*arguments)
    except (Wrong, DpllmError, OSError) as error:
        yield failed(name, str(error))
    except Exception as error:  # whatever a stranger's file makes a computation do
        kind = type(error).__name__
        yield failed(name, f"the files are not as dpllm writes them ({kind}), so this could not be checked. {_RESTORE}")


def tried(name: str, step: Callable[..., Check], *arguments: object) -> Check:
    """The same of a check of one line."""
    return next(guarded(name, lambda: iter([step(*arguments)])))


def verified(name: str, detail: str) -> Check:
    """It was computed again, and agrees."""
    return Check(name, "verified", plain(detail))


def asserted(name: str, detail: str) -> Check:
    """Nobody can compute it from what is published."""
    return Check(name, "asserted", plain(detail))


def failed(name: str, detail: str) -> Check:
    """It contradicts what is stated."""
    return Check(name, "failed", plain(detail))


def plain(text: object) -> str:
    """One line without control characters, cut where it is long: what is shown may come from a stranger's file."""
    line = " ".join(str(text).split())
    line = "".join(sign if sign.isprintable() else "?" for sign in line)
    return line if len(line) <= LONGEST else f"{line[: LONGEST - 4]} ..."


def close(stated: object, computed: object, tolerance: float = TOLERANCE) -> bool:
    """Whether two numbers are equal up to rounding; True and 1 are not, None equals None only."""
    for value in (stated, computed):
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            return stated is None and computed is None
    return math.isclose(float(stated), float(computed), rel_tol=tolerance, abs_tol=min(tolerance, 1e-12))  # type: ignore[arg-type]


class Difference(NamedTuple):
    """A field of which two JSON values say different things; ``ABSENT`` where one says nothing."""

    field: str
    stated: object
    found: object

    def __str__(self) -> str:
        """The field, with both values where they are short."""
        return f"{self.field} (stated {_short(self.stated)}, computed {_short(self.found)})"


ABSENT = object()


def _short(value: object) -> str:
    text = "nothing" if value is ABSENT else json.dumps(value, default=str)
    return text if len(text) <= _MOST_VALUE else f"{text[:_MOST_VALUE]}..."


def differences(
    stated: Any, computed: Any, path: str = "", tolerance: float | Callable[[str], float] = TOLERANCE
) -> Iterator[Difference]:
    """Where two JSON values differ by more than rounding, of which counts have none; 1, 1.0, true and "1" all differ.

    ``tolerance`` is relative; a function gives that of a field.
    """
    if isinstance(stated, dict) and isinstance(computed, dict):
        for key in sorted(stated.keys() | computed.keys()):
            inner_path = f"{path}.{key}" if path else str(key)
            yield from differences(stated.get(key, ABSENT), computed.get(key, ABSENT), inner_path, tolerance)
    elif isinstance(stated, list | tuple) and isinstance(computed, list | tuple) and len(stated) == len(computed):
        for number, pair in enumerate(zip(stated, computed, strict=True)):
            yield from differences(*pair, f"{path}[{number}]", tolerance)
    elif type(stated) is not type(computed):
        yield Difference(path, stated, computed)
    elif stated != computed:
        relative = tolerance(path) if callable(tolerance) else tolerance
        if not (isinstance(stated, float) and close(stated, computed, relative)):
            yield Difference(path, stated, computed)


def listed(names: Sequence[object], limit: int = 4) -> str:
    """Some names, and how many more there are."""
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(map(str, names[:limit])) + rest


@contextmanager
def bounded_memory(extra: int | None = None) -> Iterator[None]:
    """Lets this process take ``more`` than it holds (None: ``MOST_MEMORY``), where Linux says what that is: stated sizes may lie.

    An allocation beyond it is an error, and so a failed check.
    """
    usage = Path("/proc/self/statm")
    if not usage.exists():
        yield
        return
    previous = resource.getrlimit(resource.RLIMIT_DATA)
    limit = int(usage.read_text().split()[5]) * resource.getpagesize() + (extra or MOST_MEMORY)
    try:
        lowest = min([limit, *(bound for bound in previous if bound != resource.RLIM_INFINITY)])
        resource.setrlimit(resource.RLIMIT_DATA, (lowest, previous[1]))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, previous)


@contextmanager
def regular(path: Path, max_bytes: int | None = None) -> Iterator[BinaryIO]:
    """A regular file, open for reading, of at most so many bytes, or of those that ``MOST`` allows for its name.

    Raises:
        Wrong: It is missing, a link, no file, too large, mostly a hole, or not readable.
    """
    try:
        # A link could lead anywhere, and opening a pipe would wait for ever.
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(handle, "rb") as file:
            status = os.fstat(handle)
            check_regular(status, path, most_bytes(path) if max_bytes is None else max_bytes)
            if status.st_size > MOST_BYTES and 2 * 512 * status.st_blocks < status.st_size and _has_hole(handle):
                raise Wrong(f"{path.name} has {status.st_size:,} bytes, most of which were never written. {_RESTORE}")
            yield file
    except FileNotFoundError:
        raise Wrong(f"{path.name} is missing. {_RESTORE}") from None
    except OSError as error:
        raise Wrong(f"{path.name} cannot be read ({error.strerror}). {_RESTORE}") from None


def most_bytes(path: Path) -> int:
    """What ``MOST`` allows for a file of that name."""
    return MOST.get(path.name, MOST.get(path.suffix, MOST_OTHER))


def _has_hole(handle: int) -> bool:
    """Whether a part of a file is on no disk, where the file system tells: terabytes of zeros cost their sender nothing."""
    with suppress(OSError):
        hole, end = os.lseek(handle, 0, os.SEEK_HOLE), os.lseek(handle, 0, os.SEEK_END)
        os.lseek(handle, 0, os.SEEK_SET)
        return hole < end
    return False


def check_regular(status: os.stat_result, path: Path, max_bytes: int) -> None:
    """Refuses what is no regular file of bounded size."""
    if not stat.S_ISREG(status.st_mode):
        raise Wrong(f"{path.name} is not a regular file. {_RESTORE}")
    if status.st_size > max_bytes:
        raise Wrong(f"{path.name} has {status.st_size:,} bytes, more than {max_bytes:,}. {_RESTORE}")


def read_bytes(path: Path, max_bytes: int | None = None) -> bytes:
    """What such a file holds."""
    with regular(path, max_bytes) as file:
        return file.read()


def read_text(path: Path) -> str:
    """A file of UTF-8; ``Wrong`` where it is none, see ``regular``."""
    try:
        return read_bytes(path).decode("utf-8")
    except UnicodeDecodeError:
        raise Wrong(f"{path.name} is not UTF-8 text. {_RESTORE}") from None


def fit(*paths: Path) -> None:
    """Refuses files of a run that code which trusts its files will read: a pipe, a link, one that is too large or no JSON."""
    for path in filter(os.path.lexists, paths):
        with regular(path):
            pass
        if path.suffix == ".json":
            read_object(path)


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object: no key twice, no NaN, no number beyond a float, no more values or levels than such a file needs.

    Raises:
        Wrong: It is none.
    """
    try:
        return parsed(read_bytes(path), most_bytes(path) // BYTES_OF_VALUE)
    except ValueError as error:
        reason = error.args[0] if error.args and not isinstance(error, json.JSONDecodeError) else "not valid"
        raise Wrong(f"{path.name} is not a JSON object that dpllm writes ({reason}). {_RESTORE}") from None


def parsed(content: bytes, max_values: int) -> dict[str, Any]:
    """A JSON object of at most ``most`` values, of whose size nothing was parsed before; a ValueError where it is none."""
    check_shape(content, max_values)
    value = json.loads(
        content.decode("utf-8"), parse_constant=_finite, parse_float=_finite, object_pairs_hook=_no_key_twice
    )
    return dict(value)


def _finite(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"it holds {text[:20]}")
    return value


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a key stands twice")
    return value
