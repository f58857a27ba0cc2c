"""Private text in a file that would be published is found; words that many rows share are nobody's."""

from __future__ import annotations

from dpllm.publish import leaks

TEMPLATE = "You are a helpful assistant who answers every question of the customer with care."
ROWS = [(number, f"{TEMPLATE} {name} owes {number} crowns to the bakery near the old harbour since May")
        for number, name in enumerate(("Aino", "Bertil", "Cilla", "Doris", "Erik"), start=1)]  # fmt: skip


def test_words_of_one_row_are_found_and_those_of_a_template_are_not() -> None:
    texts = {"README.md": f"# Card\n\n{TEMPLATE}\n", "chat.jinja": "owes 3 crowns to the bakery near the OLD harbour!"}
    assert leaks._matches(ROWS, texts, most=3) == {"chat.jinja": 3}


def test_a_short_row_is_found_as_a_whole() -> None:
    texts = {"README.md": "It says: the alarm code reads 516667672066, they say."}
    assert leaks._matches([(9, "The alarm code reads 516667672066")], texts, most=3) == {"README.md": 9}
    assert not leaks._matches([(9, "the alarm they"), (10, "they say it")], texts, most=3)
