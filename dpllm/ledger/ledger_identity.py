"""The one place of a ledger: a copy would be a second budget, so dpllm writes where the ledger belongs and nowhere else.

Comes in: a store. Goes out: a refusal, or the place is written down at the first write, beside the chain, so that an export shows
no path. This finds mistakes: it does not stop somebody who edits the file, and a cloned machine looks like the first one.
"""

from __future__ import annotations

import json
import os

from dpllm.errors import Refused
from dpllm.ledger.store import LedgerIdentity, Store


def is_bound(store: Store) -> bool:
    """Whether the ledger's place is written down as it is now; False also if it was renamed, mounted or restored since.

    Raises:
        Refused: It is a copy of one that belongs elsewhere.
        ConfigError: What is written down is no place.
    """
    kept = store.rows("SELECT value FROM meta WHERE key = 'place'")
    if not kept:
        return False
    here = store.identity
    try:
        bound: LedgerIdentity = json.loads(kept[0][0])
        known = _same_file(bound, here) or (bound["host"], bound["path"]) == (here["host"], here["path"])
    except (ValueError, LookupError, TypeError):
        raise store.unusable("where it belongs cannot be read") from None
    if not known:
        raise Refused(
            f"ledger {store.location} is a copy of {bound['path']} on {bound['host']!r}, and two copies would be two budgets for "
            "the same data. If that one is still used, set privacy.ledger to it. If it moved here for good, type: dpllm ledger "
            f"adopt --ledger {store.location} --by NAME --reason WHY."
        )
    return bound == here


def _same_file(bound: LedgerIdentity, here: LedgerIdentity) -> bool:
    """A file that was renamed, or mounted elsewhere, keeps its number; a backup that was put back keeps host and path."""
    if bound["file"] != here["file"] or bound["path"] == here["path"]:
        return bound["file"] == here["file"]
    # Another file where this one was before would be taken for a backup that was put back. And this very file has a journal for
    # each of two hard links, of which SQLite reads one: what was reserved by the other name would be lost.
    if bound["device"] != here["device"]:
        return False
    if not (here["device"] and bound["host"] == here["host"] and os.path.exists(bound["path"])):
        return True
    # One name in one directory, which is mounted in two places.
    (folder, name), (other_folder, other_name) = os.path.split(bound["path"]), os.path.split(here["path"])
    return name == other_name and os.path.samefile(folder, other_folder)


def bind(store: Store) -> None:
    """Writes down that the ledger belongs where it lies now."""
    if store.rows("SELECT 1 FROM meta WHERE key = 'place'"):
        store.rows("UPDATE meta SET value = ? WHERE key = 'place'", json.dumps(store.identity))
    else:
        store.rows("INSERT INTO meta VALUES ('place', ?)", json.dumps(store.identity))
