"""What the processes of a run tell each other, as far as one can see it; several are in tests/distributed."""

import threading
import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dpllm.model import processes
from dpllm.model.processes import ahead

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int8]


def tensors(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(-9, 9, (5, 3), generator=generator).to(dtype) for dtype in DTYPES]


@settings(max_examples=80, deadline=None, derandomize=True)
@given(seed=st.integers(0, 99), which=st.integers(0, 3), place=st.integers(0, 14), bit=st.integers(0, 7))
def test_a_fingerprint_changes_with_every_bit(seed: int, which: int, place: int, bit: int) -> None:
    some = tensors(seed)
    before = processes.fingerprint(some)
    assert before == processes.fingerprint([tensor.clone() for tensor in some])
    some[which].view(-1).view(torch.uint8).view(15, -1)[place, -1] ^= 1 << bit
    assert processes.fingerprint(some) != before


def test_a_fingerprint_changes_with_the_order_and_over_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = torch.arange(6.0), torch.arange(6.0).flip(0)
    assert processes.fingerprint([first, second]) != processes.fingerprint([second, first])
    assert processes.fingerprint([first]) != processes.fingerprint([second])
    whole = processes.fingerprint([first, second])
    monkeypatch.setattr(processes, "PIECE", 4)
    assert processes.fingerprint([first, second]) == whole


def test_one_process_shares_compares_and_adds_nothing() -> None:
    value = object()
    assert processes.shared(value) is value
    assert processes.totals(1.5, 2) == (1.5, 2)
    assert processes.minimum(7) == 7
    processes.check_equal({"a": 1})
    processes.check_same_weights([torch.ones(2)], 1)
    assert processes.salted("Sigrid owes 4711") != processes.salted("Sigrid owes 4711")


def test_the_next_is_made_while_the_last_is_used_and_what_goes_wrong_is_said_in_turn() -> None:
    made, threads = [], set()

    def make() -> int:
        threads.add(threading.get_ident())
        made.append(len(made))
        return made[-1]

    seen = []
    for value in ahead(make, 4):
        time.sleep(0.05)
        seen.append((value, len(made)))
    assert seen == [(0, 2), (1, 3), (2, 4), (3, 4)]
    assert threading.get_ident() not in threads
    assert list(ahead(make, 0)) == []

    def fail() -> int:
        raise ValueError("here")

    with pytest.raises(ValueError, match="here"):
        next(ahead(fail, 2))
