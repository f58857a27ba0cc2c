"""Files of a run: their paths, atomically written JSON, the names allowed in export/, and hashes.

Comes in: a directory, names, values. Goes out: paths, JSON values, path -> SHA-256; unknown names.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpllm.errors import ConfigError

CARD, BLOCK, SIGNATURE = "README.md", "privacy.json", "model.sig"
SETTINGS = ("adapter_config.json", "config.json")
UNHASHED = frozenset({CARD, BLOCK, SIGNATURE})
"""Files of export/ whose hashes privacy.json cannot hold: the card, privacy.json itself and the signature over all files."""

_KNOWN = re.compile(
    r"README\.md|model\.sig|privacy\.(json|svg)|"
    r"audit/(audit\.json|scores\.csv|(tokens|gradient)\.parquet|(roc|exposure|bound|extraction)\.png)|"
    r"adapter_config\.json|adapter_model\.safetensors|"
    r"(generation_)?config\.json|model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json|"
    r"tokenizer(_config)?\.json|special_tokens_map\.json|chat_template\.jinja|additional_chat_templates/[\w-]+\.jinja"
)
"""Every file that dpllm, peft or transformers writes into export/."""
_WORDS = {
    "adapter_config.json": re.compile(
        r"peft_type|peft_version|task_type|base_model_name_or_path|revision|bias|init_lora_weights|megatron_core|"
        r"(alpha|rank|layers)_pattern|target_(modules|parameters)|modules_to_save|exclude_modules|trainable_token_indices"
    ),
    "tokenizer_config.json": re.compile(
        r"\w*_tokens?|added_tokens_decoder|chat_template|tokenizer_class|processor_class|backend|model_input_names|errors|"
        r"(padding|truncation)_side|truncation_strategy|transformers_version"
    ),
}
"""Keys of these files that may hold text. Other keys, which new versions may add, may hold a number, a flag or nothing, since
none of these can name code."""
_NAMES_CODE = frozenset({"auto_map", "custom_pipelines"})
_ELSEWHERE = re.compile(r"[/\\]|--.*\.")


def of_model(names: Iterable[str]) -> list[str]:
    """The files in export/ that determine what the model computes: its weights, and the settings that apply them."""
    return sorted(name for name in names if name.endswith(".safetensors") or name in SETTINGS)


def unknown(names: Iterable[str]) -> list[str]:
    """The paths in export/ that dpllm never writes, and therefore never publishes."""
    return [name for name in names if not _KNOWN.fullmatch(name)]


def publishable(name: str, settings: dict[str, Any]) -> dict[str, Any]:
    """The settings of the file ``name`` without those that could make a library load code or files from elsewhere.

    The keys of config.json and generation_config.json depend on the architecture, so no list of them is complete: their values
    are checked instead. Code and kernels are named as "repository--module.Class", "owner/repository" or by a path.
    """
    if name in ("config.json", "generation_config.json"):
        return dict(_without_code(settings))
    allowed = _WORDS.get(name)
    return {key: value for key, value in settings.items() if not allowed or allowed.fullmatch(key) or _plain(value)}


def keep_publishable(directory: Path) -> None:
    """Removes from the settings in export/ what ``publishable`` omits; it may come from the base model."""
    for name in ("config.json", "generation_config.json", "tokenizer_config.json"):
        path = directory / name
        settings = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        if (allowed := publishable(name, settings)) != settings:
            path.write_text(json.dumps(allowed, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _without_code(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_code(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    return {
        key: _without_code(inner)
        for key, inner in value.items()
        if key not in _NAMES_CODE and not any(map(_elsewhere, inner if isinstance(inner, list) else [inner]))
    }


def _elsewhere(value: Any) -> bool:
    return isinstance(value, str) and _ELSEWHERE.search(value) is not None


def _plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_plain, value))
    return not value or isinstance(value, int | float)


def hashes(directory: Path, without: Collection[str] = ()) -> dict[str, str]:
    """SHA-256 of every file below a directory, at any depth, except the paths in ``without``.

    Symbolic links to files are read; links to directories are not followed.

    Returns:
        Path below the directory, with forward slashes -> SHA-256 in hexadecimal; sorted by path.
    """
    paths = {path.relative_to(directory).as_posix(): path for path in directory.rglob("*") if path.is_file()}
    return {name: sha256(paths[name]) for name in sorted(paths) if name not in without}


def sha256(path: Path, *, follow: bool = True) -> str:
    """SHA-256 of a file, read in pieces; a symbolic link is an OSError unless ``follow``."""
    flags = os.O_RDONLY if follow else os.O_RDONLY | os.O_NOFOLLOW
    with open(os.open(path, flags), "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


SCHEMA_VERSION = 1
MOST_LEVELS = 60
"""Maximum nesting of objects and lists in JSON that dpllm reads from others."""
_PIECE = 2**20
_OF_JSON = b"[]{},:+-.0123456789eEtrufalsn \t\r\n"  # outside quotes
_NO_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))


def write_whole(path: Path, content: str | bytes, *, mode: int = 0o666) -> None:
    """Writes a file atomically: to the disk under a temporary name, then renamed. Creates its directory.

    ``mode``, less the umask, applies from the first byte; text is encoded as UTF-8.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def whole_directory(path: Path, *, mode: int = 0o777) -> Iterator[Path]:
    """Yields a new directory next to ``path``, which replaces ``path`` on success and is removed after an error."""
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    part.mkdir(mode, parents=True)
    try:
        yield part
        shutil.rmtree(path, ignore_errors=True)
        os.replace(part, path)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def write_json(path: Path, value: dict[str, Any], *, mode: int = 0o666) -> None:
    """Writes JSON atomically, with sorted keys and a schema version."""
    text = json.dumps({"schema_version": SCHEMA_VERSION, **value}, indent=2, sort_keys=True, allow_nan=False)
    write_whole(path, text + "\n", mode=mode)


@contextlib.contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Holds a lock that one process can hold at a time; ``path`` exists as long as it is held.

    Raises:
        BlockingIOError: Another process holds the lock, and ``wait`` is false.
        ConfigError: The file system does not support locks.
    """
    while True:
        with open(path, "w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise
            except OSError as error:
                raise ConfigError(
                    f"{path.parent}: its file system has no locks ({error.strerror}), so two commands could write there at "
                    "once. Name a directory on a local disk."
                ) from None
            try:
                still_there = path.stat().st_ino == os.fstat(file.fileno()).st_ino
            except FileNotFoundError:
                still_there = False
            if not still_there:  # the previous holder removed it
                continue
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return


@contextlib.contextmanager
def alone(place: Path, lock: Path, option: str = "--output") -> Iterator[None]:
    """Lets one process at a time write to ``place``, which the user set by ``option``; creates the directory of ``lock``.

    Raises:
        ConfigError: Another process is writing there, or ``place`` is not writable.
    """
    with contextlib.ExitStack() as locks:
        try:
            if not lock.parent.exists():
                lock.parent.mkdir(parents=True, exist_ok=True)
            locks.enter_context(locked(lock, wait=False))
        except BlockingIOError:
            raise ConfigError(
                f"{place}: another process writes there. Wait for it, or type another {option}."
            ) from None
        except OSError as error:
            raise ConfigError(f"{place}: cannot be written to ({error.strerror}). Type another {option}.") from None
        yield


def make_lockable(path: Path) -> None:
    """Creates an empty file that only its owner can read, unless the file exists.

    Raises:
        OSError: It cannot be created, or the file system has no locks; then no file remains.
    """
    # An existing file is not opened: closing it would release the locks that SQLite holds for other connections of this process.
    new = os.O_RDWR | os.O_CREAT | os.O_EXCL
    with contextlib.suppress(FileExistsError, BlockingIOError), open(os.open(path, new, 0o600), "rb+") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if not isinstance(error, BlockingIOError):
                path.unlink()
            raise


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """Yields a new directory for copies of private rows, which only the user can read; it is removed at the end.

    If a process was killed, the next call removes the directory that it left.

    Raises:
        ConfigError: Other users own or can read the parent directory.
    """
    parent = Path(tempfile.gettempdir()) / f"dpllm-{os.getuid()}"
    parent.mkdir(mode=0o700, exist_ok=True)
    owner = parent.lstat()
    if owner.st_uid != os.getuid() or not stat.S_ISDIR(owner.st_mode) or owner.st_mode & 0o077:
        raise ConfigError(
            f"{parent}: other users may read it, and it would hold copies of private rows. Remove it, or set TMPDIR to a "
            "directory of your own."
        )
    for lock in parent.glob("*.lock"):
        with contextlib.suppress(BlockingIOError), locked(lock, wait=False):
            shutil.rmtree(lock.with_suffix(""), ignore_errors=True)
    folder = parent / secrets.token_hex(8)
    with locked(folder.with_suffix(".lock")):
        folder.mkdir(mode=0o700)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def resolved(path: str | os.PathLike[str]) -> Path:
    """The target of a path; a link to itself is returned unchanged (``Path.resolve`` raises before Python 3.13)."""
    return Path(os.path.realpath(path))


def as_json(value: Any) -> Any:
    """The value after a round trip through JSON: tuples become lists, and numbers that are not finite become None."""
    return json.loads(json.dumps(value), parse_constant=lambda _: None)


def digest(value: dict[str, Any]) -> str:
    """SHA-256 of a JSON object, independent of its layout."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def check_shape(content: bytes, max_values: int) -> None:
    """Checks, before parsing, that text is a JSON object of at most ``max_values`` values and ``MOST_LEVELS`` levels.

    A byte of JSON may take a hundred bytes of memory, and a Rust library that runs out of memory aborts the process.

    Raises:
        ValueError: The text is not such an object.
    """
    text = content.replace(b"\\\\", b"").replace(b'\\"', b"")  # so every quote begins or ends a string
    brackets, values, in_quotes = b"", 0, 0
    for start in range(0, len(text), _PIECE):
        parts = text[start : start + _PIECE].split(b'"')
        outside = b"".join(parts[in_quotes::2])
        in_quotes ^= (len(parts) + 1) % 2
        brackets += outside.translate(None, _NO_BRACKETS)
        values += outside.count(b",")
        if values + len(brackets) // 2 > max_values:
            raise ValueError(f"it has more than {max_values:,} values")
        if outside.translate(None, _OF_JSON):
            raise ValueError("not valid")
    inner = brackets[1:-1]
    for _ in range(MOST_LEVELS):
        inner = inner.replace(b"[]", b"").replace(b"{}", b"")
    if in_quotes or brackets != b"{%b}" % brackets[1:-1]:
        raise ValueError("no object")
    if inner:
        raise ValueError(f"brackets that do not pair, or are nested deeper than {MOST_LEVELS} levels")


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object.

    Raises:
        ConfigError: The file is missing or damaged.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: missing; the run did not get that far, or this is not a run directory.") from None
    except (OSError, ValueError, RecursionError):
        raise ConfigError(f"{path}: is not readable as JSON; the file is damaged.") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: is not a JSON object; the file is damaged.")
    return value


class _Below:
    def __init__(self, path: str) -> None:
        self._path = path

    def __get__(self, run: RunPaths, owner: type[RunPaths]) -> Path:
        return run.root / self._path


@dataclass(frozen=True)
class RunPaths:
    """The paths of one run."""

    root: Path

    config = _Below("config.yaml")  # the resolved recipe
    plan = _Below("plan.json")  # the promise
    run = _Below("run.json")  # what happened
    describe = _Below("describe.json")  # released statistics of the data, if the card shows any
    registry = _Below("registry.yaml")  # an entry for the DP Deployments Registry, if one was written
    export = _Below("export")  # the only directory that is ever uploaded
    private = _Below("private")  # mode 0700; never leaves
    canaries = _Below("private/canaries.json")  # canary texts, coins and references: secret
    rows = _Below("private/rows.json")  # paths of the data, and digests of all rows that are not declared public
    groups = _Below("private/groups.json")  # for banded noise: their key, and the first step of each attempt
    projections = _Below("private/gradient_canaries.npy")  # projection of each step's release on each gradient canary
    along = _Below("private/weights_along_canaries.npy")  # projections of the initial and the final weights on them
    resume = _Below("private/resume")  # the checkpoints from which a resumed run starts: secret
    audits = _Below("private/audits.jsonl")  # one line for each audit: private
    metrics = _Below("private/metrics.jsonl")  # un-noised diagnostics, one JSON value a line: private
    references = _Below("private/references.npz")  # the reference's log-probability of each answer of a preference pair
    layers = _Below("private/layers.json")  # names of the layers that clipped_by_layer of metrics.jsonl counts
    summary = _Below("private/summary.json")  # held-out figures and cost: private
    key = _Below("private/manifest.key")  # of the digests in run.json of files in private/: secret

    def checkpoints(self) -> list[Path]:
        """Directories of complete checkpoints, such as step-00000040, latest first."""
        places = (path for path in self.resume.glob("step-*") if path.name[5:].isdecimal() and path.is_dir())
        return sorted(places, key=lambda path: int(path.name[5:]), reverse=True)

    def replaces(self, path: str | Path) -> bool:
        """Whether a path is in export/ or private/, which a new run in this directory replaces."""
        return any(resolved(path).is_relative_to(resolved(part)) for part in (self.export, self.private))

    def audit_dir(self, private_enabled: bool) -> Path:
        """The directory of an audit: export/audit for a DP run, private/audit for a run without DP."""
        return self.export / "audit" if private_enabled else self.private / "audit"
