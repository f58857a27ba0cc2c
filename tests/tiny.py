"""Tiny models with random weights and a small tokenizer, built where a test needs them: no download, no time."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from dpllm.recipe.config import DataConfig
from dpllm.text import data
from dpllm.text.layouts import Row

Json = dict[str, Any]

NAMES = ("Anna", "Bodil", "Carl", "Dagny", "Erik", "Frida", "Gustav", "Hedda", "Ivar", "Jonna")
THINGS = ("a red boat", "seven plums", "the old key", "a grey coat", "two letters", "the blue lamp")
CHAT = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SMALL: Json = {
    "vocab_size": 384,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "tie_word_embeddings": False,
}
FAMILIES: dict[str, Json] = {
    "llama": {},
    "mistral": {},
    "qwen2": {},
    "qwen3": {},
    "gemma2": {},
    "gemma3_text": {},
    "phi3": {},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "phimoe": {"num_local_experts": 4, "num_experts_per_tok": 2},  # its router is an ordinary linear layer
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 128},
    "gpt_neox": {},
    "opt": {"ffn_dim": 24, "word_embed_proj_dim": 16},
    "falcon": {"head_dim": None},  # its configuration computes it
}

EXPERTS: Json = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "moe_intermediate_size": 8,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
LATENT: Json = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
STATES: Json = {"state_size": 4, "ssm_state_size": 4, "n_groups": 1, "chunk_size": 8}
# Parts of them are not for LoRA, or their blocks are found less easily.
MIXED: dict[str, Json] = {
    "deepseek_v2": {**EXPERTS, **LATENT},
    "deepseek_v3": {**EXPERTS, **LATENT},
    "deepseek_v32": {**EXPERTS, **LATENT, "index_n_heads": 2, "index_head_dim": 16, "index_topk": 8},
    "glm4_moe": EXPERTS,
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 8, "mlp_only_layers": [0]},
    "qwen3_moe": EXPERTS,
    "qwen3_next": {
        **EXPERTS, "shared_expert_intermediate_size": 8, "layer_types": ["linear_attention", "full_attention"],
        "linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    },
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1, "moe_intermediate_size": 8},
    "exaone_moe": {**EXPERTS, "num_shared_experts": 1, "sliding_window": 8},
    "jamba": {
        "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
        "num_experts": 4, "num_experts_per_tok": 2, "mamba_d_state": 4, "mamba_dt_rank": 4,
    },
    "mamba": {**STATES, "time_step_rank": 4},
    "mamba2": {**STATES, "num_heads": 4},
    "nemotron_h": {
        **EXPERTS, **STATES, "layers_block_type": ["mamba", "moe", "attention", "mlp"], "num_hidden_layers": None,
        "mamba_num_heads": 4, "mamba_head_dim": 8, "moe_shared_expert_intermediate_size": 8,
    },
    "stablelm": {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": None, "qk_layernorm": True},
    "ctrl": {"n_embd": 16, "dff": 24, "n_layer": 2, "n_head": 2, "n_positions": 128},
    "modernbert-decoder": {"head_dim": None, "local_attention": 8},
    "gemma3": {  # with an encoder of images that has more blocks and the same names
        "text_config": SMALL,
        "vision_config": {
            "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2, "image_size": 16,
            "patch_size": 8,
        },
        "mm_tokens_per_image": 4,
    },
}  # fmt: skip


def sentence(number: int) -> str:
    return f"{NAMES[number % len(NAMES)]} bought {THINGS[number % len(THINGS)]} on day {number}."


@cache
def _backend() -> str:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=SMALL["vocab_size"],
        special_tokens=["<s>", "</s>", "<pad>", "<|user|>", "<|assistant|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([sentence(number) for number in range(200)], trainer)
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return str(backend.to_str())


def tokenizer(*, chat_template: str | None = CHAT) -> Any:
    """Byte-level BPE that puts <s> first, as Llama's does; ids 0, 1, 2 are <s>, </s>, <pad>."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    made = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_backend()), bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )
    made.chat_template = chat_template
    return made


def model(family: str = "llama", **changes: Any) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(5)
    settings = {**SMALL, **(FAMILIES | MIXED)[family], **changes}
    settings = {key: value for key, value in settings.items() if value is not None}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings))


def save_model(path: Path, family: str = "llama", *, chat_template: str | None = CHAT, **changes: Any) -> Path:
    """A checkpoint with its tokenizer, as a user's local directory holds it."""
    model(family, **changes).save_pretrained(path)
    tokenizer(chat_template=chat_template).save_pretrained(path)
    return path


def reads(max_length: int, long_examples: str = "truncate", **more: Any) -> Any:
    """A recipe's data section that says how rows become tokens."""
    from dpllm.recipe.config import DataConfig

    return DataConfig.model_validate({"train": "-", "max_length": max_length, "long_examples": long_examples, **more})


def write_rows(path: Path, rows: Iterable[Json]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def rows(records: Iterable[Json], unit: str = "example") -> list[Row]:
    """As a table holds them, each with what its column ``unit`` says."""
    return [Row(dict(row), row.get(unit)) for row in records]


def count_units(settings: DataConfig, cache: Path) -> int:
    """How many things can be sampled from the training data, N without canaries."""
    return len(data.sampled_rows(data.load_table(settings.train, settings, settings.train_split, cache), settings))
