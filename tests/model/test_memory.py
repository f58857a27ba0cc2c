"""A physical batch size is found from memory alone: it changes nothing, sees no data, and what does not fit is said."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models as tm
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from dpllm.errors import ConfigError, Refused
from dpllm.model import memory, processes
from dpllm.privacy.sampling import PhysicalBatch
from dpllm.recipe import names
from dpllm.recipe.config import RunConfig
from dpllm.recipe.derived import plan_of

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
GB = 10**9


def recipe(size: int | str = "auto", **sections: Any) -> RunConfig:
    train = {"batch_size": 1000, "physical_batch_size": size, **sections.pop("train", {})}
    data = {"max_length": 16, **sections.pop("data", {})}
    return tm.recipe(train=train, data=data, **sections)


class Fake:
    """An engine whose step needs so many bytes for each row; a meter that believes it, on a device without limits."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *, free: int, row: int, base: int = 0, fails_at: int = 0
    ) -> None:
        self.batches: list[list[PhysicalBatch]] = []
        self._row, self._base, self._fails_at = row, base, fails_at
        fake = self

        class Meter:
            def __init__(self, device: torch.device) -> None:
                self.free = free

            def peak_of(self, call: Callable[[], None]) -> int:
                try:
                    call()
                except torch.OutOfMemoryError:
                    return memory.UNKNOWN
                return fake._base + fake._row * fake.rows[-1]

        monkeypatch.setattr(memory, "_Meter", Meter)

    @property
    def rows(self) -> list[int]:
        return [max((len(batch.input_ids_RT) for batch in batches), default=0) for batches in self.batches]

    def rehearse(self, batches: Sequence[PhysicalBatch]) -> None:
        self.batches.append(list(batches))
        if self._fails_at and self.rows[-1] >= self._fails_at:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    def resolve(self, config: RunConfig, device: torch.device = CUDA) -> int:
        return memory.resolve(self, config, 64, device)


# --- the search ------------------------------------------------------------------------------------------------------


@settings(derandomize=True, deadline=None, max_examples=100)
@example(base=0, row=1, limit=100, most=100)
@example(base=19, row=10, limit=45, most=9)
@given(base=st.integers(0, 1000), row=st.integers(1, 50), limit=st.integers(0, 3000), most=st.integers(1, 300))
def test_the_largest_that_fits_is_found_to_a_quarter(base: int, row: int, limit: int, most: int) -> None:
    tried: list[int] = []

    def bytes_of(rows: int) -> int:
        tried.append(rows)
        return base + row * rows

    found = memory.largest(bytes_of, limit, most)
    best = min(most, (limit - base) // row) if limit >= base + row else 0
    assert found <= best
    assert found > best * 0.8 - 1
    assert (found == 0) == (best == 0)
    assert all(base + row * rows <= limit for rows in tried if rows > 1)  # nothing is tried that does not fit
    assert len(tried) <= 2 + 9 + 3


@settings(derandomize=True, deadline=None, max_examples=200)
@given(bends=st.integers(1, 40), slope=st.integers(1, 20), limit=st.integers(30, 900), most=st.integers(1, 64))
def test_a_need_that_is_no_line_is_measured(bends: int, slope: int, limit: int, most: int) -> None:
    def bytes_of(rows: int) -> int:  # the optimizer's step is the peak of small batches
        return max(30 + slope * bends, 30 + slope * rows)

    found = memory.largest(bytes_of, limit, most)
    assert not found or bytes_of(found) <= limit
    assert found or bytes_of(1) > limit
    assert found == most or bytes_of(found + max(1, found // 4)) > limit or bytes_of(2 * found) > limit


# --- auto ------------------------------------------------------------------------------------------------------------


def test_auto_stays_within_nine_tenths_of_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake(monkeypatch, free=100 * GB, row=4 * GB, base=10 * GB)
    assert fake.resolve(recipe()) == 20  # 10 + 20 x 4 = 90 of 100
    assert max(fake.rows) == 20


def test_auto_survives_what_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake(monkeypatch, free=100 * GB, row=1, fails_at=14)  # a fragmented device
    assert fake.resolve(recipe()) == 12
    assert max(fake.rows) == 16


def test_auto_asks_for_no_more_than_is_of_use(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake(monkeypatch, free=100 * GB, row=1)
    assert fake.resolve(recipe(), CPU) == memory.TOKENS["cpu"] // 16
    assert fake.resolve(recipe(data={"max_length": 5000}), CPU) == 1
    assert fake.resolve(recipe(train={"batch_size": 16})) == 28  # a draw of Poisson mean 16 is hardly larger
    whole = {"unit": "author", "max_examples_per_unit": 3}
    assert fake.resolve(recipe(train={"batch_size": 16}, data=whole)) == 84
    assert fake.resolve(recipe(train={"batch_size": 16}, data={**whole, "sampling": "example"})) == 28
    assert memory.most_rows(recipe(train={"batch_size": 64}), CUDA, world=4) == 28  # each has a fourth of the batch


def test_rehearsals_are_as_long_as_a_row_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake(monkeypatch, free=100 * GB, row=GB)
    fake.resolve(recipe())
    for batches in filter(None, fake.batches):
        (batch,) = batches
        assert batch.input_ids_RT.shape[1] == 16
        assert bool(batch.loss_mask_RT[:, 1:].all())
        assert batch.unit_R.tolist() == list(range(len(batch.input_ids_RT)))
        assert int(batch.input_ids_RT.max()) < 64


@pytest.mark.parametrize(
    "data", [{"long_examples": "chunk"}, {"unit": "author", "max_examples_per_unit": 2}], ids=["chunks", "authors"]
)
def test_a_unit_of_many_rows_is_rehearsed(data: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake(monkeypatch, free=100 * GB, row=GB)
    fake.resolve(recipe(data=data))
    assert [batch.goes_on for batch in fake.batches[-1]] == [False, True, False]
    assert [batch.num_units for batch in fake.batches[-1]] == [len(fake.batches[-1][0].unit_R), 1, 1]


def test_not_even_one_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    for trouble, sizes in (({"row": 3 * GB}, ["auto"]), ({"row": 1, "fails_at": 1}, ["auto", 8])):
        fake = Fake(monkeypatch, free=2 * GB, **trouble)
        for size in sizes:
            with pytest.raises(ConfigError, match=r"one sequence of 16 tokens does not fit: 2 GB are free") as caught:
                fake.resolve(recipe(size))
        knobs = "Set model.gradient_checkpointing: true, or model.dtype: bfloat16, or model.quantization: 4bit"
        assert knobs in str(caught.value)
    base = {"gradient_checkpointing": True, "quantization": "4bit"}
    with pytest.raises(ConfigError, match=r"Set data\.max_length below 16\."):
        fake.resolve(recipe(model=base))


def test_ranks_agree_on_the_smallest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another rank has less memory, or needs more: both measure the same numbers of rows, and find the same."""
    mine = Fake(monkeypatch, free=100 * GB, row=GB)
    alone = mine.resolve(recipe())
    monkeypatch.setattr(processes, "least", lambda value: min(value, 3 * value))  # the other needs three times as much
    both = mine.resolve(recipe())
    assert (alone, both) == (80, 28)
    assert max(mine.rows[-3:]) <= 32


# --- a number --------------------------------------------------------------------------------------------------------


def test_a_number_that_fits_is_tried_once_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake(monkeypatch, free=10 * GB, row=GB)
    assert fake.resolve(recipe(24)) == 24
    assert fake.rows == [24]
    assert fake.resolve(recipe(24), CPU) == 24
    assert fake.rows == [24]  # on a CPU, a process that tries would be killed


def test_a_number_that_does_not_fit_says_what_would(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake(monkeypatch, free=50 * GB, row=2 * GB, base=5 * GB, fails_at=23)
    with pytest.raises(ConfigError) as caught:
        fake.resolve(recipe(64))
    assert str(caught.value) == (
        "train.physical_batch_size 64: 64 sequences of 16 tokens need about 133 GB beside the model, and 50 GB are free, so the "
        "run would end with its steps charged. Set train.physical_batch_size: auto, or 20 or less."
    )
    assert fake.resolve(recipe(20)) == fake.resolve(recipe()) == 20


# --- in the loop -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("CUDA error: out of memory"),
        MemoryError(),
    ],
)
def test_out_of_memory_in_a_step_says_what_to_set(error: Exception) -> None:
    words = r"its steps so far stay charged.*train\.physical_batch_size: 8 or less"
    with pytest.raises(ConfigError, match=words), memory.explained(recipe(), 16):
        raise error
    words = r"model\.gradient_checkpointing: true"
    with pytest.raises(ConfigError, match=words) as caught, memory.explained(recipe(1), 1):
        raise error
    assert "train.physical_batch_size" not in str(caught.value)


@pytest.mark.parametrize("error", [RuntimeError("shapes do not fit"), Refused("no"), KeyboardInterrupt()])
def test_other_errors_stay_what_they_are(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught, memory.explained(recipe(), 16):
        raise error
    assert caught.value is error


# --- through the engine ----------------------------------------------------------------------------------------------

CASES: dict[str, dict[str, Any]] = {
    "lora": {},
    "frozen": {"adapter": tm.FROZEN},
    "ghost": {"mode": "ghost"},
    "automatic": {"promise": tm.plan(clipping="automatic")},
}


def engine_of(adapter: Any = tm.LORA, mode: str = "auto", promise: Any = None, **changes: Any) -> Any:
    net = tm.build("llama", adapter, attention_dropout=0.1, **changes)
    return tm.make_engine(net, promise, mode=mode)


def everything(engine: Any) -> list[Any]:
    """Whatever a rehearsal could have moved: weights, gradients, optimizer, C, and every global random state."""
    net = engine._model
    return [
        {name: tensor.clone() for name, tensor in net.state_dict().items()},
        [(p.requires_grad, p.grad) for p in net.parameters()],
        copy.deepcopy(engine._optimizer.state_dict()),
        engine.max_grad_norm,
        (torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()),
    ]


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, (Tensor, np.ndarray)):
        return type(one) is type(other) and bool((torch.as_tensor(one) == torch.as_tensor(other)).all())
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


@pytest.mark.parametrize("name", CASES)
def test_rehearsing_changes_nothing(name: str) -> None:
    steps = tm.batches(tm.units([(9,), (17,), (5,)]), 2)
    engine, other = engine_of(**CASES[name]), engine_of(**CASES[name])
    for step in range(2):  # before the optimizer has a state, and after
        before = everything(engine)
        engine.rehearse([memory.synthetic(3, 16, 64)])
        engine.rehearse([])
        assert equal(everything(engine), before)
        for one in (engine, other):
            torch.manual_seed(step)
            one.step(steps)
        assert equal(everything(engine)[0], everything(other)[0])  # noise goes on where it was


def test_rehearsing_without_privacy_changes_nothing() -> None:
    net = tm.build()
    optimizer = torch.optim.AdamW(list(tm.trainable(net).values()), lr=0.1)
    engine = tm.engine_of(net, optimizer, tm.schedule(), None, noise_entropy=1)
    before = everything(engine)
    engine.rehearse([memory.synthetic(3, 16, 64)])
    assert equal(everything(engine), before)


@pytest.mark.parametrize("place", ["forward", "backward", "between"])
@pytest.mark.parametrize("name", ["lora", "frozen"])
def test_a_rehearsal_that_ran_out_of_memory_leaves_nothing_behind(
    name: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = tm.batches(tm.units([(9,), (17,), (5,)]), 2)
    engine, other = engine_of(**CASES[name]), engine_of(**CASES[name])
    before = everything(engine)
    kind = type(engine._clipper)
    inner, counted = kind.add, []

    class Stop(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    def add(self: Any, losses: Any, batch: Any, *rest: Any) -> Any:
        counted.append(batch)
        if place == "between" and len(counted) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")

        def wrong(batch: Any) -> Tensor:
            loss_R = losses(batch)
            if place == "forward":
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return Stop.apply(loss_R) if place == "backward" else loss_R  # type: ignore[no-untyped-call]

        return inner(self, wrong, batch, *rest)

    monkeypatch.setattr(kind, "add", add)
    with pytest.raises(torch.OutOfMemoryError):
        engine.rehearse([memory.synthetic(3, 16, 64)] * 2)
    monkeypatch.setattr(kind, "add", inner)
    assert equal(everything(engine), before)
    for one in (engine, other):
        torch.manual_seed(1)
        one.step(steps)
    assert equal(everything(engine)[0], everything(other)[0])


def test_what_cannot_be_clipped_is_refused_and_not_taken_for_memory() -> None:
    engine = engine_of()
    forward = engine._model.forward

    def odd(**arguments: Any) -> Any:
        raise Refused("a layer that nobody can clip")

    engine._model.forward = odd
    with pytest.raises(Refused, match="nobody can clip"):
        memory.resolve(engine, recipe(), 64, CPU)
    engine._model.forward = forward


# --- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="counts as Linux does")
def test_a_peak_is_counted_and_forgotten() -> None:
    def hold(size: int) -> None:
        torch.ones(size // 4)

    # A meter of its own for each: what other tests left may be given back meanwhile.
    first, second = (memory._Meter(CPU).peak_of(partial(hold, size)) for size in (160_000_000, 80_000_000))
    assert 150e6 < first < 190e6
    assert 70e6 < second < 110e6  # the first peak is over


def test_free_memory_is_the_containers_and_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 64000 kB\nMemAvailable: 32000 kB\n")
    (tmp_path / "max").write_text("9000000")
    (tmp_path / "now").write_text("1000000")
    monkeypatch.setattr(memory, "_MEMORY", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "_CONTAINER", ((str(tmp_path / "none"), ""),))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert memory.free_memory(CPU) == 32_000 * 1024
    monkeypatch.setattr(memory, "_CONTAINER", ((str(tmp_path / "max"), str(tmp_path / "now")),))
    assert memory.free_memory(CPU) == 8_000_000
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert memory.free_memory(CPU) == 2_000_000
    (tmp_path / "max").write_text("max\n")
    assert memory.free_memory(CPU) == 8_000 * 1024
    monkeypatch.setattr(memory, "_MEMORY", tmp_path / "none")
    assert memory.budget(memory.free_memory(CPU)) == memory.UNKNOWN


# --- the recipe ------------------------------------------------------------------------------------------------------


def test_auto_is_no_part_of_the_promise() -> None:
    privacy = {"noise_multiplier": 2.0, "epsilon": 1e6}
    plans = [plan_of(recipe(size, privacy=privacy, train={"batch_size": 10}), 100) for size in ("auto", 3)]
    assert plans[0] == plans[1]
    assert names.of_training(recipe("auto")) == names.of_training(recipe(3))


@pytest.mark.parametrize("value", [0, -4, 1.5, "most", None, [8]])
def test_anything_else_is_one_line(value: Any, tmp_path: Path) -> None:
    from dpllm.recipe.config import load_config

    path = tmp_path / "recipe.yaml"
    path.write_text("model: {name_or_path: a}\ndata: {train: b}\ntrain: {steps: 1}\noutput_dir: c\n")
    assert load_config(path, {"train.physical_batch_size": "auto"}).train.physical_batch_size == "auto"
    with pytest.raises(ConfigError, match="whole number of sequences, 1 or more, or auto") as caught:
        load_config(path, {"train.physical_batch_size": value})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("size", ["auto", 4])
def test_a_rehearsal_does_not_hide_a_buffer_that_moves_from_the_self_check(size: int | str) -> None:
    """Long-context RoPE changes a buffer at the longest rows, and so the loss of the short ones beside them."""
    longrope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [1.0, 1.3, 5.0, 40.0],
        "factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    net = tm.build("phi3", max_position_embeddings=128, rope_parameters=longrope, original_max_position_embeddings=32)
    engine = tm.make_engine(net, tm.plan(), max_length=100)
    config = tm.recipe(data={"max_length": 100}, train={"physical_batch_size": size})
    found = memory.resolve(engine, config, tm.VOCABULARY, tm.CPU)
    with pytest.raises(Refused, match="inv_freq"):
        engine.self_check(tm.VOCABULARY, tm.shapes(100, found))
