"""Writes `builtin:clinic`: clinic notes that look private but describe invented patients.

    python scripts/build_builtin_data.py [--out dpllm/text/builtin/clinic]

In: a fixed seed, Faker (pinned) for names and numbers, and our sentences in `_clinic_text.py`.
Out: train.jsonl and eval.jsonl, one {"patient_id", "visit", "text"} a line. A patient keeps a name,
phone, job, clinician, illness and habits through all of their notes, as in a real record; a patient is in
one split only. pairs.jsonl and pairs_eval.jsonl hold preference pairs of the same notes. The same seed gives the same bytes.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

import faker
from _clinic_text import (
    ALLERGIES,
    CONDITIONS,
    FOLLOW_UPS,
    HABITS,
    KIN,
    LISTS,
    MEDICINES,
    OPENERS,
    PETS,
    SIGN_OFFS,
    WHO,
)
from _grammar import Slot, expand, pick

FAKER_VERSION = "40.54.0"  # another version has other lists of names, so the bytes would differ
SEED = 20_250_412
TRAIN_PATIENTS, EVAL_PATIENTS = 640, 80
PAIR_PATIENTS = 400  # training pairs; more would make the package large
NOTES_PER_PATIENT = (4, 5, 5, 6)
SHORTEST, LONGEST = 85, 140  # characters: about 40 to 75 tokens of builtin:tiny
CLINICIANS = 18
YEAR = 2024  # dates of the notes
SAID_ONCE = ("phone", "mrn", "street", "employer", "med", "condition")
MONTHS = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"]

# Faker draws these as names, but they are also words with which public text starts.
WORDS_NOT_NAMES = frozenset(
    ["April", "August", "Autumn", "Dawn", "Day", "Grace", "Hope", "June", "May", "Summer", "Will"]
)


@dataclass(frozen=True)
class Patient:
    """One invented patient, and what a note may say about them."""

    patient_id: str
    facts: dict[str, str]


def entries(text: str) -> list[str]:
    """Splits a list written as "this; that" over several lines."""
    return [" ".join(entry.split()) for entry in text.split(";")]


def private_number(pattern: str, fake: faker.Faker) -> str:
    """Fills each # with a digit so that every run of four or more has an odd digit sum.

    The public text that `builtin:tiny` is trained on has even sums only, so the two share no
    long number, and neither builder needs the other's output.
    """
    while True:
        text = fake.numerify(pattern)
        if all(sum(map(int, run)) % 2 for run in re.findall(r"\d{4,}", text)):
            return text


def short(draw: Callable[[], str], longest: int, forbidden: str = r"[,()/0-9]") -> str:
    """Draws from Faker until the result is short and plain enough for a note."""
    while True:
        text = draw()
        words = set(re.findall(r"\w+", text))
        if len(text) <= longest and not re.search(forbidden, text) and not words & WORDS_NOT_NAMES:
            return text


def make_patients(count: int, fake: faker.Faker, rng: Random) -> list[Patient]:
    """Invents patients with distinct names, phone numbers and record numbers."""
    lists = {
        "condition": entries(CONDITIONS),
        "allergy": entries(ALLERGIES),
        "pet": entries(PETS),
    }
    clinicians = [(f"Dr {short(fake.last_name, 10)}", rng.sample(SIGN_OFFS, 3)) for _ in range(CLINICIANS)]
    patients: list[Patient] = []
    taken: set[str] = set()
    while len(patients) < count:
        sex = pick("mf", rng)
        first_name = fake.first_name_male if sex == "m" else fake.first_name_female
        first, last = short(first_name, 9), short(fake.last_name, 10)
        phone, mrn = private_number("%##-555-01##", fake), private_number("%######", fake)
        if taken & {first + last, phone, mrn}:
            continue
        taken |= {first + last, phone, mrn}
        he, his, him = ("he", "his", "him") if sex == "m" else ("she", "her", "her")
        habit, habit2 = rng.sample(HABITS, 2)
        med, dose = pick(entries(MEDICINES), rng).split(", ")
        kin, kin_sex = pick(entries(KIN[sex]), rng).split()
        kin_name = fake.first_name_male if kin_sex == "m" else fake.first_name_female
        age = rng.randint(18, 92)
        while sum(map(int, str(YEAR - age))) % 2 == 0:  # odd, as in private_number
            age = rng.randint(18, 92)
        gp, signs = clinicians[rng.randrange(CLINICIANS)]
        facts = {name: pick(options, rng) for name, options in lists.items()} | {
            "first": first,
            "last": last,
            "title": "Mr" if sex == "m" else pick(["Mrs", "Ms", "Miss"], rng),
            "mrn": mrn,
            "phone": phone,
            "dob": f"{rng.randint(1, 28)} {pick(MONTHS, rng)} {YEAR - age}",
            "age": str(age),
            "job": short(fake.job, 20).lower(),
            "employer": short(fake.company, 18),
            "street": fake.numerify("%##") + " " + short(fake.street_name, 18),
            "city": short(fake.city, 14),
            "kin": kin,
            "kinname": short(kin_name, 9),
            "med": med,
            "dose": dose,
            "he": he,
            "his": his,
            "him": him,
            "himself": "himself" if sex == "m" else "herself",
            "habit": habit[0],
            "habit2": habit2[0],
            "habit_ing": habit[1],
            "gp": gp,
            "signs": "|".join(signs),
        }
        facts |= {f"{key}_cap": facts[key].capitalize() for key in ("he", "kin")}
        patients.append(Patient(f"P{len(patients) + 1:04d}", facts))
    return patients


def note_slots() -> dict[str, Slot]:
    """The slots that are redrawn for each note."""
    slots: dict[str, Slot] = {name: entries(text) for name, text in LISTS.items()}
    return slots | {
        "who": WHO,
        "date": lambda rng: f"{rng.randint(1, 28)} {pick(MONTHS, rng)}",
        "d": list("0123456789"),
        "n1": list("456789"),
        "n2": [str(n) for n in range(40, 100)],
        "n3": [str(n) for n in range(180, 620, 10)],
        "plan2": slots["plan"],
        "when_cap": slots["when"],
        "vital_cap": slots["vital"],
        "pet_cap": ["{pet}"],
    }


def write_note(patient: Patient, slots: dict[str, Slot], rng: Random) -> dict[str, str]:
    """Returns one note of SHORTEST to LONGEST characters, and the kind of visit that its opening shows."""
    facts = patient.facts
    while True:
        opener, visit = pick(OPENERS, rng)
        parts = [opener, *rng.sample(FOLLOW_UPS, rng.randint(1, 2))]
        ending = rng.random()
        if ending < 0.3:
            parts.append(pick(facts["signs"].split("|"), rng))
        if ending < 0.15 or ending > 0.8:
            parts.append("{gp}.")
        text = expand(" ".join(parts), slots, rng, facts)
        said_twice = any(text.count(facts[fact]) > 1 for fact in SAID_ONCE)
        if SHORTEST <= len(text) <= LONGEST and not said_twice:
            return {"visit": visit, "text": text}


def build(train_patients: int, eval_patients: int) -> tuple[list[str], list[str]]:
    """Returns the JSON lines of the two splits."""
    fake, rng = faker.Faker("en_US"), Random(SEED)
    fake.seed_instance(SEED)
    patients = make_patients(train_patients + eval_patients, fake, rng)
    slots = note_slots()
    splits: list[list[str]] = []
    for group in (patients[:train_patients], patients[train_patients:]):
        lines = [
            json.dumps({"patient_id": patient.patient_id, **write_note(patient, slots, rng)})
            for patient in group
            for _ in range(NOTES_PER_PATIENT[rng.randrange(len(NOTES_PER_PATIENT))])
        ]
        rng.shuffle(lines)
        splits.append(lines)
    return splits[0], splits[1]


def pairs(lines: list[str]) -> list[str]:
    """Preference pairs of one split: the prompt asks for a kind of visit, and a note of that kind is the chosen answer.

    The rejected answer is the same patient's next note of another kind, so the patient is the privacy unit of the pair.
    """
    notes, preferences = [json.loads(line) for line in lines], []
    for place, note in enumerate(notes):
        others = [other for other in notes[place + 1 :] + notes[:place] if other["patient_id"] == note["patient_id"]]
        wrong = next((other for other in others if other["visit"] != note["visit"]), None)
        if wrong is not None:
            prompt, sides = f"Note of a visit, {note['visit']}:", {"chosen": note["text"], "rejected": wrong["text"]}
            preferences.append(json.dumps({"patient_id": note["patient_id"], "prompt": prompt, **sides}))
    return preferences


def files() -> dict[str, list[str]]:
    """The lines of each file, by its stem."""
    train, held_out = build(TRAIN_PATIENTS, EVAL_PATIENTS)
    few = [line for line in train if json.loads(line)["patient_id"] <= f"P{PAIR_PATIENTS:04d}"]
    return {"train": train, "eval": held_out, "pairs": pairs(few), "pairs_eval": pairs(held_out)}


def main() -> None:
    """Writes both splits and the preference pairs of both."""
    default = Path(__file__).resolve().parent.parent / "dpllm" / "text" / "builtin" / "clinic"
    parser = argparse.ArgumentParser(description="Write the embedded clinic notes.")
    parser.add_argument("--out", type=Path, default=default, help="directory for the two files")
    out: Path = parser.parse_args().out
    if faker.VERSION != FAKER_VERSION:
        raise SystemExit(
            f"Faker {faker.VERSION} is installed. Its name lists differ from those of"
            f" {FAKER_VERSION}, so the notes would differ. Install Faker=={FAKER_VERSION}."
        )
    out.mkdir(parents=True, exist_ok=True)
    for split, lines in files().items():
        (out / f"{split}.jsonl").write_text("\n".join(lines) + "\n", encoding="ascii", newline="\n")
        print(f"{out / split}.jsonl: {len(lines)} lines")


if __name__ == "__main__":
    main()
