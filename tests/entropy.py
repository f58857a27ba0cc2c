"""Keys, coins and inferred texts of whole runs from the tests' seed, where users have the operating system's entropy.

With fresh ones a run in some hundreds tells another story than its tests expect: "every coin said out", or a noise that its
own interval of 95% misses, or a text that does not end.
"""

from __future__ import annotations

import contextlib
import os
import random
import secrets
from collections.abc import Iterator
from types import SimpleNamespace
from unittest import mock

from dpllm.canaries import canaries
from dpllm.comparison import choose
from dpllm.privacy import noise
from dpllm.releases import inference

SEED = "DPLLM_TEST_SEED"
"""The environment variable that carries ``--seed`` to processes of their own."""


@contextlib.contextmanager
def from_seed(*words: object) -> Iterator[None]:
    """Canaries, the keys of batches and noise, and inferred texts, that follow from the seed and ``words``."""
    draws = random.Random(repr((os.environ.get(SEED, "0"), *words)))
    drawing = {"randbits": draws.getrandbits, "randbelow": draws.randrange, "SystemRandom": lambda: draws}
    ours = SimpleNamespace(**drawing, token_hex=secrets.token_hex)
    with contextlib.ExitStack() as patches:
        for module in (noise, canaries, inference, choose):
            patches.enter_context(mock.patch.object(module, "secrets", ours))
        yield
