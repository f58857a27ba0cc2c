"""A canary as tokens, and which of them are its secret.

Comes in: a canary and a tokenizer. Goes out: the sequence that training would see, and a mask. Must not see data.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dpllm.canaries.canaries import Canary
from dpllm.errors import ConfigError, DataError
from dpllm.text.data import Format, TokenSequence, encode


def encode_secret(
    canary: Canary, fmt: Format, tokenizer: Any, max_length: int, long_examples: str
) -> tuple[TokenSequence, tuple[bool, ...]]:
    """Encodes a canary as training does, and finds the tokens of its secret.

    They are the shortest run of tokens, as far to the right as possible, whose decoding contains the secret.

    Returns:
        The sequence, and a mask over its tokens.

    Raises:
        ConfigError: The canary does not fit into max_length, or its secret is not a training target.
    """
    try:
        sequences = encode(canary.example(fmt), fmt, tokenizer, max_length, long_examples)
    except DataError as error:
        raise ConfigError(f"canary {canary.canary_id} cannot be encoded: {error}") from None
    span = _find(canary.secret, sequences[0].input_ids, tokenizer) if len(sequences) == 1 else None
    if span is None:
        raise ConfigError(
            f"canary {canary.canary_id} does not fit into data.max_length ({max_length} tokens), so its secret would "
            "not be trained on as a whole; raise data.max_length, or lower audit.canaries.digits or audit.canaries.tokens."
        )
    mask = tuple(span[0] <= position < span[1] for position in range(len(sequences[0].input_ids)))
    if any(scored and not target for scored, target in zip(mask, sequences[0].loss_mask, strict=True)):
        raise ConfigError(
            f"canary {canary.canary_id}: its secret is not a training target in format {fmt}, so there would be "
            "nothing to find; set data.format to text or prompt_completion."
        )
    return sequences[0], mask


def _find(secret: str, ids: Sequence[int], tokenizer: Any) -> tuple[int, int] | None:
    """First and last-plus-one token of the secret; a chat template may put tokens of its own behind it."""
    for start in range(len(ids) - 1, -1, -1):
        if secret in tokenizer.decode(ids[start:]):
            end = next(end for end in range(start + 1, len(ids) + 1) if secret in tokenizer.decode(ids[start:end]))
            return start, end
    return None
