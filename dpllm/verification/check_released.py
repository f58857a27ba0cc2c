"""What was released without a training run: clusters or a classifier, and labels that were randomised at the source.

Comes in: the folder that ``releases.embeddings`` writes; a published statement, or the record beside a file of flipped labels; a
ledger or none. Goes out: checks. That such numbers were drawn from such data, or that a coin was tossed for each label, nobody
can see in a file: that is the author's word, and stays asserted.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from dpllm.files import CARD, sha256
from dpllm.ledger.values import event_of
from dpllm.privacy import accounting, embedded
from dpllm.privacy.events import PureDP, SelfComposed
from dpllm.privacy.parts import added
from dpllm.privacy.releases import OTHER
from dpllm.run.subject import SUFFIX
from dpllm.statement.released import (
    MOST_VECTORS,
    RECORD,
    VECTORS,
    Embedded,
    LabelRecord,
    Labels,
    Release,
    page,
    read_vectors,
)
from dpllm.verification import check_export, check_ledger, costs
from dpllm.verification.check_rows import readable, record_of
from dpllm.verification.values import (
    TOLERANCE,
    Check,
    Published,
    Wrong,
    asserted,
    close,
    differences,
    guarded,
    read_text,
    regular,
    verified,
)

_AGAIN = "Restore the folder from where it was published."
_DRAWN_AGAIN = "Take the record of the time when the labels were randomised, and write the card again: dpllm card RUN."
_MOST_DATA = 2**34


def check_embedded(directory: Path, ledger: str | None) -> Iterator[Check]:
    """All checks of a folder of clusters or of a classifier, in a fixed order."""
    record = yield from readable(RECORD, partial(record_of, directory / RECORD, Embedded, _AGAIN))
    if record is not None:
        yield from guarded("files", partial(_files, directory), record)
        yield from guarded("promise", _promise, record)
        yield from guarded("ledger", partial(_paid, ledger), record)


def _files(directory: Path, record: Embedded) -> Iterator[Check]:
    names, problems = check_export.regular_files(directory, strict=False)
    if problems or set(names) != {CARD, RECORD, VECTORS}:
        raise Wrong(f"the folder holds other files than {CARD}, {RECORD} and {VECTORS}. {_AGAIN}")
    with regular(directory / VECTORS, MOST_VECTORS):
        read_vectors(directory / VECTORS, record.releases[0])
    if read_text(directory / CARD) != page(record):
        raise Wrong(f"{CARD} is not what {RECORD} gives. {_AGAIN}")
    yield verified("files", f"{VECTORS} has the stated hash and shapes; {CARD} follows from {RECORD}.")


def _paid(ledger: str | None, record: Embedded) -> Iterator[Check]:
    if ledger is not None:
        yield check_ledger.released(record, ledger)
    else:
        entry = record.releases[0].entry
        yield asserted("ledger", f"entry {entry} is the author's word. Type --ledger FILE to look it up.")


def _promise(record: Embedded) -> Iterator[Check]:
    """The event against mechanism and error, epsilon against the event."""
    [one] = record.releases
    units, delta, relation = one.declared.units, record.delta, record.neighbouring_relation
    if not _is_ours(one):
        raise Wrong(f"{one.statistic} is no release of dpllm, by that mechanism and with that error. {_AGAIN}")
    costs.bounded(one.event)
    if (
        not record.drawn
        or units is None
        or delta * units >= 1
        or accounting.epsilon(one.event, delta, "zero_out", "rdp") > costs.LARGE  # which takes no time to compute
    ):
        raise Wrong(f"the release was not drawn, has a delta of 1/N or more, or promises nothing. {_AGAIN}")
    epsilon = costs.together([one.event], delta, relation)
    if record.epsilon < epsilon * (1 - TOLERANCE) or not close(record.epsilon, epsilon, costs.OTHER_VERSION):
        raise Wrong(f"epsilon is {epsilon:.6g} by its event, and another is stated. {_AGAIN}")
    yield verified("promise", f"{one.cost} are epsilon {epsilon:.6g} at delta {delta:g}, below 1/N.")
    yield asserted("author's word", "that the numbers are of these data, by this encoder, of so many units.")


def _is_ours(one: Release) -> bool:
    """Whether it has as many sums as its mechanism, the error of their noise, and a whole count for each name."""
    if not isinstance(one.event, SelfComposed):
        return False
    declared, value = one.declared, one.value or {}
    kind: embedded.Kind = "clusters" if declared.clusters else "classifier"
    due = embedded.figures(kind, one.noise_multiplier, one.event.count)
    if declared.clusters:
        named = [name[:3] for name in sorted(value)] == [f"{number:02} " for number in range(1, declared.clusters + 1)]
        named &= one.statistic == "clusters of texts"
    else:
        named = sorted([*(declared.values or ()), OTHER]) == sorted(value)
        named &= one.statistic.startswith("classifier of ")
    public = {"encoder", "units", "max_length", "dimensions", "clusters" if declared.clusters else "values"}
    return (
        named
        and not any(differences({name: getattr(one, name) for name in due}, due))
        and declared.model_dump(exclude_none=True).keys() == public
        and all(map(str.isprintable, value))
        and all(float(count).is_integer() and abs(count) < 2.0**52 for count in value.values())
        and bool(one.vectors and one.encoder)
    )


def check_labels(published: Published) -> Iterator[Check]:
    """What a statement says of its training labels."""
    shown, before = published.record.labels, published.record.labels_before
    if published.run is not None:
        wanted = published.run.load_config().data.label_epsilon
        if wanted != (shown.epsilon if shown else None):
            raise Wrong(
                f"the loss was made for labels of epsilon {wanted}, and the statement says another. {_DRAWN_AGAIN}"
            )
    if shown is not None:
        stated, due = shown.account_epsilon, shown.with_account(before=before).account_epsilon
        if stated != due:
            raise Wrong(f"{shown.dataset} holds {due} with the models before; {stated} is stated. {_DRAWN_AGAIN}")
        ledger = published.ledger if published.ledger is not None else check_ledger.ledger_of(published)
        yield from _labels(shown, ledger)


def check_label_record(path: Path, where: str | None) -> Iterator[Check]:
    """The record beside a file of flipped labels."""
    return guarded("labels", partial(_beside, path), where)


def _beside(path: Path, where: str | None) -> Iterator[Check]:
    record = record_of(path, LabelRecord, _DRAWN_AGAIN)
    if record.account_epsilon is None:
        raise Wrong(f"{path.name} does not state what the account of these labels holds. {_DRAWN_AGAIN}")
    yield from _labels(record, where)
    data = path.with_name(path.name.removesuffix(SUFFIX) + ".jsonl")
    if not data.exists():
        yield asserted("labels: file", f"{data.name} is not here, so nothing says whose labels these were.")
        return
    with regular(data, _MOST_DATA):
        pass
    if sha256(data, follow=False) != record.file_sha256:
        raise Wrong(f"{data.name} is not the file that was written: labels may have been drawn again. Restore it.")
    yield verified("labels: file", f"{data.name} is the file that this record names.")


def _labels(shown: Labels, where: str | None) -> Iterator[Check]:
    of_all = f", {shown.unit_epsilon:g} for the {shown.max_labels} of one unit" if shown.max_labels > 1 else ""
    yield verified("labels", f"a flip with probability {shown.probability:.6g} is epsilon {shown.epsilon:g}{of_all}.")
    yield asserted("labels: coins", "the author's word that each label was flipped once, by a coin that nobody knows.")
    yield _entry(shown, where)


def _entry(shown: Labels, where: str | None) -> Check:
    """An entry of their own in the ledger, of their own relation."""
    name = "labels: ledger"
    if where is None:
        total = f", which holds {shown.account_epsilon:g}," if shown.account_epsilon else ""
        entry = f"entry {shown.entry} of {shown.dataset}{total}"
        return asserted(name, f"{entry} is what the author says. To check: --ledger FILE.")
    chain = check_ledger.chain_at(where, None)
    reserved = [e for e in chain.entries if e.kind == "reserve" and e.facts["entry"] == shown.entry]
    stated = shown.dataset, shown.unit, shown.neighbouring_relation, PureDP(shown.unit_epsilon)
    if [(e.dataset, e.facts["unit"], e.facts["relation"], event_of(e)) for e in reserved] != [
        stated
    ] or not chain.steps.get(shown.entry):
        raise Wrong(
            f"{chain.where} has no entry {shown.entry} of {shown.dataset} that paid for these labels. {_DRAWN_AGAIN}"
        )
    account = [e for e in chain.entries if e.dataset == shown.dataset and e.kind in ("reserve", "import")]
    # Without a total (of models before, some counted other units) what is stated is this draw alone.
    events, known = [event_of(e) for e in account], shown.account_epsilon or shown.unit_epsilon
    now, least = added(*events), added(*events[: account.index(reserved[0]) + 1])
    charged = f"{chain.where} charged {shown.unit_epsilon:g} for this draw, and its account holds {now:g} in all"
    if known < least * (1 - 1e-9):
        raise Wrong(f"{charged}, {least:g} at the time; {known:g} is stated. {_DRAWN_AGAIN}")
    if len(events) == 1:
        return verified(name, f"{chain.where} charged exactly this, in an account that no other epsilon is added to.")
    if now <= known * (1 + 1e-9):
        return verified(name, f"{charged}, as is stated.")
    return asserted(name, f"{charged}, more than is stated: whoever sees all draws learns that much.")
