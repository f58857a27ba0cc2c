"""What a run says of its machine: the most memory that one run held, and no earlier one."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

from dpllm.model import environment

MIB = 2**20


@pytest.mark.skipif(torch.cuda.is_available(), reason="memory of the GPU is counted where there is one")
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux begins a new count within a process")
def test_the_peak_is_that_of_this_run() -> None:
    environment.reset_peak_memory()
    before = environment.peak_memory()
    block = np.ones(160 * MIB, dtype=np.uint8)
    large = environment.peak_memory()
    del block
    held = environment.peak_memory()  # not compared exactly: Linux adds up each thread's pages in batches
    environment.reset_peak_memory()
    after = environment.peak_memory()
    assert before is not None
    assert large is not None
    assert after is not None
    assert before % MIB == large % MIB == 0
    assert held is not None
    assert abs(held - large) <= 4 * MIB
    assert large - before > 140 * MIB
    assert large - after > 140 * MIB
