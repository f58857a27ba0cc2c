"""What a model writes behind prompts, many at a time.

Comes in: a model, prompts as tokens. Goes out: the tokens that it writes. These are decided by the prompt and the arguments
alone: defaults that a model brings with it (penalties, end tokens, temperatures) are put aside.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from transformers import Cache, DynamicCache, GenerationConfig

from dpllm.model.evaluate import contiguous_head, rows_at_once

# A legend of shapes: B rows of a batch, T tokens of the longest prompt, G tokens of prompt and completion.

_TOKENS_PER_BATCH = 2**13
"""Padded tokens of all rows and beams in one batch; what they cost is the cache of keys and values."""

Tokens = tuple[int, ...]


def complete(
    model: nn.Module,
    tokenizer: Any,
    prompts_ids: Sequence[Sequence[int]],
    num_tokens: int,
    beams: int = 1,
    *,
    ends: bool = False,
) -> list[Tokens]:
    """The likeliest continuation of every prompt, as far as the search finds it.

    Args:
        model: A causal language model of transformers, with or without a PEFT adapter, in eval mode.
        tokenizer: Names the padding and the end token.
        prompts_ids: At least one token each.
        num_tokens: For each prompt, >= 1.
        beams: 1: greedy; more: beam search, of which the likeliest beam is returned.
        ends: Whether an end token ends a text; beams of unequal length are then compared by log p for each token. If not, it is a
            token like any other, so a greedy completion is the target exactly if each of the target's tokens is the arg max
            behind those before it.
    """
    padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0  # masked, so any token will do
    config = GenerationConfig(
        max_new_tokens=num_tokens,
        pad_token_id=padding,
        eos_token_id=tokenizer.eos_token_id if ends else None,
        do_sample=False,
        num_beams=beams,
        use_cache=True,
        repetition_penalty=1.0,
        length_penalty=1.0,
        no_repeat_ngram_size=0,
    )
    return write(model, config, prompts_ids)


def until_end(tokens: Tokens, tokenizer: Any) -> Tokens:
    """The tokens before the first end token: what a reader takes for the text."""
    end = tokenizer.eos_token_id
    return tokens[: tokens.index(end)] if end in tokens else tokens


def write(model: nn.Module, config: GenerationConfig, prompts_ids: Sequence[Sequence[int]]) -> list[Tokens]:
    """What a model writes behind every prompt, many at a time: the same as one at a time, but for rounding.

    Args:
        model: As for ``complete``; what it brings of its own to generate by is put aside.
        config: With ``max_new_tokens``, ``pad_token_id`` and ``num_beams``. Behind an end token there is padding.
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
            real_BT = torch.zeros(len(rows), width, dtype=torch.long)
            for place, row in enumerate(rows):
                prompt = torch.tensor(tuple(prompts_ids[row]), dtype=torch.long)
                ids_BT[place, width - len(prompt) :] = prompt
                real_BT[place, width - len(prompt) :] = 1
            inputs = {"input_ids": ids_BT.to(device), "attention_mask": real_BT.to(device)}
            if beams > 1:
                inputs |= _read_once(inner, inputs, beams)
            written_BG = inner.generate(**inputs, generation_config=config)
            for row, written in zip(rows, written_BG[:, width:].tolist(), strict=True):
                result[row] = tuple(written)
    return result


def _read_once(model: Any, inputs: dict[str, torch.Tensor], beams: int) -> dict[str, Cache]:
    """The cache of all but the last token of the prompts, one copy for each beam: generate reads each anew for each.

    Nothing for a model whose memory is no cache of keys and values, or that cannot be told where a padded prompt begins; generate
    then fills it itself.
    """
    read_BT = {name: values_BT[:, :-1] for name, values_BT in inputs.items()}
    real_BT = read_BT["attention_mask"]
    if not real_BT.all() and "position_ids" not in inspect.signature(model.forward).parameters:
        return {}
    if not real_BT.all():
        read_BT["position_ids"] = (real_BT.cumsum(dim=1) - 1).clamp(min=0)
    if not real_BT.shape[1]:
        return {}
    cache: Any = getattr(model(**read_BT, use_cache=True), "past_key_values", None)
    if type(cache) is not DynamicCache:
        return {}
    cache.batch_repeat_interleave(beams)
    return {"past_key_values": cache}


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
