"""The chain outside its ledger: exports that an auditor can check, and what another ledger takes from one.

Comes in: a ledger, or the JSON of one. Goes out: JSON, or an event. Must not hold fingerprints or their key.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dpllm.errors import ConfigError, LedgerContradiction
from dpllm.ledger.chain import Entry, broken, contradictions
from dpllm.ledger.ledger import Ledger
from dpllm.privacy.accounting import Event, compose

COLUMNS = ("seq", "kind", "dataset", "payload", "prev_hash", "hash")


def to_export(book: Ledger) -> dict[str, Any]:
    """The whole chain and the steps of every run, as JSON."""
    with book.store.read():
        entries = [{name: getattr(entry, name) for name in COLUMNS} for entry in book.history()]
        progress = dict(book.store.rows("SELECT entry, steps FROM progress ORDER BY seq"))
        head = book.head()
    return {"kind": "dpllm ledger", "entries": entries, "progress": progress, "head": head}


def read_export(value: dict[str, Any], path: Path) -> list[Entry]:
    """The links of an export.

    Raises:
        ConfigError: It is none.
    """
    try:
        if value["kind"] != "dpllm ledger" or not isinstance(value["progress"], dict):
            raise ValueError
        if set(value["head"]) != {"hash", "count"}:
            raise ValueError
        return _links(value)
    except (KeyError, TypeError, ValueError):
        raise ConfigError(
            f"{path}: is no export of a ledger. Make one with dpllm ledger export --output FILE."
        ) from None


def verify_export(value: dict[str, Any], head: dict[str, Any] | None = None) -> list[str]:
    """What is wrong with an export; empty where its chain is unbroken up to its head.

    Args:
        value: As ``read_export`` accepts it.
        head: An earlier head of the ledger, which the chain must contain.
    """
    entries = _links(value)
    if problems := broken(entries):
        return problems
    if value["head"]["count"] != len(entries) or (entries and value["head"]["hash"] != entries[-1].hash):
        return ["its head is not that of its last entry: entries were cut off."]
    return contradictions(entries, value["progress"], head)


def event_of(value: dict[str, Any], dataset: str) -> tuple[Event, str, str]:
    """Everything that an exported ledger reserved or imported for a dataset: one event, its unit and its relation.

    Raises:
        LedgerContradiction: Its chain is broken.
        ConfigError: It spent nothing on that dataset, or by several units or relations.
    """
    if problems := verify_export(value):
        raise LedgerContradiction("the exported ledger cannot be trusted: " + " ".join(problems))
    spent = [e.facts for e in _links(value) if e.dataset == dataset and e.kind in ("reserve", "import")]
    if not spent:
        raise ConfigError(f"the exported ledger holds no run on dataset {dataset!r}.")
    meant = {(facts["unit"], facts["relation"]) for facts in spent}
    if len(meant) != 1:
        raise ConfigError(
            f"the exported ledger accounts dataset {dataset!r} by several units or relations, which do not add."
        )
    [(unit, relation)] = meant
    return compose([facts["event"] for facts in spent]), unit, relation


def _links(value: dict[str, Any]) -> list[Entry]:
    return [Entry(**{name: row[name] for name in COLUMNS}) for row in value["entries"]]
