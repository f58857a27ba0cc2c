"""vLLM in place of transformers, where it is installed: a model that draws tokens and is asked for nothing else.

Comes in: a base model's name, an export, token ids, what was asked. Goes out: token ids. Must not read text, nor encode it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers
from transformers import GenerationConfig

from dpllm.errors import ConfigError
from dpllm.files import read_json
from dpllm.model import loading
from dpllm.recipe.config import ModelConfig

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Of adapters: those that vLLM makes room for."""


@dataclass(frozen=True)
class Served:
    """A model in vLLM: base and adapter, or whole weights.

    Attributes:
        llm: ``vllm.LLM``.
        adapter: ``vllm.lora.request.LoRARequest``; None: whole weights.
        params: ``vllm.SamplingParams``.
    """

    config: Any
    generation_config: Any
    llm: Any
    adapter: Any
    params: Any

    @classmethod
    def start(cls, base: ModelConfig | None, export: Path) -> Served:
        """Loads base and adapter; without a base, ``export`` holds whole weights.

        Raises:
            ConfigError: vLLM is not installed, or the adapter has a rank beyond what it takes.
        """
        try:
            from vllm import LLM, SamplingParams
            from vllm.lora.request import LoRARequest
        except ImportError:
            raise ConfigError(
                "--engine vllm: vLLM is not installed, which would draw the tokens. Type: pip install 'dpllm[vllm]', or leave "
                "--engine out."
            ) from None
        place, settings = str(export), {}
        if base is not None:
            rank = int(read_json(export / "adapter_config.json")["r"])
            if rank > RANKS[-1]:
                raise ConfigError(
                    f"--engine vllm: takes adapters of rank {RANKS[-1]} at most, and this one has {rank}. Leave --engine out."
                )
            room = next(one for one in RANKS if one >= rank)
            settings = {"enable_lora": True, "max_lora_rank": room, "revision": base.revision}
            place = str(loading.source(base.name_or_path))
        config = transformers.AutoConfig.from_pretrained(place, revision=settings.get("revision"))
        try:
            own = GenerationConfig.from_pretrained(place, revision=settings.get("revision"))
        except OSError:
            own = GenerationConfig.from_model_config(config)
        llm = LLM(model=place, tokenizer=str(export), generation_config="vllm", **settings)
        return cls(config, own, llm, LoRARequest("tuned", 1, str(export)) if base else None, SamplingParams)

    def write(
        self, settings: GenerationConfig, prompts_ids: Sequence[Sequence[int]], seed: int
    ) -> list[tuple[int, ...]]:
        """What the model writes behind every prompt, up to an end token; each prompt has a seed of its own, by ``seed``."""
        draw = random.Random(seed)
        params = [
            self.params(
                temperature=settings.temperature if settings.do_sample else 0.0,
                top_p=settings.top_p if settings.do_sample else 1.0,
                max_tokens=settings.max_new_tokens,
                stop_token_ids=settings.eos_token_id,
                seed=draw.getrandbits(63),
            )
            for _ in prompts_ids
        ]
        asked = [{"prompt_token_ids": list(ids)} for ids in prompts_ids]
        found = self.llm.generate(asked, params, lora_request=self.adapter, use_tqdm=False)
        ends = settings.eos_token_id or []
        return [
            (*one.outputs[0].token_ids, *(ends[:1] if one.outputs[0].finish_reason == "stop" else ())) for one in found
        ]
