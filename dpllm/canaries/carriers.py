"""Carriers: the sentences behind which the secrets of canaries stand; and invented personal details.

Comes in: a number, or a source of random numbers. Goes out: a sentence that no other number gives; pairs of a sentence that
names a person, and the detail. Names are Faker's, and nothing belongs to anybody: phone numbers are those reserved for
fiction, card numbers fail the check digit that every real one passes, and example.org receives no mail. Knows no data, no
model and no coins.
"""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING

from dpllm.errors import ConfigError

if TYPE_CHECKING:
    from faker import Faker


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


AREA_CODES = tuple(f"{code}" for code in range(200, 990) if code % 100 // 10 < 9 and code % 100 != 11)
"""As they are formed in North America; all have the exchange 555."""
LOG2_SECRETS = math.log2(len(AREA_CODES) * 100)
"""Of a phone number, in bits: area code and the last two digits. A card number or an address has more."""
SENTENCES = {
    "phone": "The phone number of {} is",
    "card": "The card number of {} is",
    "email": "The e-mail address of {} is",
}
TRIES = 400


def draw(total: int, generator: random.Random) -> list[tuple[str, str]]:
    """Sentences and details, all distinct; what is told of a person is drawn uniformly, whoever it is.

    Args:
        total: How many.
        generator: Seeds Faker; for tests a seeded one, else the operating system's.

    Returns:
        Pairs such as ("The phone number of Joyce Hall is", "312-555-0147").

    Raises:
        ConfigError: More than there are people or details.
    """
    from faker import Faker

    fake = Faker("en_US", use_weighting=False)
    fake.seed_instance(generator.getrandbits(256))
    people: dict[str, tuple[str, str]] = {}
    taken: set[str] = set()
    for _ in range(total):
        what = fake.random_element(tuple(SENTENCES))
        for _ in range(TRIES):
            person, detail = f"{fake.first_name()} {fake.last_name()}", _detail(what, fake)
            if person not in people and detail not in taken:
                break
        else:
            raise ConfigError(
                f"audit.canaries: {total} canaries and references of kind pii need as many distinct people and phone numbers, "
                f"and {len(people)} were found; lower audit.canaries.groups and references, or use kind digits."
            )
        people[person] = (SENTENCES[what].format(person), detail)
        taken.add(detail)
    return list(people.values())


def passes_luhn(number: str) -> bool:
    """Whether the last digit is the check digit of the others, as on every real card.

    References:
        ISO/IEC 7812-1, annex B.
    """
    digits = [int(character) for character in reversed(number) if character.isdigit()]
    doubled = [2 * digit - 9 * (digit > 4) for digit in digits[1::2]]
    return (sum(digits[::2]) + sum(doubled)) % 10 == 0


def _detail(what: str, fake: Faker) -> str:
    if what == "phone":
        return f"{fake.random_element(AREA_CODES)}-555-{fake.numerify('01##')}"
    if what == "email":
        # Of somebody else's name: it could be guessed from the person's own.
        return f"{fake.first_name()}.{fake.last_name()}{fake.numerify('##')}@example.org".lower()
    start = fake.numerify("4### #### #### ###")
    return start + fake.random_element([digit for digit in "0123456789" if not passes_luhn(start + digit)])
