"""What every step released along the gradient canaries: one private file of numbers, step by step.

Comes in: one number for each canary and step, in units of C. Goes out: the same after the run, without the steps that a crash
took. Knows no coins.

Shape suffixes: T steps, M canaries.
"""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dpllm.errors import ConfigError
from dpllm.files import write_whole

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
