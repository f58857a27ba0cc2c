"""The ledger as values, and as tables of them for people.

Comes in: a ledger. Goes out: JSON values, rich tables of the same. Must not decide anything.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from dpllm.errors import Refused
from dpllm.ledger import admission
from dpllm.ledger.chain import Entry
from dpllm.ledger.ledger import Ledger
from dpllm.ledger.reserving import group_total
from dpllm.ledger.values import OPEN, used_in_words

Json = dict[str, Any]


def overview_values(ledger: Ledger, datasets: Sequence[str]) -> Json:
    """Runs, imports and what is used of each dataset's budget, in the sentences of ``says`` too."""
    found = {}
    for name in datasets:
        account, imports = ledger.account(name), [entry.facts for entry in ledger.chain.of(name, "import")]
        found[name] = {
            "budget": asdict(account.budget) if account.budget else None,
            "runs": [
                {key: getattr(run, key) for key in ("state", "steps", "heartbeat")}
                | {key: getattr(run.reservation, key) for key in ("entry", "run", "num_steps", "epsilon", "delta")}
                for run in account.runs
            ],
            "used": admission.used(account),
            "imports": [{"run": facts["run"], "event": facts["event"]} for facts in imports],
            "says": totals(ledger, name),
        }
    refused = ledger.refusals().items()
    refusals = [{"dataset": dataset, "reason": reason, "number": number} for (dataset, reason), number in refused]
    chain = {"location": str(ledger.location), "head": ledger.head(), "problems": ledger.verify()}
    return {"datasets": found, "refusals": refusals, **chain}


def overview(found: Json) -> Group:
    """The same for people."""
    parts: list[Any] = []
    for name, one in found["datasets"].items():
        table = Table(title=_plain(name), title_justify="left", title_style="bold")
        table.add_column("entry", no_wrap=True)
        for column in ("run", "steps", "state", "epsilon", "delta"):
            table.add_column(column, justify="left" if column in ("run", "state") else "right")
        for run in one["runs"]:
            cost = f"{run['epsilon']:.3f}", f"{run['delta']:g}"
            state = run["state"] + (f", seen {_age(run['heartbeat'])} ago" if run["state"] in OPEN else "")
            table.add_row(run["entry"], _plain(run["run"]), f"{run['steps']}/{run['num_steps']}", state, *cost)
        for past in one["imports"]:
            event = past["event"]
            cost = (f"{event['epsilon']:.3f}", f"{event['delta']:g}") if event["type"] == "imported" else ("", "")
            table.add_row("", _plain(f"{past['run']} (imported)"), "", "imported", *cost)
        parts += [table, *map(_plain, one["says"]), ""]
    if refused := [f"{one['dataset']}: {one['reason']} {one['number']}" for one in found["refusals"]]:
        parts.append(_plain("Refused: " + "; ".join(refused)))
    head = found["head"]
    sound = f"{found['location']}: {head['count']} entries, chain unbroken, head {head['hash'][:12]}"
    return Group(*parts, _plain(found["problems"][0] if found["problems"] else sound))


def totals(ledger: Ledger, dataset: str) -> list[str]:
    """How much of a dataset's budget is used, or without one or after a final run what all runs come to; then the rest."""
    account = ledger.account(dataset)
    budget, share = account.budget, admission.used(account)
    lines = []
    if budget is not None and share is not None:
        fit = ""
        if account.runs:
            last = account.runs[-1]
            fit = f"; {admission.how_many(account, last.event)} more like run {last.reservation.run} fit"
        lines.append(f"{used_in_words(share, budget)}{fit}.")
    else:
        try:
            spent = ledger.spent(dataset)
            total = f"epsilon {spent:.4f}"
        except Refused:  # imports may be of kinds that no accountant knows together
            spent, total = math.inf, "no epsilon that an accountant knows"
        how = "closed by a final reservation: exactly" if account.final else "as if fixed in advance:"
        exceeds = ", which exceeds the budget" if budget and spent > budget.epsilon else ""
        lines.append(f"All runs, {how} {total}{exceeds}.")
    lines.append(f"Budget: {budget}." if budget else "No budget is set: runs are charged without a limit.")
    for name, runs in account.groups().items():
        found, done = group_total(account, name), sum(run.state == "completed" for run in runs)
        lines.append(
            f"Tuning group {name}: {found['runs']} runs fixed together, {done} completed; all of them come to epsilon "
            f"{found['epsilon']:.3f} at delta {found['delta']:g}."
        )
    return lines + [f"Exception: {line}." for line in account.deviations()]


def chain_values(entries: Sequence[Entry]) -> Json:
    """Every entry with its time, what it did and who did it."""
    rows = []
    for entry in entries:
        try:
            time_, what = entry.facts["at"].rstrip("Z").replace("T", " "), _what(entry.kind, entry.facts)
        except (Refused, KeyError, TypeError, ValueError, AttributeError):
            time_, what = "", "not readable: changed by something other than dpllm"
        names = {"number": entry.seq, "entry": entry.kind, "dataset": entry.dataset, "hash": str(entry.hash)}
        rows.append({**names, "time": time_, "what": what})
    return {"entries": rows}


def chain_table(found: Json) -> Table:
    """The same for people."""
    table = Table("no.", show_lines=True)
    for column in ("time (UTC)", "entry"):
        table.add_column(column, no_wrap=True)
    table.add_column("dataset, what, and the start of the hash", overflow="fold")
    for one in found["entries"]:
        row = (one["number"], one["time"], one["entry"], f"{one['dataset']}: {one['what']} [{one['hash'][:12]}]")
        table.add_row(*map(_plain, row))
    return table


def _age(heartbeat: float) -> str:
    age = max(0, round(time.time() - heartbeat))
    return f"{age} s" if age < 120 else f"{age // 60} min" if age < 7200 else f"{age // 3600} h"


def _what(kind: str, content: Mapping[str, Any]) -> str:
    who = f", by {content['by']}: {content.get('reason')}" if content.get("by") else ""
    if kind == "budget":
        return f"epsilon {content['epsilon']:g} at delta {content['delta']:g}{who}"
    if kind == "reserve":
        group = f", tuning group {content['group']}" if content.get("group") else ""
        size = f"{content['num_steps']} steps, epsilon {content['epsilon']:.3f}"
        final = ", final" if content["final"] else ""
        return f"{content['run']}: {size}, entry {content['entry']}{group}{final}"
    if kind in ("commit", "reconcile"):
        return f"{content['entry']}: {content.get('status', 'closed')} after {content['steps']} steps{who}"
    if kind == "data":
        parent = f", derived from {content['derived_from']}" if content["derived_from"] else ""
        return f"{content['records']} records{parent}"
    return f"{content.get('run', '')}{who}".lstrip(", ")


def _plain(text: object) -> Text:
    """Text as it is: no markup, and nothing that moves the cursor or cannot be encoded."""
    return Text("".join(letter if letter.isprintable() else "?" for letter in str(text)))
