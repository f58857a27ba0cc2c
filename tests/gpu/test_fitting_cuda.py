"""What is found to fit on a GPU fits, and what does not is said before a step. Skipped where there is no such device."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import tiny_models as tm
import torch

from dpllm.errors import ConfigError
from dpllm.model import memory
from dpllm.privacy.engine import StepEngine
from dpllm.recipe.config import RunConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda", 0)
TOKENS, VOCABULARY = 256, 32_000
ROOM = 3 * 2**29  # bytes that a test leaves to itself


@pytest.fixture
def engine() -> Iterator[StepEngine]:
    """LoRA on a small Llama whose logits need memory, with AdamW."""
    shape = {"hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 8, "num_key_value_heads": 8}
    net = tm.build("llama", tm.LORA, vocab_size=VOCABULARY, max_position_embeddings=TOKENS, head_dim=32, **shape).to(
        CUDA
    )
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-4)
    made = tm.engine_of(net, optimizer, tm.schedule(), tm.plan(), noise_entropy=1, device=CUDA, max_length=TOKENS)
    yield made
    made.close()
    torch.cuda.empty_cache()


@pytest.fixture
def little() -> Iterator[None]:
    """A device that has ROOM bytes and no more; what torch holds already counts."""
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(CUDA).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved(CUDA) + ROOM) / total, CUDA)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0, CUDA)


def recipe(size: int | str) -> RunConfig:
    return tm.recipe(data={"max_length": TOKENS}, train={"batch_size": 4096, "physical_batch_size": size})


def resolve(engine: StepEngine, size: int | str) -> int:
    return memory.resolve(engine, recipe(size), VOCABULARY, CUDA)


def test_what_is_found_fits_and_is_not_timid(engine: StepEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda device: ROOM)
    held = torch.cuda.memory_allocated(CUDA)
    found = resolve(engine, "auto")
    assert 1 < found < memory.most_rows(recipe("auto"), CUDA)
    assert (
        torch.cuda.memory_allocated(CUDA) < held + 64 * 2**20
    )  # nothing of the rehearsals is left but kernels' workspace
    torch.cuda.reset_peak_memory_stats(CUDA)
    for _ in range(2):
        engine.step([memory.synthetic(found, TOKENS, VOCABULARY)] * 2)
    used = torch.cuda.max_memory_allocated(CUDA) - held
    assert 0.55 * ROOM < used < ROOM


@pytest.mark.usefixtures("little")
def test_what_does_not_fit_is_caught_and_the_rest_trains(engine: StepEngine) -> None:
    with pytest.raises(ConfigError, match=r"Set train\.physical_batch_size: auto, or \d+ or less\.") as caught:
        resolve(engine, 4096)
    advised = int(re.findall(r"or (\d+) or less", str(caught.value))[0])
    assert resolve(engine, advised) == advised
    engine.step([memory.synthetic(advised, TOKENS, VOCABULARY)])


@pytest.mark.usefixtures("little")
def test_auto_where_the_device_says_no_first(engine: StepEngine) -> None:
    """mem_get_info knows nothing of the fraction: the search itself meets the end of memory."""
    found = resolve(engine, "auto")
    engine.step([memory.synthetic(found, TOKENS, VOCABULARY)] * 2)


@pytest.mark.usefixtures("little")
def test_a_step_that_runs_out_says_what_to_set(engine: StepEngine) -> None:
    with (
        pytest.raises(ConfigError, match=r"train\.physical_batch_size: 2048 or less"),
        memory.explained(recipe(4096), 4096),
    ):
        engine.step([memory.synthetic(4096, TOKENS, VOCABULARY)])


def test_rehearsing_changes_nothing(engine: StepEngine) -> None:
    weights = [p.clone() for p in engine.parameters.values()]
    state = torch.cuda.get_rng_state(CUDA)
    engine.rehearse([memory.synthetic(4, TOKENS, VOCABULARY)])
    assert all(torch.equal(p, old) for p, old in zip(engine.parameters.values(), weights, strict=True))
    assert all(p.grad is None for p in engine.parameters.values())
    assert torch.equal(torch.cuda.get_rng_state(CUDA), state)
