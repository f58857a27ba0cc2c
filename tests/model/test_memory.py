"""Passes have the shape that public numbers say: what does not fit is said or halved, nothing is changed, no data is seen."""

import copy
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import switching
import tiny_models as tm
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dpllm.errors import ConfigError, NotBatchInvariant, Refused
from dpllm.model import memory, processes
from dpllm.privacy.packing import Pass
from dpllm.privacy.schedule import Packing
from dpllm.recipe import names
from dpllm.recipe.config import RunConfig
from dpllm.run.promise import plan_of

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
ATTENTION = {"target_modules": ["q_proj", "v_proj"]}
GB = 10**9


def recipe(tokens: int | str = "auto", **sections: Any) -> RunConfig:
    train = {"batch_size": 1000, "tokens_per_pass": tokens, **sections.pop("train", {})}
    data = {"max_length": 16, **sections.pop("data", {})}
    return tm.recipe(train=train, data=data, **sections)


class Fake:
    """An engine whose step needs so many bytes for each token of a pass; a meter that believes it."""

    def __init__(self, monkeypatch: Any, *, free: int, token: int, tokens: int = 1024, fails_at: int = 0) -> None:
        self.packing = Packing(tokens, 8, 100, targets=16, max_length=16)
        self.rehearsed: list[list[Pass]] = []
        self._token, self._fails_at = token, fails_at
        fake = self

        class Meter:
            def __init__(self, device: torch.device) -> None:
                self.free = free

            def peak_of(self, call: Callable[[], None]) -> int:
                try:
                    call()
                except torch.OutOfMemoryError:
                    return memory.ENDLESS
                return fake._token * fake.packing.tokens

        monkeypatch.setattr(memory, "_Meter", Meter)

    @property
    def tokens(self) -> list[int]:
        return [passes[0].input_ids_1M.numel() for passes in self.rehearsed]

    def repack(self, packing: Packing) -> None:
        self.packing = packing

    def rehearse(self, passes: Sequence[Pass]) -> None:
        self.rehearsed.append(list(passes))
        if self._fails_at and self.tokens[-1] >= self._fails_at:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    def fit(self, config: RunConfig, device: torch.device = CUDA) -> int:
        memory.rehearse(self, config, 64, device)  # type: ignore[arg-type]
        return self.packing.tokens


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    batch=st.integers(1, 5000),
    longest=st.integers(2, 3000),
    pairs=st.booleans(),
    tokens=st.sampled_from([None, 1, 700, 5000]),
    kind=st.sampled_from([CPU, CUDA]),
)
def test_a_pass_holds_the_longest_example_and_a_token_of_padding(
    batch: int, longest: int, pairs: bool, tokens: int | None, kind: torch.device
) -> None:
    each = 2 if pairs else 1
    result = memory.packing_of_model(tm.Toy(), batch, longest, 64, kind, tokens, each)
    assert result.room >= each * longest
    assert result.tokens % result.multiple == 0
    assert result.tokens >= (tokens or 0)
    assert tokens is None or result.tokens < max(tokens, each * longest + 1) + result.multiple
    assert result.most_units >= 1
    assert (result.max_length, result.rows_each) == (longest, each)


def test_the_shape_follows_from_the_recipe_the_model_and_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    net = tm.build()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    result = memory.packing_for(recipe(1000), net, 64, CPU)
    assert (result.tokens, result.multiple) == (1056, 96)  # full blocks of 32 tokens for each thread
    assert memory.packing_for(recipe(1000), net, 64, CUDA).tokens == 1024
    assert memory.packing_for(recipe(data={"max_length": 5000}), net, 64, CPU).tokens >= 5001
    assert not result.alone
    assert memory.packing_for(recipe(1000), tm.build("falcon"), 64, CPU).alone
    assert memory.packing_for(recipe(1000), tm.build("mixtral", {**tm.LORA, **ATTENTION}), 64, CPU).alone


@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
def test_gradients_that_do_not_fit_side_by_side_are_formed_twice(device: torch.device, monkeypatch: Any) -> None:
    """Their number is public: bytes for them over the numbers that train, whatever is drawn."""
    net = nn.Linear(100, 100, bias=False)
    bytes_of_one = 4 * 10_000
    for units in (1000, 1):
        for limits in ("CPU", "ELSEWHERE"):
            monkeypatch.setattr(memory, limits, getattr(memory, limits)._replace(held=units * bytes_of_one))
        result = memory.packing_of_model(net, 16, 64, 64, device, 512)
        assert bool(result.held_numbers) == (units == 1000)
        if result.held_numbers:
            assert result.held_numbers == 10_000
            assert result.most_units <= units
        else:
            assert result.most_units == result.tokens // 2  # as many as there can be


def test_passes_that_need_more_than_nine_tenths_of_free_memory_are_halved(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake(monkeypatch, free=100 * GB, token=GB // 4)
    assert fake.fit(recipe()) == 256  # 64 of 100; 512 tokens take 128
    assert fake.tokens == [1024, 512, 256]
    assert Fake(monkeypatch, free=100 * GB, token=1, fails_at=300).fit(recipe()) == 256  # of a fragmented device


def test_a_pass_that_fits_is_tried_once_and_ranks_agree_on_the_smallest(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake(monkeypatch, free=100 * GB, token=1)
    assert fake.fit(recipe()) == fake.fit(recipe(1024)) == 1024
    assert fake.tokens == [1024, 1024]
    assert fake.fit(recipe(), CPU) == 1024
    assert fake.tokens == [1024, 1024]  # on a CPU, a process that tries would be killed
    # Another rank needs more: both measure passes of the same sizes, and find the same.
    here = Fake(monkeypatch, free=100 * GB, token=GB // 12)
    assert here.fit(recipe()) == 1024
    monkeypatch.setattr(
        processes, "minimum", lambda value: min(value, 3 * value)
    )  # the other needs three times as much
    assert here.fit(recipe()) == 256


def test_rehearsals_are_as_long_as_a_row_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes that need most: full of the longest rows, of the shortest units, and of a unit that goes on."""
    fake = Fake(monkeypatch, free=100 * GB, token=1, tokens=96)
    fake.fit(recipe())
    ((whole, short, first, rest),) = fake.rehearsed
    assert {tuple(each.input_ids_1M.shape) for each in (whole, short, first, rest)} == {(1, 96)}
    assert [(row.stop - row.start) for row in whole.rows] == [16] * 5
    assert whole.targets.count == 5 * 15  # every token but the first of each
    assert int(whole.input_ids_1M.max()) < 64
    assert (whole.num_units, short.num_units) == (5, fake.packing.most_units)
    assert [each.goes_on for each in (whole, short, first, rest)] == [False, False, True, False]
    assert first.num_units == rest.num_units == 1
    assert len(first.rows) == 5


def test_rehearsals_of_pairs_and_of_examples_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake(monkeypatch, free=100 * GB, token=1, tokens=96)
    fake.packing = Packing(96, 8, 100, targets=16, max_length=16, rows_each=2)
    fake.fit(recipe())
    assert [(each.num_units, len(each.rows)) for each in fake.rehearsed[0]] == [(2, 4), (8, 16), (1, 4), (1, 4)]
    fake.packing = Packing(96, 8, 100, targets=16, max_length=16, rows_each=2, alone=True)
    fake.fit(recipe())
    assert [tuple(each.input_ids_1M.shape) for each in fake.rehearsed[1]] == [(2, 16)] * 3


def test_attention_that_cannot_keep_rows_apart_gets_examples_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rehearsal is the first to run it on a GPU; on several, each finds the same."""
    fake, rehearse = Fake(monkeypatch, free=100 * GB, token=1, tokens=96), Fake.rehearse

    def refused(self: Fake, passes: Sequence[Pass]) -> None:
        rehearse(self, passes)
        if not self.packing.alone:
            raise NotBatchInvariant("Attention asks its attention for sinks")

    monkeypatch.setattr(Fake, "rehearse", refused)
    fake.fit(recipe())
    assert fake.packing.alone
    assert fake.tokens == [96, 16]


def test_what_does_not_fit_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake(monkeypatch, free=2 * GB, token=GB)
    with pytest.raises(ConfigError) as caught:
        fake.fit(recipe())
    assert fake.packing.tokens == 32  # of 16 fits no example and its padding
    assert str(caught.value) == (
        "a pass of 32 tokens does not fit: 2 GB are free beside the model, of which 90% may be used, and its forward and "
        "backward pass needs about 32 GB. Set model.gradient_checkpointing: true, or model.dtype: bfloat16, or "
        "model.quantization: 4bit, or data.max_length below 16."
    )
    stated = Fake(monkeypatch, free=2 * GB, token=1, fails_at=1)
    with pytest.raises(ConfigError, match=r"needs more\. Set train\.tokens_per_pass: auto, or model"):
        stated.fit(recipe(1024))
    assert stated.tokens == [1024]  # what a recipe says is not changed
    base = {"gradient_checkpointing": True, "quantization": "4bit"}
    with pytest.raises(ConfigError, match=r"Set data\.max_length below 16\."):
        Fake(monkeypatch, free=2 * GB, token=GB).fit(recipe(model=base))


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
    words = r"a pass of 96 tokens.*its steps so far stay charged.*set train\.tokens_per_pass: auto"
    with pytest.raises(ConfigError, match=words), memory.explained(recipe(96), tm.packing()):
        raise error
    words = r"model\.gradient_checkpointing: true"
    with pytest.raises(ConfigError, match=words) as caught, memory.explained(recipe(), tm.packing()):
        raise error
    assert "train.tokens_per_pass" not in str(caught.value)


@pytest.mark.parametrize("error", [RuntimeError("shapes do not fit"), Refused("no"), KeyboardInterrupt()])
def test_other_errors_stay_what_they_are(error: BaseException) -> None:
    with pytest.raises(type(error)) as caught, memory.explained(recipe(), tm.packing()):
        raise error
    assert caught.value is error


CASES: dict[str, dict[str, Any]] = {
    "lora": {},
    "frozen": {"adapter": tm.FROZEN},
    "twice": {"mode": "twice"},
    "automatic": {"promise": tm.plan(clipping="automatic")},
}


def engine_of(adapter: Any = tm.LORA, mode: str = "held", promise: Any = None, **changes: Any) -> Any:
    net = tm.build("llama", adapter, attention_dropout=0.1, **changes)
    return tm.make_engine(net, promise, mode=mode)


def rehearsal(engine: Any) -> list[Pass]:
    return memory._rehearsal(engine.packing, tm.VOCABULARY)


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
    steps = tm.batches(tm.units([(9,), (17,), (5,)]))
    engine, other = engine_of(**CASES[name]), engine_of(**CASES[name])
    for step in range(2):  # before the optimizer has a state, and after
        before = everything(engine)
        engine.rehearse(rehearsal(engine))
        engine.rehearse([])
        assert equal(everything(engine), before)
        for item in (engine, other):
            torch.manual_seed(step)
            item.step(steps)
        assert equal(everything(engine)[0], everything(other)[0])  # noise goes on where it was


def test_rehearsing_without_privacy_changes_nothing() -> None:
    net = tm.build()
    optimizer = torch.optim.AdamW(list(tm.trainable(net).values()), lr=0.1)
    engine = tm.engine_of(net, optimizer, tm.schedule(), None, noise_entropy=1)
    before = everything(engine)
    engine.rehearse(rehearsal(engine))
    assert equal(everything(engine), before)


@pytest.mark.parametrize("place", ["forward", "backward", "between"])
@pytest.mark.parametrize("name", ["lora", "frozen"])
def test_a_rehearsal_that_ran_out_of_memory_leaves_nothing_behind(name: str, place: str, monkeypatch: Any) -> None:
    steps = tm.batches(tm.units([(9,), (17,), (5,)]))
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
        engine.rehearse(rehearsal(engine))
    monkeypatch.setattr(kind, "add", inner)
    assert equal(everything(engine), before)
    for item in (engine, other):
        torch.manual_seed(1)
        item.step(steps)
    assert equal(everything(engine)[0], everything(other)[0])


def test_what_cannot_be_clipped_is_refused_and_not_taken_for_memory() -> None:
    engine = engine_of()
    forward = engine._model.forward

    def odd(**arguments: Any) -> Any:
        raise Refused("a layer that nobody can clip")

    engine._model.forward = odd
    with pytest.raises(Refused, match="nobody can clip"):
        engine.rehearse(rehearsal(engine))
    engine._model.forward = forward


def test_auto_is_no_part_of_the_promise() -> None:
    privacy = {"noise_multiplier": 2.0, "epsilon": 1e6}
    plans = [plan_of(recipe(tokens, privacy=privacy, train={"batch_size": 10}), 100) for tokens in ("auto", 300)]
    assert plans[0] == plans[1]
    assert names.of_training(recipe("auto")) == names.of_training(recipe(300))


def test_a_buffer_that_moves_with_the_longest_row_is_the_same_in_every_pass() -> None:
    """Long-context RoPE changes a buffer by the largest position, which the padding at the end holds in every pass."""
    longrope = {**switching.LONG, "rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0}
    longrope["original_max_position_embeddings"] = 32
    changes = {"max_position_embeddings": 128, "rope_parameters": longrope, "original_max_position_embeddings": 32}
    engine = tm.make_engine(tm.build("phi3", **changes), tm.plan(), tokens=128, longest=100)
    short = tm.unit((7,), 1)
    before = tm.clipped_sum(engine, [short])
    engine.rehearse(rehearsal(engine))
    after = tm.clipped_sum(engine, [short])
    beside = tm.clipped_sum(engine, [short, tm.unit((100,), 2)]) - tm.clipped_sum(engine, [tm.unit((100,), 2)])
    assert torch.equal(before, after)
    assert torch.equal(before, beside)
