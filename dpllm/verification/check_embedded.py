"""A folder of clusters, or of a classifier: its files and page against describe.json, and its promise from the event there.

Comes in: the folder that ``run.embeddings`` writes, and a ledger or none. Goes out: checks. That these numbers were drawn from
such data is asserted: nobody can compute it from what is published.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from dpllm.files import CARD, SCHEMA_VERSION
from dpllm.privacy import accounting, embedded
from dpllm.privacy.events import SelfComposed
from dpllm.privacy.releases import OTHER
from dpllm.statement.released import MOST_VECTORS, RECORD, VECTORS, Release, Statistics, page, read_vectors
from dpllm.verification import check_export, check_ledger, costs
from dpllm.verification.check_dataset import of_folder, record_of
from dpllm.verification.values import (
    TOLERANCE,
    Check,
    Wrong,
    asserted,
    close,
    differences,
    read_text,
    regular,
    verified,
)

_AGAIN = "Restore the folder from where it was published."


def check(directory: Path, ledger: str | None) -> Iterator[Check]:
    """All checks of such a folder, in a fixed order."""

    def look() -> Statistics:
        return record_of(directory / RECORD, _read, _AGAIN)

    def files(found: Statistics) -> Iterator[Check]:
        names, problems = check_export.regular_files(directory, strict=False)
        if problems or set(names) != {CARD, RECORD, VECTORS}:
            raise Wrong(f"the folder holds other files than {CARD}, {RECORD} and {VECTORS}. {_AGAIN}")
        with regular(directory / VECTORS, MOST_VECTORS):
            read_vectors(directory / VECTORS, found.releases[0])
        if read_text(directory / CARD) != page(found):
            raise Wrong(f"{CARD} is not what {RECORD} gives. {_AGAIN}")
        yield verified("files", f"{VECTORS} has the stated hash and shapes; {CARD} follows from {RECORD}.")

    def paid(found: Statistics) -> Iterator[Check]:
        if ledger is None:
            yield asserted(
                "ledger", f"entry {found.releases[0].entry} is the author's word. Type --ledger FILE to look it up."
            )
        else:
            yield check_ledger.released(found, ledger)

    yield from of_folder(RECORD, look, (("files", files), ("promise", _promise), ("ledger", paid)))


def _read(stated: object) -> Statistics:
    given = dict(stated) if isinstance(stated, dict) else {}
    version = given.pop("schema_version", None)
    found = Statistics.checked(given)
    if version != SCHEMA_VERSION or len(found.releases) != 1:
        raise Wrong(f"{RECORD} is of another version, or has other statistics too. {_AGAIN}")
    return found


def _promise(found: Statistics) -> Iterator[Check]:
    """The event against mechanism and error, epsilon against the event."""
    [one] = found.releases
    units, delta, relation = one.declared.units, found.delta, found.neighbouring_relation
    if not _is_ours(one):
        raise Wrong(f"{one.statistic} is no release of dpllm, by that mechanism and with that error. {_AGAIN}")
    costs.bounded(one.event)
    if (
        not found.drawn
        or units is None
        or delta * units >= 1
        or accounting.epsilon(one.event, delta, "zero_out", "rdp") > costs.LARGE  # which takes no time to compute
    ):
        raise Wrong(f"the release was not drawn, has a delta of 1/N or more, or promises nothing. {_AGAIN}")
    epsilon = costs.together([one.event], delta, relation)
    if found.epsilon < epsilon * (1 - TOLERANCE) or not close(found.epsilon, epsilon, costs.OTHER_VERSION):
        raise Wrong(f"epsilon is {epsilon:.6g} by its event, and another is stated. {_AGAIN}")
    yield verified("promise", f"{one.cost} are epsilon {epsilon:.6g} at delta {delta:g}, below 1/N.")
    yield asserted("author's word", "that the numbers are of these data, by this encoder, of so many units.")


def _is_ours(one: Release) -> bool:
    """Whether it has as many sums as its mechanism, the error of their noise, and a whole count for each name."""
    if not isinstance(one.event, SelfComposed):
        return False
    declared, value = one.declared, one.value or {}
    kind: embedded.Kind = "clusters" if declared.clusters else "classifier"
    named = sorted([*(declared.values or ()), OTHER]) == sorted(value)
    named &= one.statistic.startswith("classifier of ")
    if declared.clusters:
        named = [name[:3] for name in sorted(value)] == [f"{number:02} " for number in range(1, declared.clusters + 1)]
        named &= one.statistic == "clusters of texts"
    stated = one.mechanism, one.error_95, one.error_of
    due = embedded.NAMES[kind], embedded.error_of(one.noise_multiplier), embedded.COUNTED
    public = {"encoder", "units", "max_length", "dimensions", "clusters" if declared.clusters else "values"}
    return (
        named
        and one.event == embedded.event_of(kind, one.noise_multiplier, one.event.count)
        and not any(differences(stated, due))
        and declared.model_dump(exclude_none=True).keys() == public
        and all(map(str.isprintable, value))
        and all(float(count).is_integer() and abs(count) < 2.0**52 for count in value.values())
        and bool(one.vectors and one.encoder)
    )
