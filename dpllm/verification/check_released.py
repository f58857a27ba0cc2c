"""Checks of releases without training: statistics, alone or together with a run, and labels randomised at the source.

Comes in: a release; a ledger or none. Goes out: checks. No file can show that the numbers were drawn from these data, or that a
coin was tossed for each label: that is the author's word, so it is asserted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, cast

from dpllm.files import sha256
from dpllm.ledger.values import event_of
from dpllm.privacy import accounting, embedded
from dpllm.privacy.events import PureDP, SelfComposed
from dpllm.privacy.parts import added
from dpllm.privacy.releases import OTHER, Kind, Statistic, accuracy_of, tidy
from dpllm.records import Json
from dpllm.run.subject import SUFFIX
from dpllm.statement import released, state
from dpllm.statement.privacy_record import PrivacyRecord
from dpllm.statement.released import BesideRun, Embedded, LabelRecord, Labels, Release
from dpllm.verification import check_ledger, check_promise, values
from dpllm.verification.values import TOLERANCE, Check, Published, Wrong

_MOST_DATA = 2**34


def statistics(release: Published[Any]) -> Iterator[Check]:
    """Checks the epsilon of released statistics, alone and with all other releases, against their events."""
    promise, record = release.promise, release.promise.statistics
    if record is None:
        return
    terms, releases, standalone = promise.terms, record.releases, not isinstance(record, BesideRun)
    cost = record.pure
    if standalone and cost == math.inf:  # Gaussian sums
        check_promise.bounded(record.event())
        cost = accounting.epsilon(record.event(), record.delta, "zero_out", "rdp")
    protects = record.unit, record.neighbouring_relation
    same_unit = terms is not None and protects == (terms.unit, terms.neighbouring_relation)
    values.hold(
        {
            "the statistics protect another unit, or use another relation": standalone or same_unit,
            "the statistics' delta is 1/N or more, which protects nobody": record.delta * promise.units < 1,
            "the statistics were not drawn, or promise nothing": record.drawn and cost <= check_promise.LARGE,
        },
        release.again,
    )
    if unknown := [each.statistic for each in releases if not _is_statistic(each, record.max_examples_per_unit)]:
        raise Wrong(f"{values.listed(unknown)}: dpllm releases no such statistic with this error. {release.again}")
    computed: Json = {"epsilon": accounting.epsilon(record.event(), record.delta, record.neighbouring_relation)}
    if isinstance(record, BesideRun):
        computed["with_run"] = state.beside_run(record, terms, promise.reason is None).with_run
    stated = {name: getattr(record, name) for name in computed}
    # The version of the accountant is not stated.
    understated = standalone and record.epsilon < computed["epsilon"] * (1 - TOLERANCE)
    if (wrong := check_promise.differing(stated, computed, terms, "statistics")) or understated:
        raise Wrong(f"{values.listed(wrong or ['epsilon'])} is not what the statistics cost. {release.again}")
    all_else = "" if computed.get("with_run") is None else f", with all else {computed['with_run']:.6g}"
    cost_text = f"epsilon {computed['epsilon']:.6g} at delta {record.delta:g}"
    yield values.verified("statistics", f"{len(releases)} releases cost {cost_text}{all_else}.")


def _is_statistic(release: Release, rows: int) -> bool:
    """Whether dpllm releases such a statistic: its mechanism, its error at this epsilon, and the form of its value."""
    if release.vectors is not None:  # charged as Gaussian sums only
        return isinstance(release.event, SelfComposed) and _is_embedded(release, release.event.count)
    declared, value = release.declared.model_dump(exclude_none=True), release.value or {}
    kinds = {"": "units", "values": "shares", "numbers quantile": "quantiles"}
    statistic = Statistic(cast(Kind, kinds.get(" ".join(declared))), release.statistic.partition(" of ")[2], **declared)
    if not isinstance(release.event, PureDP) or not statistic.kind or statistic.name != release.statistic:
        return False
    stated = release.mechanism, release.error_95, release.error_of
    if any(values.differences(stated, accuracy_of(statistic, rows, release.event.epsilon))):
        return False
    if statistic.quantile:  # one of the candidates
        candidates = {tidy(float(number)) for number in statistic.numbers}
        return [*value] == [f"{statistic.quantile:g}"] and {*value.values()} <= candidates
    counts = [*statistic.values, OTHER] if statistic.values else ["units"]
    return sorted(value) == sorted(counts) and all(float(count).is_integer() for count in value.values())


def _is_embedded(release: Release, sums: int) -> bool:
    """Whether clusters or a classifier have the number of sums of their mechanism, and an integer count for each name."""
    declared, value = release.declared, release.value or {}
    kind: embedded.Kind = "clusters" if declared.clusters else "classifier"
    expected = embedded.figures(kind, release.noise_multiplier, sums)
    if declared.clusters:
        named = [name[:3] for name in sorted(value)] == [f"{number:02} " for number in range(1, declared.clusters + 1)]
        named &= release.statistic == "clusters of texts"
    else:
        named = sorted([*(declared.values or ()), OTHER]) == sorted(value)
        named &= release.statistic.startswith("classifier of ")
    public = {"encoder", "units", "max_length", "dimensions", "clusters" if declared.clusters else "values"}
    return (
        named
        and not any(values.differences({name: getattr(release, name) for name in expected}, expected))
        and declared.model_dump(exclude_none=True).keys() == public
        and all(map(str.isprintable, value))
        and all(float(count).is_integer() and abs(count) < 2.0**52 for count in value.values())
        and bool(release.vectors and release.encoder)
    )


def of_model(export: Published[PrivacyRecord]) -> Iterator[Check]:
    """Checks what a statement says about its training labels."""
    labels, earlier = export.record.labels, export.record.labels_before
    if export.run is not None:
        loss_epsilon = export.run.load_config().data.label_epsilon
        if loss_epsilon != (labels.epsilon if labels else None):
            raise Wrong(f"the loss is for labels of epsilon {loss_epsilon}, and another is stated. {export.again}")
    if labels is not None:
        stated, total = labels.account_epsilon, labels.with_account(before=earlier).account_epsilon
        if stated != total:
            raise Wrong(f"{labels.dataset} holds {total} with the models before; {stated} is stated. {export.again}")
        yield from _label_draw(export, labels)


def labels_file(flipped: Published[LabelRecord]) -> Iterator[Check]:
    """Checks the file of flipped labels against its record."""
    yield from _label_draw(flipped, flipped.record)
    name = flipped.artifact.sources[0].removesuffix(SUFFIX) + ".jsonl"
    data = flipped.directory / name
    if not data.exists():
        yield values.asserted("labels: file", f"{name} is not here, so nothing says whose labels these were.")
        return
    with values.regular(data, _MOST_DATA):
        pass
    if sha256(data, follow=False) != flipped.record.file_sha256:
        raise Wrong(f"{name} is not the file that was written: labels may have been drawn again. Restore it.")
    yield values.verified("labels: file", f"{name} is the file that this record names.")


def vectors(folder: Published[Embedded]) -> Iterator[Check]:
    """Checks shapes and numbers of centres or weights."""
    path = folder.directory / released.VECTORS
    with values.regular(path, released.MOST_VECTORS):
        released.read_vectors(path, folder.record.releases[0])
    yield values.verified("vectors", f"{released.VECTORS} has the stated shapes.")


def _label_draw(release: Published[Any], labels: Labels) -> Iterator[Check]:
    costs = f"epsilon {labels.epsilon:g}, {labels.unit_epsilon:g} for the {labels.max_labels} of one unit"
    yield values.verified("labels", f"a flip with probability {labels.probability:.6g} is {costs}.")
    name, location = "labels: ledger", check_ledger.ledger_of(release)
    if location is None:
        entry = f"entry {labels.entry} of {labels.dataset}, and what its account holds,"
        yield values.asserted(name, f"{entry} is what the author says. To check: --ledger FILE.")
        return
    chain = check_ledger.chain_at(location, None)
    check_ledger.charged(chain, name, [labels.paid], release.again)
    account = [e for e in chain.entries if e.dataset == labels.dataset and e.kind in ("reserve", "import")]
    # Without a total (if earlier models counted other units), only this draw is stated.
    events, stated_epsilon = [event_of(e) for e in account], labels.account_epsilon or labels.unit_epsilon
    position = account.index(chain.reserved()[labels.entry]) + 1
    held, epsilon_at_draw = added(*events), added(*events[:position])
    charge = f"{chain.where} charged {labels.unit_epsilon:g} for this draw, and its account holds {held:g} in all"
    if stated_epsilon < epsilon_at_draw * (1 - 1e-9):
        raise Wrong(f"{charge}, {epsilon_at_draw:g} at the time; {stated_epsilon:g} is stated. {release.again}")
    if len(events) == 1:
        yield values.verified(name, f"{chain.where} charged exactly this, in an account that nothing else is added to.")
    elif held <= stated_epsilon * (1 + 1e-9):
        yield values.verified(name, f"{charge}, as is stated.")
    else:
        yield values.asserted(name, f"{charge}, more than is stated: whoever sees all draws learns that much.")
