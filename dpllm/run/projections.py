"""What every step released along the gradient canaries, how far the weights moved, and the groups of banded noise.

Comes in: one number for each canary and step, in units of C; the weights' before and after; the key of the groups. Goes out:
private files with these, without steps lost in a crash. Must not know the coins.

Shape suffixes: T steps, M canaries.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpllm.errors import ConfigError
from dpllm.files import read_json, write_json, write_whole
from dpllm.privacy.sampling import CyclicSchedule, groups


class Projections:
    """private/gradient_canaries.npy, float32 of shape (T, M); nan where no step was taken."""

    def __init__(self, path: Path, num_steps: int, width: int) -> None:
        """Creates the file, or continues that of a resumed run."""
        if not path.exists():
            _save(path, np.full((num_steps, width), np.nan, dtype=np.float32))
        _load(path, np.float32, num_steps, width)  # a damaged file is refused before a step is charged
        self._kept_TM = np.lib.format.open_memmap(path, mode="r+")

    def write(self, step: int, proj_M: NDArray[np.float64]) -> None:
        """Stores what step ``step``, counted from 1, released."""
        self._kept_TM[step - 1] = proj_M
        self._kept_TM.flush()


def read_projections(path: Path) -> NDArray[np.float32]:
    """Shape (T, M); nan where a step was not taken or not fully written. A missing or damaged file is a ConfigError."""
    return _load(path, np.float32)


def keep_weights(path: Path, first_M: NDArray[np.float64], last_M: NDArray[np.float64] | None = None) -> None:
    """private/weights_along_canaries.npy, float64 of shape (2, M): the weights along each canary, before and after the run."""
    _save(path, np.stack([first_M, np.full_like(first_M, np.nan) if last_M is None else last_M]))


def read_weights(path: Path) -> NDArray[np.float64]:
    """Shape (2, M); the second row is nan before the end of the run. A missing or damaged file is a ConfigError."""
    kept_2M = _load(path, np.float64, 2)
    if not np.isfinite(kept_2M[0]).all():
        raise _damaged(path)
    return kept_2M


def _save(path: Path, values: NDArray[Any]) -> None:
    content = io.BytesIO()
    np.save(content, values)
    write_whole(path, content.getvalue())


def _load(path: Path, dtype: type[np.floating[Any]], rows: int | None = None, width: int | None = None) -> NDArray[Any]:
    """A table of numbers, with the given number of rows and columns if known."""
    with contextlib.suppress(OSError, ValueError, EOFError):
        values = np.load(path, allow_pickle=False)
        table = isinstance(values, np.ndarray) and values.ndim == 2 and values.dtype == dtype
        if table and values.shape == (rows or len(values), width or values.shape[1]):
            return values  # type: ignore[no-any-return]  # always an array
    raise _damaged(path)


def _damaged(path: Path) -> ConfigError:
    return ConfigError(
        f"{path}: is missing or damaged, so the gradient canaries of the run cannot be audited. Restore it, or train again."
    )


@dataclass(frozen=True, eq=False)
class BandedTurns:
    """Banded noise: c_0, ..., c_{b-1}; each canary's group; the first step of each attempt, when buffers were empty."""

    coefficients: tuple[float, ...]
    group_M: NDArray[np.int64]
    starts: tuple[int, ...]


def read_turns(path: Path, coefficients: tuple[float, ...], width: int) -> BandedTurns | None:
    """The turns of the ``width`` gradient canaries, whose slots are last; None without coefficients. Errors: ``read_groups``."""
    if not coefficients:
        return None
    kept_groups = read_groups(path)
    group_N = groups(CyclicSchedule(kept_groups.bands, kept_groups.key), kept_groups.slots)
    return BandedTurns(coefficients, group_N[kept_groups.slots - width :], kept_groups.starts)


@dataclass(frozen=True)
class KeptGroups:
    """private/groups.json: the groups of banded noise, for a resumed run and the audit."""

    bands: int  # b
    key: int  # secret; determines each slot's group
    slots: int  # number of slots
    starts: tuple[int, ...]  # first step of each attempt

    @property
    def digest(self) -> str:
        """Digest of what stays the same in all attempts; every checkpoint stores it."""
        return hashlib.sha256(f"{self.bands} {self.key:x} {self.slots}".encode()).hexdigest()

    def write(self, path: Path) -> None:
        """Writes the file, readable only by its owner."""
        write_json(path, {**vars(self), "key": f"{self.key:x}", "starts": list(self.starts)}, mode=0o600)


def read_groups(path: Path) -> KeptGroups:
    """What ``KeptGroups.write`` wrote; a missing or damaged file is a ConfigError."""
    try:
        stored = read_json(path)
        key, bands, slots, starts = int(stored["key"], 16), stored["bands"], stored["slots"], list(stored["starts"])
        numbers = all(type(number) is int and number >= 0 for number in (bands, slots, *starts))
        if numbers and bands > 1 and 0 <= key < 2**256:
            return KeptGroups(bands, key, slots, tuple(starts))
    except (ConfigError, KeyError, TypeError, ValueError):
        pass
    raise ConfigError(
        f"{path}: is missing or damaged, so nobody knows which units could take part in which step. Restore it, or train again."
    )
