"""Labels that were randomised: what a statement or a record says of them, against itself, its data and its ledger.

Comes in: a published statement, or the record beside a file of flipped labels. Goes out: checks. Nobody can see in a file whether
a coin was tossed for each label: that is the author's word, and stays asserted.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from dpllm.files import sha256
from dpllm.ledger.values import event_of
from dpllm.privacy.events import PureDP
from dpllm.privacy.labels import flip_probability
from dpllm.privacy.parts import added
from dpllm.records import NotAStatement
from dpllm.run.labels import SUFFIX
from dpllm.statement.labels import LabelRecord, Labels
from dpllm.verification.check_ledger import chain_at, ledger_of
from dpllm.verification.values import Check, Published, Wrong, asserted, guarded, read_object, regular, verified

_AGAIN = "Take the record of the time when the labels were randomised, and write the card again: dpllm card RUN."
_MOST_DATA = 2**34


def check(found: Published) -> Iterator[Check]:
    """What a statement says of its training labels."""
    shown, before = found.record.labels, found.record.labels_before
    if found.run is not None:
        wanted = found.run.load_config().data.label_epsilon
        if wanted != (shown.epsilon if shown else None):
            raise Wrong(f"the loss was made for labels of epsilon {wanted}, and the statement says another. {_AGAIN}")
    if not all(one.coherent for one in before):
        raise Wrong(f"of labels before these, a probability or a cost is not that of their epsilon. {_AGAIN}")
    if shown is not None:
        stated, due = shown.account_epsilon, shown.with_account(before=before).account_epsilon
        if stated != due:
            raise Wrong(f"{shown.dataset} holds {due} with the models before; {stated} is stated. {_AGAIN}")
        where = found.ledger if found.ledger is not None else ledger_of(found)
        yield from _stated(shown, where)


def check_record(path: Path, where: str | None) -> Iterator[Check]:
    """The record beside a file of flipped labels."""
    return guarded("labels", partial(_beside, path), where)


def _beside(path: Path, where: str | None) -> Iterator[Check]:
    try:
        record = LabelRecord.checked(read_object(path))
    except NotAStatement as error:
        raise Wrong(f"{path.name} is no record of randomised labels: {error.problems[0]}.") from None
    if record.account_epsilon is None:
        raise Wrong(f"{path.name} does not state what the account of these labels holds. {_AGAIN}")
    yield from _stated(record.public(), where)
    data = path.with_name(path.name.removesuffix(SUFFIX) + ".jsonl")
    if not data.exists():
        yield asserted("labels: file", f"{data.name} is not here, so nothing says whose labels these were.")
        return
    with regular(data, _MOST_DATA):
        pass
    if sha256(data, follow=False) != record.file_sha256:
        raise Wrong(f"{data.name} is not the file that was written: labels may have been drawn again. Restore it.")
    yield verified("labels: file", f"{data.name} is the file that this record names.")


def _stated(shown: Labels, where: str | None) -> Iterator[Check]:
    if not shown.coherent:
        raise Wrong(
            f"labels of epsilon {shown.epsilon:g} are flipped with probability {flip_probability(shown.epsilon):.6g}, and "
            f"{shown.max_labels} of one unit cost {shown.max_labels * shown.epsilon:g}; other figures are stated. {_AGAIN}"
        )
    of_all = f", {shown.unit_epsilon:g} for the {shown.max_labels} of one unit" if shown.max_labels > 1 else ""
    yield verified("labels", f"a flip with probability {shown.probability:.6g} is epsilon {shown.epsilon:g}{of_all}.")
    yield asserted("labels: coins", "the author's word that each label was flipped once, by a coin that nobody knows.")
    yield _entry(shown, where)


def _entry(shown: Labels, where: str | None) -> Check:
    """An entry of their own in the ledger, of their own relation."""
    name = "labels: ledger"
    if where is None:
        total = f", which holds {shown.account_epsilon:g}," if shown.account_epsilon else ""
        told = f"entry {shown.entry} of {shown.dataset}{total}"
        return asserted(name, f"{told} is what the author says. To check: --ledger FILE.")
    chain = chain_at(where, None)
    mine = [e for e in chain.entries if e.kind == "reserve" and e.facts["entry"] == shown.entry]
    stated = shown.dataset, shown.unit, shown.neighbouring_relation, PureDP(shown.unit_epsilon)
    if [(e.dataset, e.facts["unit"], e.facts["relation"], event_of(e)) for e in mine] != [
        stated
    ] or not chain.steps.get(shown.entry):
        raise Wrong(f"{chain.where} has no entry {shown.entry} of {shown.dataset} that paid for these labels. {_AGAIN}")
    account = [e for e in chain.entries if e.dataset == shown.dataset and e.kind in ("reserve", "import")]
    # Without a total (of models before, some counted other units) what is stated is this draw alone.
    events, known = [event_of(e) for e in account], shown.account_epsilon or shown.unit_epsilon
    now, least = added(*events), added(*events[: account.index(mine[0]) + 1])
    told = f"{chain.where} charged {shown.unit_epsilon:g} for this draw, and its account holds {now:g} in all"
    if known < least * (1 - 1e-9):
        raise Wrong(f"{told}, {least:g} at the time; {known:g} is stated. {_AGAIN}")
    if len(events) == 1:
        return verified(name, f"{chain.where} charged exactly this, in an account that no other epsilon is added to.")
    if now <= known * (1 + 1e-9):
        return verified(name, f"{told}, as is stated.")
    return asserted(name, f"{told}, more than is stated: whoever sees all draws learns that much.")
