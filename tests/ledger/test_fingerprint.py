"""The fingerprint of a corpus larger than memory is the one that ledgers already hold."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from dpllm.ledger.records import HASH_BYTES, Fingerprint, _text, fingerprint

Rows = Sequence[Mapping[str, Any]]
KEY = b"k" * 32


def in_memory(rows: Rows, fields: Sequence[str]) -> Fingerprint:
    """The definition, over all texts at once; a stored digest must not change."""

    def hashed(texts: Sequence[str]) -> list[bytes]:
        return sorted(hashlib.blake2b(text.encode(), key=KEY, digest_size=32).digest() for text in texts)

    records = hashed([_text(row, fields) for row in rows])
    digest = hashlib.blake2b(b"".join(records), key=KEY, digest_size=32).hexdigest()
    return Fingerprint(digest, b"".join(sorted({record[:HASH_BYTES] for record in records})), len(records))


TEXT = st.sampled_from(["", " ", "a", "a ", "b  b", "c", "d", "e\u0301", "\u00e9", "label"])
TURNS = st.lists(st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": TEXT}), max_size=3)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(rows=st.lists(st.fixed_dictionaries({"prompt": TEXT, "completion": TEXT, "messages": TURNS}), max_size=12))
def test_reading_once_gives_what_all_texts_at_once_gave(rows: list[dict[str, Any]]) -> None:
    for fields in (["prompt", "completion"], ["messages"], ["prompt"]):
        assert fingerprint(rows, fields, KEY) == in_memory(rows, fields)


def test_a_known_dataset_keeps_its_fingerprint() -> None:
    rows = [{"prompt": f"question {number}", "completion": f"answer {number % 3}"} for number in range(20)]
    found = fingerprint(rows, ["prompt", "completion"], KEY)
    assert found.digest == "9c8548944177e2b83d77c1d61d25d146eb12beb1e7a03f676c6e565c02efc6f5"
    assert hashlib.blake2b(found.hashes, digest_size=8).hexdigest() == "4687fbd448c176f2"


def test_rows_are_read_once() -> None:
    def rows() -> Iterator[dict[str, str]]:
        yield from ({"text": f"row {number}"} for number in range(5))

    assert fingerprint(rows(), ["text"], KEY) == fingerprint(list(rows()), ["text"], KEY)
