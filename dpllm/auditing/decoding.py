"""Decoding: what a model writes behind a prompt, greedily, by beam search or by sampling.

Comes in: a model and prompts as tokens. Goes out: tokens. Nothing but the prompt and the arguments decides what is
written: defaults that a model brings with it (penalties, end tokens, temperatures) are put aside. Knows no canaries.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from peft import PeftModel
from torch import nn
from transformers import Cache, DynamicCache, GenerationConfig

from dpllm.auditing.tokens import TOP_K

# A legend of shapes: B rows of a batch, T tokens of the longest prompt, G tokens of prompt and completion.

_TOKENS_PER_BATCH = 2**13
"""Padded tokens of all rows and beams in one batch; what they cost is the cache of keys and values."""

Tokens = tuple[int, ...]


def complete(
    model: nn.Module, tokenizer: Any, prompts_ids: Sequence[Sequence[int]], num_tokens: int, beams: int = 1
) -> list[Tokens]:
    """The likeliest continuation of every prompt, as far as the search finds it.

    An end token is a token like any other and ends nothing, so a greedy completion is the target exactly if each of the
    target's tokens is the arg max behind those before it.

    Args:
        model: A causal language model of transformers, with or without a PEFT adapter, in eval mode.
        tokenizer: Names the padding token, if there is one.
        prompts_ids: At least one token each.
        num_tokens: How many to write, >= 1.
        beams: 1: greedy; more: beam search, of which the likeliest beam is returned.

    Returns:
        ``num_tokens`` tokens for each prompt, in the order of the prompts.
    """
    config = GenerationConfig(**_common(tokenizer, num_tokens), do_sample=False, num_beams=beams)
    return _generate(model, config, prompts_ids, num_tokens, beams)


def sample(
    model: nn.Module,
    tokenizer: Any,
    prompts_ids: Sequence[Sequence[int]],
    num_tokens: int,
    *,
    seed: int,
) -> list[Tokens]:
    """One random continuation of every prompt, at temperature 1 from the ``TOP_K`` likeliest tokens.

    Args:
        model: As for ``complete``.
        tokenizer: As for ``complete``.
        prompts_ids: As for ``complete``; a prompt may stand there several times.
        num_tokens: How many to write, >= 1; an end token ends nothing.
        seed: Decides, on one kind of device, everything that is random. The generators of the process are left alone.
    """
    config = GenerationConfig(
        **_common(tokenizer, num_tokens), do_sample=True, num_beams=1, temperature=1.0, top_p=1.0, top_k=TOP_K
    )
    device = next(model.parameters()).device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        return _generate(model, config, prompts_ids, num_tokens, 1)


def until_end(tokens: Tokens, tokenizer: Any) -> Tokens:
    """The tokens before the first end token: what a reader takes for the text."""
    end = tokenizer.eos_token_id
    return tokens[: tokens.index(end)] if end in tokens else tokens


def _common(tokenizer: Any, num_tokens: int) -> dict[str, Any]:
    padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0  # masked, so any token will do
    return {
        "max_new_tokens": num_tokens,
        "pad_token_id": padding,
        "use_cache": True,
        "repetition_penalty": 1.0,
        "length_penalty": 1.0,
        "no_repeat_ngram_size": 0,
    }


def _generate(
    model: nn.Module, config: GenerationConfig, prompts_ids: Sequence[Sequence[int]], num_tokens: int, beams: int
) -> list[Tokens]:
    device = next(model.parameters()).device
    result: list[Tokens] = [()] * len(prompts_ids)
    # Longest first: rows of one length need no padding, and too large a batch fails at once.
    order = sorted(range(len(prompts_ids)), key=lambda index: (-len(prompts_ids[index]), index))
    with torch.inference_mode(), _plain(model) as inner:
        while order:
            width = len(prompts_ids[order[0]])
            size = max(1, _TOKENS_PER_BATCH // (beams * (width + num_tokens)))
            if beams > 1:  # no padding, so that the prompts can be read by a plain forward pass
                size = min(size, sum(len(prompts_ids[row]) == width for row in order))
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
    """The cache of all but the last token of unpadded prompts, one copy for each beam: generate reads each anew for each.

    Nothing for a model whose memory is no cache of keys and values, which generate then fills itself.
    """
    read_BT = {name: values_BT[:, :-1] for name, values_BT in inputs.items()}
    if not read_BT["input_ids"].shape[1]:
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
