"""A footprint counts the model that would train, from its configuration alone, and is not far from what a run needs."""

from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_models as tm
import torch
from programs import run_program
from torch import nn
from transformers import GPT2Config, LlamaConfig

from dpllm.errors import ConfigError, Refused
from dpllm.model import adapters, loading, memory
from dpllm.privacy import attention
from dpllm.recipe.config import RunConfig
from dpllm.run.footprint import footprint, skeleton, tally

WORKER = Path(__file__).with_name("footprint_worker.py")
LORA: dict[str, Any] = {"method": "lora", "r": 4}
FROZEN: dict[str, Any] = {"method": "frozen", "last_blocks": 1}


def recipe(folder: Path | str, adapter: dict[str, Any] = LORA, **changes: Any) -> RunConfig:
    value: dict[str, Any] = {
        "model": {"name_or_path": str(folder)},
        "adapter": adapter,
        "data": {"max_length": 32},
        "privacy": {"noise_multiplier": 2.0, "epsilon": 1e6, "max_grad_norm": 0.5},
        "train": {"steps": 10, "batch_size": 20, "tokens_per_pass": 128},
    }
    for key, new in changes.items():
        section, _, name = key.partition("__")
        value[section] = {**value[section], name: new}
    return tm.recipe(**value)


def only_config(path: Path, family: str = "llama", **changes: Any) -> Path:
    """A directory that holds no weights and no tokenizer."""
    tiny.model(family, **changes).config.save_pretrained(path)
    assert [file.name for file in path.iterdir() if file.name != "generation_config.json"] == ["config.json"]
    return path


@pytest.mark.parametrize("adapter", [LORA, {**LORA, "lora_a": "frozen"}, FROZEN], ids=["lora", "lora_a", "frozen"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "opt"])
def test_what_trains_is_what_would_train(family: str, adapter: dict[str, Any], tmp_path: Path) -> None:
    estimate = footprint(recipe(only_config(tmp_path / "config", family), adapter))
    real = loading.build(recipe(tiny.save_model(tmp_path / "whole", family), adapter), torch.device("cpu"))
    assert list(estimate.kinds) == adapters.trainable_table(real)
    assert estimate.total == sum(parameter.numel() for parameter in real.parameters())
    assert estimate.trainable == sum(parameter.numel() for parameter in real.parameters() if parameter.requires_grad)
    assert estimate.memory.trainable == 4 * estimate.trainable
    assert estimate.memory.weights == 4 * (estimate.total - estimate.trainable)


def test_attention_that_cannot_keep_rows_apart_is_planned_one_by_one(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(attention, "HARMLESS", frozenset())
    seen = footprint(recipe(only_config(tmp_path / "config")))
    assert seen.packing.alone
    assert seen.memory is not None
    assert not seen.refusals


@pytest.mark.parametrize("family", tiny.MIXED)
def test_auto_would_train_what_it_trains(family: str, tmp_path: Path) -> None:
    planned = skeleton(recipe(only_config(tmp_path / "config", family)), torch.float32)
    real = loading.build(recipe(tiny.save_model(tmp_path / "whole", family)), torch.device("cpu"))
    assert adapters.trainable_table(planned) == adapters.trainable_table(real)
    assert adapters.left_out(planned) == adapters.left_out(real)


def test_a_large_model_takes_no_memory(tmp_path: Path) -> None:
    shape = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128_256}
    shape |= {"hidden_size": 4096, "intermediate_size": 14_336}
    LlamaConfig(**shape, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    net = skeleton(recipe(tmp_path), torch.float32)
    assert all(parameter.is_meta for parameter in net.parameters())
    assert sum(p.numel() for p in net.parameters() if not p.requires_grad) == 8_030_261_248  # of Llama 3.1 8B


def test_memory_grows_with_what_it_is_made_of(tmp_path: Path) -> None:
    only_config(tmp_path)
    tokens, optimizer = {"train__tokens_per_pass": 256}, {"train__optimizer": "sgd"}
    variants = ({}, tokens, {**tokens, "data__max_length": 64}, {"train__batch_size": 40}, optimizer)
    one, wide, long, twice, sgd = (footprint(recipe(tmp_path, **changes)) for changes in variants)
    assert wide.memory.activations == pytest.approx(2 * one.memory.activations, rel=0.01)
    assert long.memory.activations > 1.9 * one.memory.activations
    assert one.memory.unit_gradients == 4 * one.packing.most_units * one.trainable
    assert twice.memory == one.memory
    assert (one.memory.optimizer, sgd.memory.optimizer) == (8 * one.trainable, 0)
    assert one.memory.total == sum(vars(one.memory).values())


def test_passes_are_planned_as_the_recipe_says_or_as_a_run_would_choose(tmp_path: Path) -> None:
    only_config(tmp_path)
    assert footprint(recipe(tmp_path)).packing.tokens == 128
    config = recipe(tmp_path, train__tokens_per_pass="auto")
    estimate = footprint(config)
    net = loading.build(recipe(tiny.save_model(tmp_path / "whole")), tm.CPU)
    assert estimate.packing == memory.packing_for(config, net, tiny.SMALL["vocab_size"], tm.CPU)
    stated = footprint(recipe(tmp_path, train__tokens_per_pass=estimate.packing.tokens))
    assert (stated.packing, stated.memory) == (estimate.packing, estimate.memory)


def test_a_gpu_is_planned_for_from_elsewhere(tmp_path: Path) -> None:
    """Every machine says the same, with any number of threads."""
    config = recipe(only_config(tmp_path), train__tokens_per_pass="auto", data__max_length=128)
    a100, h100 = (footprint(config, gpu=gpu) for gpu in ("a100", "h100"))
    assert h100 == a100
    assert h100.packing.tokens % memory.ELSEWHERE.block == 0
    precisions = [recipe(tmp_path, train__precision=name) for name in ("auto", "bf16", "fp32")]
    kept = [footprint(config, gpu="h100").memory.activations for config in precisions]
    assert kept[0] == kept[1] < kept[2]
    with pytest.raises(ConfigError, match="Type one of a100, h100"):
        footprint(config, gpu="tpu")


def test_logits_of_a_frozen_head_are_a_chunk(tmp_path: Path) -> None:
    """As the engine computes them; where the head trains, they are whole."""
    only_config(tmp_path, vocab_size=200_000)
    few, many, whole = (
        footprint(recipe(tmp_path, adapter, data__max_length=tokens, train__tokens_per_pass=513)).memory.logits
        for adapter, tokens in ((LORA, 256), (LORA, 512), ({**FROZEN, "lm_head": True}, 128))
    )
    assert few == pytest.approx(many, rel=0.05)
    assert few < 2.5 * 4 * 2**24
    assert whole > 4 * (4 * 128 * 200_000)


def test_checkpointing_saves_memory(tmp_path: Path) -> None:
    only_config(tmp_path, num_hidden_layers=8)
    whole, again = (footprint(recipe(tmp_path, model__gradient_checkpointing=on)) for on in (False, True))
    assert again.memory.activations < whole.memory.activations / 2


def test_what_the_model_would_refuse_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(net: nn.Module) -> None:
        raise Refused("a layer couples rows")

    monkeypatch.setattr("dpllm.privacy.guards.check_model", refuse)
    estimate = footprint(recipe(only_config(tmp_path), data__max_length=129))
    assert [type(error) for error in estimate.refusals] == [Refused, ConfigError]
    assert "129 is more than the 128 positions" in str(estimate.refusals[1])


def test_an_architecture_that_computes_from_values_is_counted_without_memory(tmp_path: Path) -> None:
    attention = {"method": "lora", "target_modules": ["q_proj", "v_proj"]}
    estimate = footprint(recipe(only_config(tmp_path, "mixtral"), attention))
    assert estimate.trainable > 0
    assert estimate.memory is None
    assert "without weights" in estimate.basis


@pytest.mark.parametrize(
    ("name", "message"), [("absent-folder", r"model\.name_or_path"), ("builtin:absent", "not embedded in dpllm")]
)
def test_a_model_that_is_not_there_is_a_wrong_recipe(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        footprint(recipe(name))


def test_the_tally_holds_gradients_alone_after_a_backward_pass() -> None:
    with torch.device("meta"):
        layers = nn.Sequential(nn.Linear(30, 50), nn.Linear(50, 20, bias=False))
        rows = torch.empty(7, 30)
    with tally() as counted:
        out = layers(rows)
        out.sum().backward()
    gradients = sum(parameter.numel() for parameter in layers.parameters())
    del out
    assert counted.live == 4 * gradients  # and nothing else is held


def test_the_tally_counts_what_is_held() -> None:
    with torch.device("meta"):
        rows = torch.empty(1000, requires_grad=True)
    with tally() as counted:
        out = rows.exp()  # keeps its own result
        assert counted.live == 4000
        out = out.sin()  # keeps its input
        assert counted.live == 8000
        view = out[:500]
        assert counted.live == 8000
        del view, out
        assert counted.live == 0
        assert counted.peak == 8000


def test_attention_holds_what_a_fused_kernel_holds() -> None:
    before = nn.functional.scaled_dot_product_attention
    with torch.device("meta"):
        parts = [torch.empty(2, 3, 64, 8, requires_grad=True) for _ in range(3)]
    with tally() as counted:
        out = nn.functional.scaled_dot_product_attention(*parts)
        assert out.shape == (2, 3, 64, 8)
        assert counted.live < 4 * (2 * 3 * 64 * 64)  # no table of weights
        out.sum().backward()
    assert nn.functional.scaled_dot_product_attention is before


MALLOC = {f"MALLOC_{name}_": "65536" for name in ("MMAP_MAX", "MMAP_THRESHOLD", "TRIM_THRESHOLD")} | {
    "MALLOC_ARENA_MAX": "1"
}
CASES = {
    "builtin tiny": ("builtin:tiny", 32, 128),
    "Llama of 6 blocks, width 512": ("llama", 4, 256),
    "the same, longer": ("llama", 2, 512),
    "GPT-2": ("gpt2", 4, 256),
}


@pytest.mark.full
@pytest.mark.parametrize("method", ["lora", "frozen"])
@pytest.mark.parametrize("name", CASES)
def test_the_estimate_of_memory_is_near_that_of_a_real_step(name: str, method: str, tmp_path: Path) -> None:
    source, rows, tokens = CASES[name]
    if source == "llama":
        LlamaConfig(
            num_hidden_layers=6, hidden_size=512, intermediate_size=1376, num_attention_heads=8, num_key_value_heads=8,
            vocab_size=32_000, architectures=["LlamaForCausalLM"],
        ).save_pretrained(tmp_path)  # fmt: skip
    elif source == "gpt2":
        GPT2Config(architectures=["GPT2LMHeadModel"]).save_pretrained(tmp_path)
    folder = loading.source(source) if source.startswith("builtin") else str(tmp_path)
    adapter = {"method": "lora", "r": 16} if method == "lora" else {"method": "frozen", "last_blocks": 2}
    changes = {"data__max_length": tokens, "train__tokens_per_pass": rows * tokens + 1, "train__batch_size": 2 * rows}
    estimate = footprint(recipe(folder, adapter, **changes))
    measured = int(run_program(WORKER, folder, rows, tokens, 2, method, timeout=600, **MALLOC))
    ratio = estimate.memory.total / measured
    print(f"\n{name}, {method}: estimate over measured {ratio:.2f}")
    assert 0.7 < ratio < 1.5
