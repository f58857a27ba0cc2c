"""What is found to fit on a GPU fits, and what does not is said before a step. Skipped where there is no such device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
import tiny_models as tm
import torch

from dpllm.errors import ConfigError
from dpllm.model import memory
from dpllm.privacy.engine import StepEngine
from dpllm.privacy.packing import Pass, passes_of
from dpllm.recipe.config import RunConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda", 0)
LONGEST, VOCABULARY = 256, 32_000
ROOM = 3 * 2**29  # bytes that a test leaves to itself
TOO_MANY = 131_072  # tokens of a pass that it cannot hold


@pytest.fixture
def engine() -> Iterator[StepEngine]:
    """LoRA on a small Llama whose logits need memory, with AdamW, in passes of few tokens."""
    shape = {"hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 8, "num_key_value_heads": 8}
    places = {"vocab_size": VOCABULARY, "max_position_embeddings": LONGEST, "head_dim": 32}
    net = tm.build("llama", tm.LORA, **places, **shape).to(CUDA)
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-4)
    made = tm.engine_of(net, optimizer, tm.schedule(), tm.plan(), noise_entropy=1, device=CUDA)
    repack(made, 2048)
    yield made
    made.close()
    torch.cuda.empty_cache()


def repack(engine: StepEngine, tokens: int) -> None:
    engine.repack(memory.packing_of_model(engine._model, 4096, LONGEST, VOCABULARY, CUDA, tokens))


@pytest.fixture
def little() -> Iterator[None]:
    """A device that has ROOM bytes and no more; what torch holds already counts."""
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(CUDA).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved(CUDA) + ROOM) / total, CUDA)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0, CUDA)


def recipe(tokens: int | str) -> RunConfig:
    return tm.recipe(data={"max_length": LONGEST}, train={"batch_size": 4096, "tokens_per_pass": tokens})


def rehearse(engine: StepEngine) -> None:
    memory.rehearse(engine, recipe(engine.packing.tokens), VOCABULARY, CUDA)


def passes(engine: StepEngine, lengths: Sequence[Sequence[int]]) -> list[Pass]:
    some = [tm.unit(of_one, number, VOCABULARY) for number, of_one in enumerate(lengths)]
    return passes_of(range(len(some)), some, engine.packing, 0)


def peak(call: Callable[[], object]) -> int:
    """Bytes that a call holds at most, beside those held before."""
    held = torch.cuda.memory_allocated(CUDA)
    torch.cuda.reset_peak_memory_stats(CUDA)
    call()
    return torch.cuda.max_memory_allocated(CUDA) - held


@pytest.mark.parametrize("tokens", [512, 4096])
def test_no_batch_needs_more_than_was_rehearsed(engine: StepEngine, tokens: int) -> None:
    """Whatever is drawn: the longest rows, the shortest, one unit of many passes, anything between, and nobody."""
    repack(engine, tokens)
    held = torch.cuda.memory_allocated(CUDA)
    rehearsed = peak(lambda: engine.rehearse(memory._rehearsal(engine.packing, VOCABULARY)))
    assert torch.cuda.memory_allocated(CUDA) < held + 64 * 2**20 + engine.packing.most_units * 4 * engine.size
    drawn = [
        passes(engine, [(LONGEST,)] * (3 * tokens // LONGEST)),
        passes(engine, [(3,)] * (2 * engine.packing.most_units)),
        passes(engine, [(LONGEST,) * (3 * tokens // LONGEST), (5,)]),
        passes(engine, [(2 + 37 * number % 250,) for number in range(tokens // 20)]),
        [],
    ]
    for some in drawn:
        assert peak(lambda some=some: engine.step(some)) <= rehearsed + 2**20
    assert 0.2 * rehearsed < peak(lambda: engine.step(drawn[0]))  # and it is not timid


def test_what_is_more_than_is_free_is_refused(engine: StepEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    rehearse(engine)
    monkeypatch.setattr(memory, "free_memory", lambda device: 2**20)
    with pytest.raises(ConfigError, match=r"a pass of 2,048 tokens does not fit: .* needs about .* Set "):
        rehearse(engine)


@pytest.mark.usefixtures("little")
def test_what_does_not_fit_is_caught_and_the_rest_trains(engine: StepEngine) -> None:
    """mem_get_info knows nothing of the fraction: the rehearsal itself meets the end of memory."""
    repack(engine, TOO_MANY)
    with pytest.raises(
        ConfigError, match=r"a pass of 131,072 tokens does not fit: .* needs more\. Set train\.tokens_per"
    ):
        rehearse(engine)
    repack(engine, 2048)
    rehearse(engine)
    engine.step(passes(engine, [(LONGEST,)] * 20))


@pytest.mark.usefixtures("little")
def test_passes_that_the_recipe_leaves_open_become_smaller_until_they_fit(engine: StepEngine) -> None:
    repack(engine, TOO_MANY)
    memory.rehearse(engine, recipe("auto"), VOCABULARY, CUDA)
    assert LONGEST < engine.packing.tokens < TOO_MANY
    engine.step(passes(engine, [(LONGEST,)] * (2 * engine.packing.tokens // LONGEST)))


@pytest.mark.usefixtures("little")
def test_a_step_that_runs_out_says_what_to_set(engine: StepEngine) -> None:
    repack(engine, TOO_MANY)
    some = passes(engine, [(LONGEST,)] * (TOO_MANY // LONGEST - 1))
    with (
        pytest.raises(ConfigError, match=r"out of memory in a pass of 131,072 tokens.*train\.tokens_per_pass: auto"),
        memory.explained(recipe(TOO_MANY), engine.packing),
    ):
        engine.step(some)


def test_rehearsing_changes_nothing(engine: StepEngine) -> None:
    weights = [p.clone() for p in engine.parameters.values()]
    state = torch.cuda.get_rng_state(CUDA)
    engine.rehearse(passes(engine, [(LONGEST,)] * 4))
    assert all(torch.equal(p, old) for p, old in zip(engine.parameters.values(), weights, strict=True))
    assert all(p.grad is None for p in engine.parameters.values())
    assert torch.equal(torch.cuda.get_rng_state(CUDA), state)
