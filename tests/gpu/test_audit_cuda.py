"""Scores and completions of an audit on CUDA are those of the CPU. Skipped where there is no such device."""

from __future__ import annotations

import random

import numpy as np
import pytest
import tiny
import torch

from dpllm.auditing.scores import score
from dpllm.privacy.schedule import TokenSequence

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
VOCABULARY = 5000


def sequences() -> tuple[list[TokenSequence], list[list[bool]]]:
    draw, made, masks = random.Random(0), [], []
    for _ in range(40):
        length = draw.randint(2, 60)
        made.append(TokenSequence(tuple(draw.randrange(VOCABULARY) for _ in range(length)), (True,) * length, length))
        masks.append([False] + [True] * (length - 1))
    return made, masks


@pytest.mark.parametrize("budget", [64, 100_000])
def test_scores_on_cuda_are_those_of_the_cpu(budget: int) -> None:
    model = tiny.model("llama", vocab_size=VOCABULARY).eval()
    expected = score(model, *sequences(), 500)
    found = score(model.to("cuda"), *sequences(), budget)
    for one, other in zip(found, expected, strict=True):
        assert one.log_prob == pytest.approx(other.log_prob, abs=1e-4)
        assert one.mean == pytest.approx(other.mean, abs=1e-4)
        assert one.variance == pytest.approx(other.variance, abs=1e-3)
        finite = np.isfinite(other.top_k_log_prob) & np.isfinite(one.top_k_log_prob)
        assert one.top_k_log_prob[finite] == pytest.approx(other.top_k_log_prob[finite], abs=1e-4)
    same = [(one.argmax == other.argmax).mean() for one, other in zip(found, expected, strict=True)]
    assert np.mean(same) > 0.999
