"""Releases to verify, the results of checks, and reading of untrusted files with limits.

Comes in: a path. Goes out: standard JSON and text of bounded length, or one sentence about what is wrong; lines of "verified",
"asserted" or "failed". Executes nothing, follows no link, and must not know any check.
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
"""Maximum bytes by file name, or else by suffix: several times the largest known file."""
MOST_OTHER = 2**20
BYTES_OF_VALUE = 16
"""A JSON file may hold one value for each 16 bytes of its maximum size."""
MOST_MEMORY = 2**30
WRITE_AGAIN = "Write the card again: dpllm card RUN."
_RESTORE = "Take the file from where the model was published, or write the card again: dpllm card RUN."


class Wrong(Exception):
    """Something contradicts the statement; the message says what, and what to do."""


@dataclass(frozen=True)
class Check:
    """One line: what was checked, and whether it is verified, only asserted, or failed."""

    name: str
    status: Status
    detail: str


@dataclass(frozen=True)
class Verification:
    """All checks of one release."""

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
        """The output of ``dpllm verify --json``."""
        checks = [asdict(check) for check in self.checks]
        counts = {status: sum(c.status == status for c in self.checks) for status in ("verified", "asserted", "failed")}
        return {"path": self.path, "failed": self.failed, "counts": counts, "checks": checks}


@dataclass(frozen=True)
class Published(Generic[Stated]):
    """One release as a reader finds it.

    ``record`` follows its schema, and ``card`` is README.md. ``run`` is the run directory that contains the release, if any, and
    ``ledger`` the location of the ledger, if it differs from the run's. The check of files fills ``hashes``, SHA-256 by path.
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
        """What the release promises."""
        return self.artifact.promise(self.record)

    @property
    def again(self) -> str:
        """What to do if a check fails."""
        return self.artifact.again

    @property
    def source(self) -> str:
        """Names of the files from which everything else follows."""
        return " and ".join(self.artifact.sources)


def read_facts(artifact: Artifact[Stated], directory: Path) -> Stated:
    """The facts of a release; raises Wrong if a file is unreadable, of another version, or does not follow its schema."""
    return facts_of(artifact, [read_object(directory / name) for name in artifact.sources])


def facts_of(artifact: Artifact[Stated], values: Sequence[Json]) -> Stated:
    """``read_facts`` for the JSON values of the sources."""
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
    """Raises ``Wrong`` with the problems whose rule does not hold; ``advice`` says what to do."""
    if wrong := [problem for problem, holds in rules.items() if not holds]:
        raise Wrong(f"{listed(wrong)}. {advice}")


def guarded(name: str, check: Callable[..., Iterator[Check]], *arguments: object) -> Iterator[Check]:
    """The lines of one check, with a failed line at the end if it raises an error."""
    try:
        yield from check(*arguments)
    except (Wrong, DpllmError, OSError) as error:
        yield failed(name, str(error))
    except Exception as error:  # whatever a stranger's file makes a computation do
        kind = type(error).__name__
        yield failed(name, f"the files are not as dpllm writes them ({kind}), so this could not be checked. {_RESTORE}")


def tried(name: str, step: Callable[..., Check], *arguments: object) -> Check:
    """``guarded`` for a check of one line."""
    return next(guarded(name, lambda: iter([step(*arguments)])))


def verified(name: str, detail: str) -> Check:
    """A line for a value that was recomputed and agrees."""
    return Check(name, "verified", plain(detail))


def asserted(name: str, detail: str) -> Check:
    """A line for a value that cannot be computed from the published files."""
    return Check(name, "asserted", plain(detail))


def failed(name: str, detail: str) -> Check:
    """A line for a value that contradicts the statement."""
    return Check(name, "failed", plain(detail))


def plain(text: object) -> str:
    """One line of at most ``LONGEST`` printable characters: the text may come from an untrusted file."""
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
    """A field in which two JSON values differ; ``ABSENT`` if one of them lacks it."""

    field: str
    stated: object
    found: object

    def __str__(self) -> str:
        """The field, with both values, shortened."""
        return f"{self.field} (stated {_short(self.stated)}, computed {_short(self.found)})"


ABSENT = object()


def _short(value: object) -> str:
    text = "nothing" if value is ABSENT else json.dumps(value, default=str)
    return text if len(text) <= _MOST_VALUE else f"{text[:_MOST_VALUE]}..."


def differences(
    stated: Any, computed: Any, path: str = "", tolerance: float | Callable[[str], float] = TOLERANCE
) -> Iterator[Difference]:
    """Fields in which two JSON values differ by more than rounding (integers: at all); 1, 1.0, true and "1" all differ.

    ``tolerance`` is relative, and may be a function of the field's name.
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
    """The first ``limit`` names, and the number of the others."""
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(map(str, names[:limit])) + rest


@contextmanager
def bounded_memory(extra: int | None = None) -> Iterator[None]:
    """Limits further memory of this process to ``extra`` bytes (None: ``MOST_MEMORY``) on Linux, as stated sizes may be false.

    A larger allocation raises an error, and so gives a failed check.
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
    """Opens a regular file for reading, of at most ``max_bytes``; None: what ``MOST`` allows for its name.

    Raises:
        Wrong: It is missing, a link, not a regular file, too large, mostly a hole, or not readable.
    """
    try:
        # A link could lead anywhere, and opening a pipe would block forever.
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
    """Maximum size of a file of that name."""
    return MOST.get(path.name, MOST.get(path.suffix, MOST_OTHER))


def _has_hole(handle: int) -> bool:
    """Whether the file system reports a hole in a file: terabytes of zeros cost their sender nothing."""
    with suppress(OSError):
        hole, end = os.lseek(handle, 0, os.SEEK_HOLE), os.lseek(handle, 0, os.SEEK_END)
        os.lseek(handle, 0, os.SEEK_SET)
        return hole < end
    return False


def check_regular(status: os.stat_result, path: Path, max_bytes: int) -> None:
    """Refuses anything that is not a regular file of at most ``max_bytes``."""
    if not stat.S_ISREG(status.st_mode):
        raise Wrong(f"{path.name} is not a regular file. {_RESTORE}")
    if status.st_size > max_bytes:
        raise Wrong(f"{path.name} has {status.st_size:,} bytes, more than {max_bytes:,}. {_RESTORE}")


def read_bytes(path: Path, max_bytes: int | None = None) -> bytes:
    """The content of a file that ``regular`` accepts."""
    with regular(path, max_bytes) as file:
        return file.read()


def read_text(path: Path) -> str:
    """The text of a UTF-8 file; raises ``Wrong`` if it is not one, see ``regular``."""
    try:
        return read_bytes(path).decode("utf-8")
    except UnicodeDecodeError:
        raise Wrong(f"{path.name} is not UTF-8 text. {_RESTORE}") from None


def fit(*paths: Path) -> None:
    """Refuses unsafe files before code that trusts a run's files reads them: pipes, links, too large ones, invalid JSON."""
    for path in filter(os.path.lexists, paths):
        with regular(path):
            pass
        if path.suffix == ".json":
            read_object(path)


def read_object(path: Path) -> dict[str, Any]:
    """Reads a JSON object: no key twice, no NaN, no number beyond a float, a bounded number of values and levels.

    Raises:
        Wrong: The file is not such an object.
    """
    try:
        return parsed(read_bytes(path), most_bytes(path) // BYTES_OF_VALUE)
    except ValueError as error:
        reason = error.args[0] if error.args and not isinstance(error, json.JSONDecodeError) else "not valid"
        raise Wrong(f"{path.name} is not a JSON object that dpllm writes ({reason}). {_RESTORE}") from None


def parsed(content: bytes, max_values: int) -> dict[str, Any]:
    """A JSON object of at most ``max_values`` values, counted before parsing; raises ValueError if it is not one."""
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
