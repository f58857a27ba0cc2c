"""The small copy of a model that is checked in float32, where the run itself computes in less."""

from typing import Any

import pytest
import tiny
import tiny_models as tm
import torch

from dpllm.errors import Refused
from dpllm.model import adapters, loading

Json = dict[str, Any]

MORE: dict[str, Json] = {  # three blocks or more
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"] * 2, "num_hidden_layers": 4},
    "nemotron_h": {"num_hidden_layers": None},
    "ctrl": {"n_layer": 3, "num_hidden_layers": None},
    "gemma3": {"text_config": {**tiny.SMALL, "num_hidden_layers": 3}},
}
ADAPTED = (tiny.FAMILIES | tiny.MIXED).keys() - {"phimoe", "modernbert-decoder"}  # the former's router draws: refused
FROZEN = [name for name, sizes in tiny.FAMILIES.items() if "num_local_experts" not in sizes]  # experts do not train
SMALL_COPIES: dict[str, tuple[str, Json, Json]] = {
    **{f"{name}, lora": (name, {"method": "lora", "r": 4}, MORE.get(name, {})) for name in sorted(ADAPTED)},
    **{f"{name}, frozen": (name, {"method": "frozen", "last_blocks": 3}, {}) for name in FROZEN},
    "tied head": ("llama", {"method": "frozen", "lm_head": True}, {"tie_word_embeddings": True}),
    "gpt2, tied head": ("gpt2", {"method": "frozen", "lm_head": True}, {"tie_word_embeddings": True}),
    "embedding": ("gemma2", {"method": "lora", "target_modules": ["embed_tokens", "q_proj"]}, {}),
    "copied head": ("llama", {"method": "lora", "modules_to_save": ["lm_head"]}, {"tie_word_embeddings": True}),
}


@pytest.mark.parametrize("name", SMALL_COPIES)
def test_a_small_copy_of_every_model_passes_the_self_check(name: str) -> None:
    family, adapter, changes = SMALL_COPIES[name]
    blocks = {"n_layer": 3} if family == "gpt2" else {"num_hidden_layers": 3}
    base = tiny.model(family, **{**blocks, **changes})
    before, drawn = {key: value.clone() for key, value in base.state_dict().items()}, torch.get_rng_state()
    small = loading.shrunken(tm.recipe(adapter=adapter, data={"max_length": 32}), base, tm.CPU)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(torch.equal(value, before[key]) for key, value in base.state_dict().items())
    assert small.training
    assert len(adapters.blocks(small)[1]) == 2
    assert {p.dtype for p in small.parameters()} == {torch.float32}
    vocabulary = small.get_input_embeddings().weight.shape[0]
    assert vocabulary == loading.SHRUNKEN_VOCABULARY
    # Gemma 3's queries nearly vanish here: 1.3e-5 on a processor with AVX-512, of which rounding alone is 4e-6.
    most = 2e-5 if name == "gemma3, lora" else 1e-5
    assert tm.make_engine(small).self_check(vocabulary).error <= most


def test_the_small_copy_recomputes_where_the_run_does() -> None:
    config = tm.recipe(model={"gradient_checkpointing": True})
    small = loading.shrunken(config, tiny.model("llama"), tm.CPU)
    assert small.is_gradient_checkpointing
    assert tm.make_engine(small).self_check(small.config.vocab_size).error <= 1e-5


def test_an_architecture_that_cannot_be_built_small_is_refused() -> None:
    base = tiny.model("llama")
    base.config.num_attention_heads = 3  # no divisor of the hidden size
    base.config.head_dim = None
    for net in (base, tiny.model("modernbert-decoder")):  # the latter cannot be without a padding token
        with pytest.raises(Refused, match="self-check needs a small float32 copy"):
            loading.shrunken(tm.recipe(), net, tm.CPU)
