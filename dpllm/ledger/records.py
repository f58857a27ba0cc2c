"""The records of each dataset name, and the account that a run on them is charged to.

Comes in: rows of text and the ledger's secret key. Goes out: a fingerprint of all rows, and a short keyed hash of each, by which
copies and subsets are found. Both are stored only in the ledger: an unkeyed hash of a short text would confirm a guess of that
text. The chain, and so an export, holds only a salted commitment.
"""

from __future__ import annotations

import hashlib
import secrets
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dpllm.errors import ConfigError, Refused
from dpllm.ledger.chain import Chain
from dpllm.ledger.values import LABELS
from dpllm.text.layouts import FIELDS

HASH_BYTES = 8  # of a record in the overlap check: among 10^6 times 10^6 pairs, probability 10^-7 of a collision
LEAST_SHARE = 0.01  # of the smaller dataset; a smaller overlap counts as chance (short texts, formulas)
ANY = 0.0  # for labels: each is drawn once, so any overlap counts
# Kinds of entries of a separate account: a dataset with one of them derives from no other.
OWN = ("budget", "reserve", "reconcile", "import")


@dataclass(frozen=True)
class Fingerprint:
    """The hashed records of one dataset, under one ledger's key."""

    digest: str  # of all records, in hexadecimal; equal for two datasets with the same records in any order
    # Sorted keyed hashes of the distinct records and sides of pairs, ``HASH_BYTES`` bytes each, joined.
    hashes: bytes
    num_records: int  # duplicates included

    def commitment(self, nonce: str, key: bytes) -> str:
        """A public commitment that binds the records to the chain and reveals nothing without the nonce.

        It binds the ledger's key too: under another key, no copy of these records would be recognised.
        """
        return hashlib.sha256(f"{nonce}:{key.hex()}:{self.digest}".encode() + self.hashes).hexdigest()


def fingerprint(
    rows: Iterable[Mapping[str, Any]], fields: Sequence[str], key: bytes, *, pairs_whole: bool = False
) -> Fingerprint:
    """Hashes the text of every row under the ledger's ``key``; a reordered or reformatted copy gets the same hashes.

    Columns other than ``fields`` (ids, dates) do not count, so adding a column makes no new dataset. Each side of a pair has its
    own hash, because the chosen answers alone are the same texts; not so with ``pairs_whole``, for labels. Memory holds 32 bytes
    for each row, and 16 more for a pair.
    """
    import numpy as np

    records, answers = bytearray(), bytearray()
    for row in rows:
        records += _hash(words(row, fields), key)
        if not pairs_whole and len(texts := sides(row, fields)) > 1:
            answers += b"".join(_hash(text, key)[:HASH_BYTES] for text in texts)
    record_N, short = np.sort(np.frombuffer(records, "S32")), f"S{HASH_BYTES}"
    digest = hashlib.blake2b(record_N.tobytes(), key=key, digest_size=32).hexdigest()
    hashes = np.unique(np.concatenate([record_N.astype(short), np.frombuffer(answers, short)]))
    return Fingerprint(digest, hashes.tobytes(), len(record_N))


def _hash(text: str, key: bytes) -> bytes:
    return hashlib.blake2b(text.encode(), key=key, digest_size=32).digest()


def words(parts: Mapping[str, Any], fields: Sequence[str]) -> str:
    """The words of a row in order, by which the ledger recognises it; for messages, the words of their contents.

    Spaces, line breaks, Unicode composition and the split into columns do not matter. The answers of a pair are sorted, so a
    pair with the other preference is the same record.
    """
    return " ".join(unicodedata.normalize("NFC", " ".join(sides(parts, fields))).split())


def sides(parts: Mapping[str, Any], fields: Sequence[str]) -> list[str]:
    """Both sides of a pair, each the words of its prompt and answer, sorted; of any other row, its words alone."""
    texts = []
    for value in (parts[name] for name in fields):
        if isinstance(value, list):
            value = " ".join(_content(turn) if isinstance(turn, dict) else str(turn) for turn in value)
        texts.append(" ".join(unicodedata.normalize("NFC", str(value)).split()))
    if fields[1:] == FIELDS["preference"][1:]:  # the prompt is a separate field or begins each answer
        return sorted(" ".join(f"{texts[0]} {answer}".split()) for answer in texts[1:])
    return [" ".join(unicodedata.normalize("NFC", " ".join(texts)).split())]


def _content(message: Mapping[str, Any]) -> str:
    """The text of a message; a text in parts is the same text."""
    content = message.get("content") or ""
    return "".join(str(part.get("text") or "") for part in content) if isinstance(content, list) else str(content)


def rows_among(rows: Iterable[Mapping[str, Any]], fields: Sequence[str], key: bytes, reference: Fingerprint) -> int:
    """Number of rows, duplicates included, of which a side is in the dataset of ``reference``, a fingerprint with that key."""
    joined = reference.hashes
    hashes = {joined[start : start + HASH_BYTES] for start in range(0, len(joined), HASH_BYTES)}
    return sum(any(_hash(text, key)[:HASH_BYTES] in hashes for text in sides(row, fields)) for row in rows)


def share_in_common(hashes: bytes, other_hashes: bytes) -> float:
    """Distinct records that two datasets share, divided by those of the smaller one; 0 if one is empty."""
    import numpy as np

    # Each hash is a big-endian integer of eight bytes.
    first, second = (np.unique(np.frombuffer(joined, ">u8")) for joined in (hashes, other_hashes))
    smaller = min(len(first), len(second))
    return len(np.intersect1d(first, second, assume_unique=True)) / smaller if smaller else 0.0


class Records:
    """The records of every dataset in the ledger."""

    def __init__(self, chain: Chain) -> None:
        """Reads nothing yet."""
        self._chain = chain
        self._store = chain.store

    def key(self) -> bytes:
        """The secret key of this ledger's fingerprints."""
        return bytes.fromhex(self._store.rows("SELECT value FROM meta WHERE key = 'fingerprint_key'")[0][0])

    def label_key(self) -> bytes:
        """The secret key for labels: they have another account than the texts, and do not count as a copy of them."""
        return hashlib.blake2b(b"labels", key=self.key(), digest_size=32).digest()

    def account_name(self, dataset: str) -> str:
        """The dataset from which ``dataset`` derives, however far back; itself if it derives from none."""
        with self._chain.moment():
            parents = (entry.facts["derived_from"] for entry in self._chain.of(dataset, "data"))
            parent = next((name for name in parents if name is not None), None)
            return dataset if parent is None else self.account_name(parent)

    def charged_to(self, dataset: str, derived_from: str | None) -> str:
        """The account of a run on ``dataset``, which is declared to be ``derived_from`` another dataset or None.

        Raises:
            ConfigError: It derives from itself, or from a dataset that the ledger does not hold.
            Refused: It has a separate account, or derives from another dataset.
        """
        with self._chain.moment():
            name = self.account_name(dataset)
            if derived_from is None:
                return name
            if derived_from not in self._chain.datasets():
                raise ConfigError(
                    f"privacy.derived_from: the ledger knows no dataset {derived_from!r}. dpllm ledger show lists its names."
                )
            parent = self.account_name(derived_from)
            if dataset in (derived_from, parent):
                raise ConfigError(
                    f"privacy.derived_from: dataset {dataset!r} would derive from itself. Remove the key."
                )
            if name not in (dataset, parent) or (name == dataset and self._chain.of(dataset, *OWN, "data")):
                raise Refused(
                    f"dataset {dataset!r} is in the ledger already, charged to {name!r}, so it cannot be charged to "
                    f"{parent!r}. Give the derived data a new privacy.dataset.",
                    dataset=dataset,
                    reason="derived",
                )
            return parent

    def known_as(self, records: Fingerprint) -> str | None:
        """The first name of exactly these records; None if they are new."""
        statement = "SELECT dataset FROM records JOIN entries USING (seq) WHERE fingerprint = ? ORDER BY seq"
        names = self._store.rows(statement, records.digest)
        return str(names[0][0]) if names else None

    def of_account(self, account: str) -> set[str]:
        """Digests of all fingerprints that are charged to an account."""
        rows = self._store.rows("SELECT dataset, fingerprint FROM records JOIN entries USING (seq)")
        with self._chain.moment():
            return {digest for name, digest in rows if self.account_name(name) == account}

    def overlaps(self, records: Fingerprint, share: float = LEAST_SHARE) -> list[str]:
        """Datasets that share records, at least the given share of them; the largest share comes first."""
        shares: dict[str, float] = {}
        for name, hashes in self._store.rows("SELECT dataset, hashes FROM records JOIN entries USING (seq)"):
            shares[name] = max(share_in_common(bytes(hashes), records.hashes), shares.get(name, 0.0))
        common = (name for name in shares if shares[name] > 0 and shares[name] >= share)
        return sorted(common, key=lambda name: -shares[name])

    def refuse_released(self, records: Fingerprint) -> None:
        """Refuses if any record is of an account with a run, whatever its state: a crashed run may have released everything."""
        for name in map(self.account_name, self.overlaps(records, ANY)):
            if self._chain.of(name, "reserve"):
                problem = (
                    f"some of these records were released before ({name} in the ledger), and would cost as much again."
                )
                raise Refused(f"{problem} Use that release.", dataset=name, reason="again")

    def conflict(self, dataset: str, records: Fingerprint, derived_from: str | None) -> Refused | None:
        """The reason why these records may not be charged to ``dataset``; None if they may.

        It does not say how many are shared, which would tell how many guessed texts are records.
        """
        account = self.charged_to(dataset, derived_from)
        alias = self.known_as(records)
        if alias is not None:
            if self.account_name(alias) == account:
                return None  # compared with all others when they were entered
            return Refused(
                f"these very records are dataset {alias!r} in the ledger, whatever the file is called: charged to {account!r}, "
                f"they would have a second budget. Set privacy.dataset: {alias}.",
                dataset=alias,
                reason="renamed",
            )
        share = ANY if account.startswith(LABELS) else LEAST_SHARE
        other = next((name for name in self.overlaps(records, share) if self.account_name(name) != account), None)
        if other is None:
            return None
        fix = f"Set privacy.derived_from: {other}."
        if derived_from is not None:
            fix = f"One run is charged to one account: leave out the records of {other!r}, or charge the run to it."
        return Refused(
            f"data.train shares records with dataset {other!r} of the ledger: charged to {account!r}, they would have a "
            f"second budget. {fix}",
            dataset=other,
            reason="overlap",
        )

    def register(self, dataset: str, records: Fingerprint | None, derived_from: str | None) -> None:
        """Enters the records of a name once, within ``Chain.writing``, or refuses them with the ``conflict``."""
        content: dict[str, Any] = {"records": None, "commitment": None, "derived_from": derived_from}
        if records is None:
            if derived_from is not None and self.account_name(dataset) == dataset:
                self._chain.append("data", dataset, content)
            return
        if clash := self.conflict(dataset, records, derived_from):
            raise clash
        if self.known_as(records) is not None:
            return
        nonce = secrets.token_hex(16)
        content |= {"records": records.num_records, "commitment": records.commitment(nonce, self.key())}
        seq = self._chain.append("data", dataset, content)
        self._store.rows("INSERT INTO records VALUES (?, ?, ?, ?)", seq, records.digest, nonce, records.hashes)

    def verify(self) -> list[str]:
        """Problems: records that differ from the chain's commitments."""
        with self._store.read():
            entries = self._chain.stored("WHERE kind = ?", "data")
            rows = self._store.rows("SELECT seq, fingerprint, nonce, hashes FROM records")
            try:
                key = self.key()
                stored = {seq: Fingerprint(str(d), bytes(h), 0).commitment(str(n), key) for seq, d, n, h in rows}
            except (IndexError, TypeError, ValueError):  # dpllm never writes such a row or key
                stored = {}
        committed = {entry.seq: entry.facts["commitment"] for entry in entries}
        return [
            f"the records of entry {seq} are not those that it commits to."
            for seq in sorted(committed.keys() | stored.keys())
            if committed.get(seq) != stored.get(seq)
        ]
