"""The cases that the engine is held against brute force on: families, adapters and changes of their configuration."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import tiny
import tiny_models as tm
import torch
from hypothesis import HealthCheck, Phase, settings
from tiny_models import FROZEN, LORA, RAGGED, Toy
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from dpllm.privacy.schedule import Unit

MODES = ("held", "twice")  # how gradients are kept until the clipping factors are known
BF16 = partial(torch.autocast, "cpu", dtype=torch.bfloat16)
FP16 = partial(torch.autocast, "cpu", dtype=torch.float16)
FAMILIES = (
    "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "gpt2", "gpt_neox", "opt", "falcon",
)  # fmt: skip
TIED = {"tie_word_embeddings": True}
HEAD = {**FROZEN, "lm_head": True}
ATTENTION = {**LORA, "target_modules": ["q_proj", "v_proj"]}
EVERYTHING = ""
Case = tuple[str, dict[str, Any] | str, dict[str, Any]]


def lora(**changes: Any) -> dict[str, Any]:
    return {**LORA, **changes}


generated = settings(deadline=None, derandomize=True, phases=[Phase.generate], suppress_health_check=list(HealthCheck))


CASES: dict[str, Case] = {
    **{f"{family}, all-linear": (family, LORA, {}) for family in FAMILIES},
    **{f"{family}, last block": (family, FROZEN, {}) for family in FAMILIES},
    **{f"{family}, last block and head": (family, HEAD, {}) for family in ("llama", "gpt2", "opt", "gemma2")},
    **{f"{family}, last block and tied head": (family, HEAD, TIED) for family in ("llama", "gpt2", "opt", "gemma2")},
    **{f"{family}, everything": (family, EVERYTHING, {}) for family in ("llama", "qwen2", "gemma3_text", "gpt2")},
    **{f"{family}, everything, tied": (family, EVERYTHING, TIED) for family in ("llama", "gpt2", "gpt_neox")},
    "falcon with biases, all-linear": ("falcon", LORA, {"bias": True}),
    "falcon with biases, last block": ("falcon", FROZEN, {"bias": True}),
    "falcon, newer architecture, last block": ("falcon", FROZEN, {"new_decoder_architecture": True}),
    "llama, eager attention, all-linear": ("llama", LORA, {"attn_implementation": "eager"}),
    "gpt2, eager attention, last block": ("gpt2", FROZEN, {"attn_implementation": "eager"}),
    # DeepSeek V3.2 chooses the tokens to attend to among the padding too, so its padded rows are not its unpadded ones.
    **{f"{family}, auto": (family, LORA, {}) for family in tiny.MIXED if family != "deepseek_v32"},
    "stablelm, last block": ("stablelm", FROZEN, {}),
    "mixtral, attention": ("mixtral", ATTENTION, {}),
    "rsLoRA": ("llama", lora(use_rslora=True), {}),
    "LoRA, first factor frozen": ("llama", lora(lora_a="frozen"), {}),
    "LoRA, first factor frozen, and head": ("gpt2", lora(lora_a="frozen", modules_to_save=["lm_head"]), {}),
    "LoRA and head": ("llama", lora(modules_to_save=["lm_head"]), {}),
    "LoRA and tied head": ("llama", lora(modules_to_save=["lm_head"]), TIED),
    "LoRA, embedding and head": ("llama", lora(modules_to_save=["embed_tokens", "lm_head"]), {}),
    "LoRA, tied embedding and head": ("llama", lora(modules_to_save=["embed_tokens", "lm_head"]), TIED),
    "gpt2, LoRA, tied embedding and head": ("gpt2", lora(modules_to_save=["wte", "lm_head"]), TIED),
    "LoRA on the embedding": ("llama", lora(target_modules=["embed_tokens"]), {"pad_token_id": None}),
    "LoRA on the embedding, its padding_idx among the tokens": (
        "llama", lora(target_modules=["embed_tokens", "q_proj"]), {"pad_token_id": 9},
    ),
    "LoRA on embedding and head": ("llama", lora(target_modules=["embed_tokens", "lm_head"]), {}),
    "LoRA on a tied embedding": ("llama", lora(target_modules=["embed_tokens", "down_proj"]), TIED),
    "LoRA on a scaled embedding": ("gemma3_text", lora(target_modules=["embed_tokens", "q_proj"]), {}),
    "gpt2, LoRA on the embedding": ("gpt2", lora(target_modules=["wte", "c_attn"]), {}),
    "padding_idx among the tokens": ("llama", EVERYTHING, {"pad_token_id": 9}),
    "padding_idx among the tokens, tied": ("opt", "embed_tokens", {"pad_token_id": 9, **TIED}),
    "positions alone": ("gpt2", "wpe", {}),
}  # fmt: skip


@cache
def built(name: str) -> Any:
    family, adapter, changes = CASES[name]
    return tm.build(family, adapter, **changes)


@cache
def ragged() -> list[Unit]:
    """Ragged units; token 9, which is some models' padding_idx, is one of each sequence's tokens."""
    return [
        Unit(tuple(tm.replace_token(sequence, len(sequence.input_ids) // 2, 9) for sequence in unit.sequences))
        for unit in tm.units(RAGGED)
    ]


@cache
def reference(name: str) -> Tensor:
    return tm.brute_force(built(name), ragged())


class Shapes(TorchDispatchMode):
    """Records the largest of all tensors that operations make (of one type, if asked), and each product of matrices in order."""

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.dtype, self.largest = dtype, 0
        self.products: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(value, Tensor) and self.dtype in (None, value.dtype):
                self.largest = max(self.largest, value.numel())
                if function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
                    self.products.append(tuple(value.shape))
        return result


class TiedThroughModules(Toy):
    """Embedding, a layer in between and the head share their weights pairwise, all of them called as modules."""

    def __init__(self) -> None:
        super().__init__()
        self.embed.requires_grad_(True)
        self.head.weight = self.embed.weight
        self.other = nn.Linear(8, 8, bias=False)
        self.other.weight = self.layer.weight

    def hidden(self, x_RTd: Tensor) -> Tensor:
        return self.layer(x_RTd) + self.other(x_RTd.cos())
