"""Tiny models with random weights and a small tokenizer, built where a test needs them: no download, no time."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

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
    settings = {**SMALL, **FAMILIES[family], **changes}
    settings = {key: value for key, value in settings.items() if value is not None}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings))


def save_model(path: Path, family: str = "llama", *, chat_template: str | None = CHAT, **changes: Any) -> Path:
    """A checkpoint with its tokenizer, as a user's local directory holds it."""
    model(family, **changes).save_pretrained(path)
    tokenizer(chat_template=chat_template).save_pretrained(path)
    return path


def write_rows(path: Path, rows: Iterable[Json]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
