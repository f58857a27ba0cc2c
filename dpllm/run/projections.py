"""What every step released along the gradient canaries: one private file of numbers, step by step.

Comes in: one number for each canary and step, in units of C. Goes out: the same after the run, without the steps that a crash
took. Knows no coins.

Shape suffixes: T steps, M canaries.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dpllm.errors import ConfigError
from dpllm.files import read_json, write_whole

Floats = NDArray[np.float32]


class Projections:
    """private/gradient_canaries.npy, float32 of shape (T, M); nan where no step was taken."""

    def __init__(self, path: Path, num_steps: int, width: int) -> None:
        """Begins the file, or goes on with that of a run that is resumed."""
        kept_TM = np.full((num_steps, width), np.nan, dtype=np.float32)
        before_TM = _read(path)
        if before_TM is not None and before_TM.shape[1] == width:
            rows = min(len(before_TM), num_steps)
            kept_TM[:rows] = before_TM[:rows]
        content = io.BytesIO()
        np.save(content, kept_TM)
        write_whole(path, content.getvalue())  # so that a crash leaves the rows of before
        self._kept_TM: Floats = np.lib.format.open_memmap(path, mode="r+")

    def write(self, step: int, proj_M: NDArray[np.float64]) -> None:
        """Keeps what step ``step``, counted from 1, released."""
        self._kept_TM[step - 1] = proj_M
        self._kept_TM.flush()  # type: ignore[attr-defined]  # a memmap


@dataclass(frozen=True, eq=False)
class BandedTurns:
    """Of banded noise: c_0, ..., c_{b-1}; each canary's group; the steps with which attempts began, at empty buffers."""

    coefficients: tuple[float, ...]
    group_M: NDArray[np.int64]
    starts: tuple[int, ...]


def read_turns(path: Path, coefficients: tuple[float, ...], width: int) -> BandedTurns | None:
    """Which turns ``width`` gradient canaries had, whose slots are the last; None without coefficients.

    Raises:
        ConfigError: Missing or damaged file.
    """
    if not coefficients:
        return None
    from dpllm.privacy.sampling import Turns, groups  # which imports torch

    try:
        kept = read_json(path)
        turns, slots = Turns(int(kept["bands"]), int(kept["key"], 16)), int(kept["slots"])
        group_M, starts = groups(turns, slots)[slots - width :], tuple(map(int, kept["starts"]))
    except (ConfigError, KeyError, TypeError, ValueError, OverflowError):
        raise ConfigError(
            f"{path}: is missing or damaged, and says when gradient canaries could join. Restore it, or train again."
        ) from None
    return BandedTurns(coefficients, group_M, starts)


def read_projections(path: Path) -> Floats:
    """Shape (T, M); nan where no step was taken, or where it was not written to its end.

    Raises:
        ConfigError: Missing or damaged file.
    """
    found_TM = _read(path)
    if found_TM is None:
        raise ConfigError(
            f"{path}: is missing or damaged, so the gradient canaries of the run cannot be audited. Restore it, or train again."
        )
    return found_TM


def _read(path: Path) -> Floats | None:
    try:
        found: Floats = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    return found if found.ndim == 2 and found.dtype == np.float32 else None
