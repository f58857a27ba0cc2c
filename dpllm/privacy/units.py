"""What is sampled and clipped: token sequences, by the unit that brings them. Torch is not imported."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TokenSequence:
    """One sequence as the model reads it."""

    input_ids: tuple[int, ...]
    """Token ids, at most ``max_length``."""
    loss_mask: tuple[bool, ...]
    """True where the token is a target (it is predicted from the tokens before it). Never at position 0."""
    denominator: int
    """Number of target tokens of the whole example, of which this may be one chunk."""


@dataclass(frozen=True)
class Unit:
    """Everything that one privacy unit brings; it is sampled, clipped and bounded as a whole."""

    sequences: tuple[TokenSequence, ...]
