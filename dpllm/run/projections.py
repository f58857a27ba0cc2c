"""What every step released along the gradient canaries: one private file of numbers, step by step.

Comes in: one number for each canary and step, in units of C. Goes out: the same after the run, without the steps that a crash
took. Knows no coins.

Shape suffixes: T steps, M canaries.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dpllm.errors import ConfigError

Floats = NDArray[np.float32]


class Projections:
    """private/gradient_canaries.npy, float32 of shape (T, M); nan where no step was taken."""

    def __init__(self, path: Path, num_steps: int, width: int) -> None:
        """Begins the file, or goes on with that of a run that is resumed."""
        before = _read(path)
        self._kept_TM: Floats = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=(num_steps, width))
        self._kept_TM[:] = np.nan
        if before is not None and before.shape[1] == width:
            self._kept_TM[: len(before)] = before[:num_steps]

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
