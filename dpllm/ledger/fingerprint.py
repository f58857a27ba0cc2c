"""Which data: a keyed fingerprint of the records, the same for a renamed, reordered or reformatted copy.

Comes in: rows of text and the ledger's secret key. Goes out: a fingerprint of all of them, and a short keyed hash of
each, by which copies and subsets are found. Both lie in the ledger and nowhere else: an unkeyed hash of a short text
tells whoever guesses the text that it is there. What the chain holds, and an export shows, is a salted commitment.
"""

from __future__ import annotations

import hashlib
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
        hashes: Sorted keyed hashes of the distinct records, ``HASH_BYTES`` bytes each, joined. Earlier versions had others
            among them: of single columns, and one for each repetition.
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

    Rows are read once; in memory are 32 bytes for each row, and no text.

    Args:
        rows: With the columns of their format.
        fields: The columns that hold text; others (ids, dates) do not count, so that adding one makes no new dataset.
        key: The ledger's secret.
    """
    import numpy as np

    records = bytearray()
    for row in rows:
        text = _words(" ".join(_texts(row, fields)))
        records += hashlib.blake2b(text.encode(), key=key, digest_size=32).digest()
    record_N = np.sort(np.frombuffer(records, "S32"))
    digest = hashlib.blake2b(record_N.tobytes(), key=key, digest_size=32).hexdigest()
    return Fingerprint(digest, np.unique(record_N.astype(f"S{HASH_BYTES}")).tobytes(), len(record_N))


def share_in_common(one: bytes, other: bytes) -> float:
    """Distinct records that two datasets share, over those of the smaller one; 0 where one is empty."""
    import numpy as np

    # Of eight bytes the first weighs most.
    first, second = (np.unique(np.frombuffer(hashes, ">u8")) for hashes in (one, other))
    few = min(len(first), len(second))
    return len(np.intersect1d(first, second, assume_unique=True)) / few if few else 0.0


def _texts(row: Mapping[str, Any], fields: Sequence[str]) -> list[str]:
    """The texts of a row in their order; of messages, what each of them says."""
    texts = []
    for field in fields:
        value = row[field]
        if isinstance(value, list):
            texts += [str(turn.get("content", "") if isinstance(turn, dict) else turn) for turn in value]
        else:
            texts.append(str(value))
    return texts


def _words(text: str) -> str:
    """Spaces, line breaks and Unicode composition do not matter, nor into how many columns a record is cut."""
    return " ".join(unicodedata.normalize("NFC", text).split())
