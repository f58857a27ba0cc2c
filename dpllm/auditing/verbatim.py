"""Verbatim and nearly so: how close a generated text comes to a secret.

Comes in: a completion and its target, as tokens and as characters. Goes out: whether they agree, up to a stated share of
edits. Knows no model.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

NEAR = 0.1
"""Share of edits, of the longer one's length, up to which two texts are nearly the same."""


@dataclass(frozen=True)
class Match:
    """How one completion compares with its target."""

    exact: bool
    """The same tokens."""
    near_tokens: bool
    """At most ``NEAR`` of the tokens have to be edited."""
    near_characters: bool
    """At most ``NEAR`` of the characters have to be edited."""
    common_share: float
    """Length of the longest run of characters that both hold, as a share of the target's length."""


def edit_distance(first: Sequence[Hashable], second: Sequence[Hashable]) -> int:
    """Levenshtein's distance: the fewest insertions, deletions and substitutions that turn one into the other."""
    row = list(range(len(second) + 1))
    for place, item in enumerate(first, start=1):
        before, row = row, [place]
        for column, other in enumerate(second, start=1):
            row.append(min(before[column] + 1, row[-1] + 1, before[column - 1] + (item != other)))
    return row[-1]


def edit_share(first: Sequence[Hashable], second: Sequence[Hashable]) -> float:
    """``edit_distance`` over the longer length: 0 for equal sequences, 1 for sequences that share nothing."""
    return edit_distance(first, second) / max(1, len(first), len(second))


def common_share(text: str, target: str) -> float:
    """Length of the longest common substring over the target's length: 1 where the text holds the target."""
    if not target:
        return 0.0
    longest = SequenceMatcher(None, text, target, autojunk=False).find_longest_match()
    return longest.size / len(target)


def compare(tokens: Sequence[int], text: str, target_tokens: Sequence[int], target: str) -> Match:
    """Compares a completion with its target, as tokens and as characters; space around the texts does not count."""
    text, target = text.strip(), target.strip()
    return Match(
        exact=tuple(tokens) == tuple(target_tokens),
        near_tokens=edit_share(tokens, target_tokens) <= NEAR,
        near_characters=edit_share(text, target) <= NEAR,
        common_share=common_share(text, target),
    )
