"""What a model writes behind prompts, many at a time.

Comes in: a model, prompts as tokens. Goes out: the tokens that it writes. These are decided by the prompt and the arguments
alone: defaults that a model brings with it (penalties, end tokens, temperatures) are put aside.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from transformers import GenerationConfig

from dpllm.model.evaluate import contiguous_head, rows_at_once

# A legend of shapes: B rows of a batch, T tokens of the longest prompt, G tokens of prompt and completion.

_TOKENS_PER_BATCH = 2**13
"""Padded tokens of all rows and beams in one batch; what they cost is the cache of keys and values."""

Tokens = tuple[int, ...]


def settings(
    tokenizer: Any,
    num_tokens: int,
    ends: Collection[int],
    *,
    beams: int = 1,
    temperature: float = 0.0,
    top_p: float = 1.0,
) -> GenerationConfig:
    """How a text is written.

    Args:
        tokenizer: Names the padding, which stands behind an end token.
        num_tokens: For each prompt, at most, >= 1.
        ends: Tokens that end a text; of none a text has all its tokens.
        beams: More than 1: beam search, of which the likeliest beam is taken, by log p for each token.
        temperature: 0: the likeliest token each time.
        top_p: Only the likeliest tokens that together have this probability, in (0, 1].
    """
    padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else min(ends, default=0)
    chance = {"do_sample": True, "temperature": temperature, "top_p": top_p, "top_k": 0}
    return GenerationConfig(
        max_new_tokens=num_tokens,
        pad_token_id=padding,
        eos_token_id=sorted(ends) or None,
        num_beams=beams,
        **(chance if temperature > 0 else {"do_sample": False}),
    )


def end_tokens(model: Any, tokenizer: Any) -> set[int]:
    """The tokens that end a text: the model's own, of which a chat model may have several, and the tokenizer's."""
    inner = model.get_base_model() if isinstance(model, PeftModel) else model
    own = inner.generation_config.eos_token_id
    return {*(own if isinstance(own, list) else [own]), tokenizer.eos_token_id} - {None}


def until_end(tokens: Tokens, tokenizer: Any) -> Tokens:
    """The tokens before the first end token: what a reader takes for the text."""
    end = tokenizer.eos_token_id
    return tokens[: tokens.index(end)] if end in tokens else tokens


def write(model: nn.Module, config: GenerationConfig, prompts_ids: Sequence[Sequence[int]]) -> list[Tokens]:
    """What a model writes behind every prompt, many at a time: the same as one at a time, but for rounding.

    Args:
        model: A causal language model of transformers, with or without a PEFT adapter, in eval mode.
        config: Of ``settings``.
        prompts_ids: At least one token each.
    """
    device = next(model.parameters()).device
    beams, num_tokens = int(config.num_beams), int(config.max_new_tokens)
    result: list[Tokens] = [()] * len(prompts_ids)
    # Longest first: rows of like length need little padding, and too large a batch fails at once.
    order = sorted(range(len(prompts_ids)), key=lambda index: (-len(prompts_ids[index]), index))
    with torch.inference_mode(), _plain(model) as inner, contiguous_head(inner):
        while order:
            width = len(prompts_ids[order[0]])
            size = max(1, _TOKENS_PER_BATCH // (beams * (width + num_tokens)))
            size = rows_at_once(inner, size, width + num_tokens)
            rows, order = order[:size], order[size:]
            ids_BT = torch.full((len(rows), width), int(config.pad_token_id), dtype=torch.long)
            real_BT = torch.zeros_like(ids_BT)
            for place, row in enumerate(rows):
                prompt = torch.tensor(tuple(prompts_ids[row]), dtype=torch.long)
                ids_BT[place, width - len(prompt) :] = prompt
                real_BT[place, width - len(prompt) :] = 1
            inputs = {"input_ids": ids_BT.to(device), "attention_mask": real_BT.to(device)}
            written_BG = inner.generate(**inputs, generation_config=config)
            for row, written in zip(rows, written_BG[:, width:].tolist(), strict=True):
                result[row] = tuple(written)
    return result


@contextlib.contextmanager
def _plain(model: Any) -> Iterator[Any]:
    """The model that generates, without the defaults that it brings; transformers puts them where a value is unset."""
    inner = model.get_base_model() if isinstance(model, PeftModel) else model
    own = inner.generation_config
    inner.generation_config = GenerationConfig()
    try:
        yield inner
    finally:
        inner.generation_config = own
