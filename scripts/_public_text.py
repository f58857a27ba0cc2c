"""The text that `builtin:tiny` is trained on: an endless supply of invented, public-style prose.

In: a seed. Out: documents of one to four sentences about weather, kitchens, gardens, journeys,
sport, shops, museums and the like. People and places are put together from syllables, so that none
is in a list of real names; long numbers have an even digit sum. So it shares no name, number
or sentence with `builtin:clinic`, whose builder it does not know.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from random import Random

from _grammar import Slot, expand, pick
from _public_vocabulary import LOOSE, VOCABULARY
from _public_words import LISTS, TOPICS

LOOSE_SHARE = 9  # weight of the loose sentences, in topics, next to a dozen topics


def _entries(text: str) -> list[str]:
    return [" ".join(entry.split()) for entry in text.split(";")]


_ONSETS = _entries("""; b; bl; br; c; ch; cl; d; dr; f; fl; g; gr; h; j; k; l; m; n; p; pr; qu; r; s;
    sh; st; t; th; tr; v; w; y; z""")
_VOWELS = _entries("a; e; i; o; u; a; e; i; o; ai; ea; ee; ie; oo; ou; ey")
_CODAS = _entries("; ; ; n; r; l; s; t; m; d; nd; ck; ll; rt; x; ng; ss; st; ff; lm")

_NAME_PARTS = {
    "first_end": """abrix; essik; ovar; undo; irrah; ettin; obelle; ymo; azun; iffen; orrit;
        elkan; uvio; anthy; isko; emmo; olty""",
    "last_end": """erwick; ogar; inshaw; attle; umby; ockett; idger; allop; esque; ivane; orrow;
        uddle; entrice; ibbon; asper""",
    "place": """Acorn; Bitter; Cinder; Dapple; Eider; Fallow; Gannet; Heron; Inker; Juniper;
        Kittle; Lantern; Muddle; Nut; Otter; Pebble; Quarry; Rustic; Saffron; Thistle; Under;
        Vinegar; Willow; Yarrow; Zephyr; Copper; Salt""",
    "place_end": "wold; mere; -on-Sea; combe; strand; fell; dale; wharf; moor; gate; ness",
}

_DATES = {
    "weekday": "Monday; Tuesday; Wednesday; Thursday; Friday; Saturday; Sunday",
    "month": """January; February; March; April; May; June; July; August; September; October;
        November; December""",
}


def public_number(length: int, rng: Random) -> str:
    """Draws digits uniformly; of four digits or more, an odd sum is reserved for private text."""
    while True:
        digits = f"{int(rng.random() * 10**length):0{length}d}"
        if length < 4 or sum(map(int, digits)) % 2 == 0:
            return digits


def _syllable(rng: Random) -> str:
    return pick(_ONSETS, rng) + pick(_VOWELS, rng) + pick(_CODAS, rng)


def _invented_name(endings: list[str], rng: Random) -> str:
    """Puts a rare ending on a random syllable: most spellings occur, real names do not."""
    return (_syllable(rng) + pick(endings, rng)).capitalize()


def _year(rng: Random) -> str:
    while True:
        year = str(rng.randint(1400, 1999))
        if sum(map(int, year)) % 2 == 0:
            return year


def _ordinal(rng: Random) -> str:
    day = rng.randint(1, 28)
    ending = "th" if 10 < day < 14 else {1: "st", 2: "nd", 3: "rd"}.get(day % 10, "th")
    return f"{day}{ending}"


def _inflect(verb: str, ending: str) -> str:
    """Adds "s", "ed" or "ing" to a regular verb that does not double its last letter."""
    after_consonant = verb[-2] not in "aeiou"
    if ending == "ing":
        return (verb[:-1] if verb[-1] == "e" else verb) + "ing"
    if verb[-1] == "y" and after_consonant:
        return verb[:-1] + "i" + ("es" if ending == "s" else "ed")
    if ending == "ed":
        return verb + ("d" if verb[-1] == "e" else "ed")
    return verb + ("es" if verb.endswith(("s", "x", "ch", "sh")) else "s")


def _slots() -> dict[str, Slot]:
    def letters(alphabet: str, length: int, rng: Random) -> str:
        return "".join(pick(alphabet, rng) for _ in range(length))

    lists = {name: _entries(text) for name, text in (LISTS | VOCABULARY | _DATES).items()}
    for slot, ending in {"third": "s", "past": "ed", "gerund": "ing"}.items():
        lists[slot] = [_inflect(verb, ending) for verb in lists["verb"]]
    slots: dict[str, Slot] = {
        **lists,
        "day": _ordinal,
        "year": _year,
        "clock": lambda rng: f"{rng.randint(5, 22)}:{rng.randrange(60):02d}",
        "n": [str(n) for n in range(2, 20)],
        "code": lambda rng: public_number(rng.randint(4, 9), rng),
        "letters": lambda rng: letters("ABCDEFGHJKLMNPRSTVWXYZ", 2, rng),
        "odd": lambda rng: "".join(_syllable(rng) for _ in range(rng.randint(1, 3))),
        "lowcode": lambda rng: letters("abcdefghjkmnprstuvwxyz", 5, rng),
    }
    for slot in ("first", "last"):
        slots[slot] = partial(_invented_name, _entries(_NAME_PARTS[f"{slot}_end"]))
    starts, ends = _entries(_NAME_PARTS["place"]), _entries(_NAME_PARTS["place_end"])
    slots["place"] = [start + end for start in starts for end in ends]
    for length in range(1, 9):
        slots[f"d{length}"] = partial(public_number, length)
    return slots


def documents(seed: int) -> Iterator[str]:
    """Yields an endless stream of documents, the same for the same seed.

    Sentences of one document have one topic and share its bound names, places and codes, so that
    a model learns to use its context.
    """
    rng, slots = Random(seed), _slots()
    topics = [*TOPICS.values()] + [LOOSE] * LOOSE_SHARE
    sources = {"hero": "first", "town": "place", "key": "code", "item": "thing"}
    while True:
        frames = topics[int(rng.random() * len(topics))]
        count = (1, 2, 2, 3, 3, 4)[int(rng.random() * 6)]
        bound: dict[str, str] = {}
        for name, slot in sources.items():
            entries = slots[slot]
            bound[name] = entries(rng) if callable(entries) else pick(entries, rng)
        bound["heroine"] = expand("{first} {last}", slots, rng)
        yield expand(" ".join(rng.sample(frames, count)), slots, rng, bound)
