"""A very small text grammar, shared by the builders of the embedded data and model.

In: a template, slot lists and a seeded generator. Out: one line of text. This file contains no words
of the texts, so the texts of the two builders share no phrase through it.

Template syntax:
    {slot}        one entry of the list `slot`, or the value bound to that name
    {slot:name}   the same, and remembered as `name` for the rest of the text
    [clause]      kept half of the time; may contain slots, not another clause
    a(n)          "a" or "an", whichever the next word needs
Entries may contain templates. Sentences start with a capital letter.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from random import Random

Slot = Sequence[str] | Callable[[Random], str]

_CLAUSE = re.compile(r"\[([^\[\]]*)\]")
_SLOT = re.compile(r"\{(\w+)(?::(\w+))?\}")
_ARTICLE = re.compile(r"\b([Aa])\(n\) (?=(\W*\w))")
_SENTENCE_START = re.compile(r"(?:^|(?<=[.!?] ))[a-z]")


def pick(entries: Sequence[str], rng: Random) -> str:
    """Returns one entry, each with the same probability."""
    return entries[int(rng.random() * len(entries))]


def expand(template: str, slots: Mapping[str, Slot], rng: Random, bound: Mapping[str, str] | None = None) -> str:
    """Returns one text of the template.

    Args:
        template: The sentence or sentences, in the syntax at the top of this file.
        slots: What each slot may hold: a list of entries, or a function that draws one.
        rng: The only source of randomness.
        bound: Slots that are already decided, such as a patient's name.

    Raises:
        KeyError: A slot of the template is neither bound nor listed.
    """
    memory = dict(bound or {})

    def fill(match: re.Match[str]) -> str:
        slot, name = match.groups()
        text = memory.get(slot)
        if text is None:
            entries = slots[slot]
            text = entries(rng) if callable(entries) else pick(entries, rng)
        text = unfold(text)
        if name:
            memory[name] = text
        return text

    def unfold(text: str) -> str:
        if "[" in text:
            text = _CLAUSE.sub(lambda m: m[1] if rng.random() < 0.5 else "", text)
        return _SLOT.sub(fill, text) if "{" in text else text

    return _tidy(unfold(template))


def _tidy(text: str) -> str:
    text = _ARTICLE.sub(lambda m: m[1] + ("n " if m[2][-1] in "aeiouAEIOU8" else " "), text)
    return _SENTENCE_START.sub(lambda m: m[0].upper(), text)
