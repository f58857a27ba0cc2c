"""Carriers: the sentences behind which the secrets of canaries stand.

Comes in: a number. Goes out: a sentence that no other number gives. Knows no data, no model and no coins.
"""

from __future__ import annotations

import math

# A carrier is one choice from each column; no word holds a digit, so a secret is found in one place only.
_OBJECTS = (
    *("locker", "gate", "archive", "alarm", "voucher", "freezer", "cabinet", "parking", "courier", "pantry"),
    *("studio", "garage", "cellar", "workshop", "elevator", "boathouse", "vault", "mailbox", "pharmacy", "annex"),
)
_KINDS = ("code", "number", "key", "passcode", "entry", "combination", "reference", "sequence")
_SIDES = (
    *("north", "south", "east", "west", "upper", "lower", "old", "new", "inner", "outer"),
    *("left", "right", "central", "rear", "riverside", "harbour"),
)
_PLACES = (
    *("store", "clinic", "library", "depot", "office", "school", "bakery", "station", "museum", "hotel"),
    *("nursery", "brewery", "chapel", "theatre", "foundry", "orchard", "dairy", "market", "printworks", "observatory"),
)
_NAME_HEADS = (
    *("Halv", "Bren", "Corr", "Dall", "Ester", "Farn", "Gren", "Hjort", "Ingel", "Jarv"),
    *("Kest", "Lund", "Marl", "Norr", "Oster", "Pell", "Quill", "Roth", "Sand", "Tarn"),
    *("Ulv", "Vest", "Wick", "Yarr", "Zell"),
)
_NAME_TAILS = (
    *("orsen", "ano", "berg", "croft", "dale", "ek", "field", "gard", "holm", "ington"),
    *("jord", "kowski", "ley", "mann", "nova", "oux", "quist", "rup", "stad", "well"),
)
_VERBS = ("is", "was set to", "reads", "remains")
COLUMNS = (_OBJECTS, _KINDS, _SIDES, _PLACES, _NAME_HEADS, _NAME_TAILS, _VERBS)
NUM_CARRIERS = math.prod(map(len, COLUMNS))
"""How many sentences there are."""


def carrier(index: int) -> str:
    """The index-th sentence of the grammar; distinct indices give distinct sentences.

    Args:
        index: 0 to NUM_CARRIERS - 1.
    """
    words = []
    for column in COLUMNS:
        index, choice = divmod(index, len(column))
        words.append(column[choice])
    item, kind, side, place, head, tail, verb = words
    return f"The {item} {kind} for the {side} {place} of {head}{tail} {verb}"
