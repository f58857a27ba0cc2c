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


@dataclass(frozen=True)
class Fingerprint:
    """The records of one dataset, as the ledger with this key knows them.

    Attributes:
        digest: Of all records, in hexadecimal; equal for two datasets with the same records in any order.
        hashes: Sorted keyed hashes of the distinct records, ``HASH_BYTES`` bytes each, joined.
        num_records: How many records, duplicates included.
    """

    digest: str
    hashes: bytes
    num_records: int

    def commitment(self, nonce: str) -> str:
        """What may be shown: it binds the records to the chain, and tells nothing without the nonce."""
        return hashlib.sha256(f"{nonce}:{self.digest}".encode() + self.hashes).hexdigest()


def fingerprint(rows: Iterable[Mapping[str, Any]], fields: Sequence[str], key: bytes) -> Fingerprint:
    """Hashes the text of every row.

    Args:
        rows: With the columns of their format.
        fields: The columns that hold text; others (ids, dates) do not count, so that adding one makes no new dataset.
        key: The ledger's secret.
    """
    digests = sorted(hashlib.blake2b(_text(row, fields).encode(), key=key, digest_size=32).digest() for row in rows)
    whole = hashlib.blake2b(b"".join(digests), key=key, digest_size=32).hexdigest()
    return Fingerprint(whole, b"".join(sorted({digest[:HASH_BYTES] for digest in digests})), len(digests))


def share_in_common(one: bytes, other: bytes) -> float:
    """Records that two datasets share, over those of the smaller one; 0 where one is empty."""
    import numpy as np

    # Both are sorted and without repetitions, as eight bytes of which the first weighs most.
    first, second = (np.frombuffer(hashes, ">u8") for hashes in (one, other))
    few = min(len(first), len(second))
    return len(np.intersect1d(first, second, assume_unique=True)) / few if few else 0.0


def new_nonce() -> str:
    """A salt for a commitment."""
    return secrets.token_hex(16)


def _text(row: Mapping[str, Any], fields: Sequence[str]) -> str:
    """The words of a row; spaces, line breaks and Unicode composition do not matter, nor into how many columns it is cut."""
    parts: list[str] = []
    for field in fields:
        value = row[field]
        if isinstance(value, list):  # messages
            parts += [
                str(message.get("content", "")) if isinstance(message, dict) else str(message) for message in value
            ]
        else:
            parts.append(str(value))
    return " ".join(unicodedata.normalize("NFC", " ".join(parts)).split())
