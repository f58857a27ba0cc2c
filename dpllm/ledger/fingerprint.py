"""Which data: a keyed fingerprint of the records, the same for a renamed, reordered or reformatted copy.

Comes in: rows of text and the ledger's secret key. Goes out: a fingerprint of all of them, and a short keyed hash of
each, by which copies and subsets are found. Both lie in the ledger and nowhere else: an unkeyed hash of a short text
tells whoever guesses the text that it is there. What the chain holds, and an export shows, is a salted commitment.
"""

from __future__ import annotations

import hashlib
import secrets
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

HASH_BYTES = 8  # of a record in the overlap check: among 10^6 times 10^6 pairs one collision in 10^7
_COMPARED = 16  # of a column's text, to count different ones


@dataclass(frozen=True)
class Fingerprint:
    """The records of one dataset, as the ledger with this key knows them.

    Attributes:
        digest: Of all records, in hexadecimal; equal for two datasets with the same records in any order.
        hashes: Sorted keyed hashes of the records and of their columns, ``HASH_BYTES`` bytes each, joined; one for each
            repetition.
        num_records: How many records, duplicates included.
    """

    digest: str
    hashes: bytes
    num_records: int

    def commitment(self, nonce: str) -> str:
        """What may be shown: it binds the records to the chain, and tells nothing without the nonce."""
        return hashlib.sha256(f"{nonce}:{self.digest}".encode() + self.hashes).hexdigest()


def fingerprint(rows: Iterable[Mapping[str, Any]], fields: Sequence[str], key: bytes) -> Fingerprint:
    """Hashes the text of every row, and of each column that tells rows apart: it may come back as a dataset of its own.

    Rows are read once; in memory are at most 32 bytes for each row and 16 for each of its columns, and no text.

    Args:
        rows: With the columns of their format.
        fields: The columns that hold text; others (ids, dates) do not count, so that adding one makes no new dataset.
        key: The ledger's secret.
    """
    import numpy as np

    def hashed(text: str) -> bytes:
        return hashlib.blake2b(text.encode(), key=key, digest_size=32).digest()

    records, columns = bytearray(), dict[str, bytearray]()
    for row in rows:
        split: dict[str, list[str]] = {}
        pieces = _pieces(row, fields)
        for name, text in pieces:
            split.setdefault(name, []).append(text)
        record = _words(" ".join(text for _, text in pieces))
        records += hashed(record)
        for name, texts in split.items():
            column = _words(" ".join(texts))
            if column not in ("", record):
                columns.setdefault(name, bytearray()).extend(hashed(column)[:_COMPARED])
    num_records = len(records) // 32
    whole = hashlib.blake2b(np.sort(np.frombuffer(records, "S32")).tobytes(), key=key, digest_size=32).hexdigest()
    parts = [np.frombuffer(records, "S32").astype(f"S{HASH_BYTES}")]
    for hashes in columns.values():
        column_N = np.frombuffer(hashes, f"S{_COMPARED}")
        if len(np.unique(column_N)) * 2 > num_records:  # not a label or an instruction that many rows share
            parts.append(column_N.astype(f"S{HASH_BYTES}"))
    return Fingerprint(whole, np.sort(np.concatenate(parts)).tobytes(), num_records)


def share_in_common(one: bytes, other: bytes) -> float:
    """Distinct records that two datasets share, over those of the smaller one; 0 where one is empty."""
    import numpy as np

    first, second = (np.unique(_numbers(hashes)) for hashes in (one, other))
    few = min(len(first), len(second))
    return len(np.intersect1d(first, second, assume_unique=True)) / few if few else 0.0


def share_repeated(hashes: bytes, known: Sequence[bytes]) -> float:
    """Of the distinct records that are known, the share that now occurs more often than in any known dataset."""
    import numpy as np

    most: dict[int, int] = {}
    for one in known:
        for value, count in zip(*np.unique(_numbers(one), return_counts=True), strict=True):
            most[int(value)] = max(most.get(int(value), 0), int(count))
    values, counts = np.unique(_numbers(hashes), return_counts=True)
    before = [(most[int(value)], int(count)) for value, count in zip(values, counts, strict=True) if int(value) in most]
    return sum(count > least for least, count in before) / len(before) if before else 0.0


def _numbers(hashes: bytes) -> Any:
    import numpy as np

    return np.frombuffer(hashes, ">u8")  # of eight bytes the first weighs most


def new_nonce() -> str:
    """A salt for a commitment."""
    return secrets.token_hex(16)


def _pieces(row: Mapping[str, Any], fields: Sequence[str]) -> list[tuple[str, str]]:
    """The texts of a row in their order, each with its column, or with the role of who said it."""
    pieces: list[tuple[str, str]] = []
    for field in fields:
        value = row[field]
        if not isinstance(value, list):
            pieces.append((field, str(value)))
            continue
        for turn in value:
            said = turn if isinstance(turn, dict) else {"content": turn}
            pieces.append((str(said.get("role")), str(said.get("content", ""))))
    return pieces


def _words(text: str) -> str:
    """Spaces, line breaks and Unicode composition do not matter, nor into how many columns a record is cut."""
    return " ".join(unicodedata.normalize("NFC", text).split())
