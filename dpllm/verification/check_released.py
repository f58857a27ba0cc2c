"""What was released without a training run: statistics, alone or beside a run, and labels that were randomised at the source.

Comes in: a release; a ledger or none. Goes out: checks. That such numbers were drawn from such data, or that a coin was tossed
for each label, nobody can see in a file: that is the author's word, and stays asserted.
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
from dpllm.privacy.releases import OTHER, Kind, Statistic, tidy, told
from dpllm.records import Json
from dpllm.run.subject import SUFFIX
from dpllm.statement import released, state
from dpllm.statement.privacy_record import PrivacyRecord
from dpllm.statement.released import BesideRun, Embedded, LabelRecord, Labels, Release
from dpllm.verification import check_ledger, check_promise, values
from dpllm.verification.values import TOLERANCE, Check, Published, Wrong

_MOST_DATA = 2**34


def statistics(release: Published[Any]) -> Iterator[Check]:
    """What was released about the data: its epsilon, alone and with all else, against its events."""
    promise, shown = release.promise, release.promise.statistics
    if shown is None:
        return
    terms, releases, alone = promise.terms, shown.releases, not isinstance(shown, BesideRun)
    cost = shown.pure
    if alone and cost == math.inf:  # Gaussian sums
        check_promise.bounded(shown.event())
        cost = accounting.epsilon(shown.event(), shown.delta, "zero_out", "rdp")
    same = terms is not None and (shown.unit, shown.neighbouring_relation) == (terms.unit, terms.neighbouring_relation)
    values.hold(
        {
            "the statistics protect another unit, or use another relation": alone or same,
            "the statistics' delta is 1/N or more, which protects nobody": shown.delta * promise.units < 1,
            "the statistics were not drawn, or promise nothing": shown.drawn and cost <= check_promise.LARGE,
        },
        release.again,
    )
    if strange := [each.statistic for each in releases if not _is_ours(each, shown.max_examples_per_unit)]:
        raise Wrong(
            f"{values.listed(strange)} is no statistic of dpllm, by its mechanism, with its error. {release.again}"
        )
    fresh: Json = {"epsilon": accounting.epsilon(shown.event(), shown.delta, shown.neighbouring_relation)}
    if isinstance(shown, BesideRun):
        fresh["with_run"] = state.beside_run(shown, terms, promise.reason is None).with_run
    stated = {name: getattr(shown, name) for name in fresh}
    less = alone and shown.epsilon < fresh["epsilon"] * (1 - TOLERANCE)  # which version computed it is not stated
    if (wrong := check_promise.differing(stated, fresh, terms, "statistics")) or less:
        raise Wrong(f"{values.listed(wrong or ['epsilon'])} is not what the statistics cost. {release.again}")
    all_else = "" if fresh.get("with_run") is None else f", with all else {fresh['with_run']:.6g}"
    cost_alone = f"epsilon {fresh['epsilon']:.6g} at delta {shown.delta:g}"
    yield values.verified("statistics", f"{len(releases)} releases cost {cost_alone}{all_else}.")


def _is_ours(release: Release, rows: int) -> bool:
    """Whether dpllm releases such a statistic: by its mechanism, with the error that its epsilon gives, of such a value."""
    if release.vectors is not None:  # for which sums alone pay
        return isinstance(release.event, SelfComposed) and _is_embedded(release, release.event.count)
    declared, value = release.declared.model_dump(exclude_none=True), release.value or {}
    kinds = {"": "units", "values": "shares", "numbers quantile": "quantiles"}
    asked = Statistic(cast(Kind, kinds.get(" ".join(declared))), release.statistic.partition(" of ")[2], **declared)
    if not isinstance(release.event, PureDP) or not asked.kind or asked.name != release.statistic:
        return False
    stated = release.mechanism, release.error_95, release.error_of
    if any(values.differences(stated, told(asked, rows, release.event.epsilon))):
        return False
    if asked.quantile:  # one of the candidates
        candidates = {tidy(float(number)) for number in asked.numbers}
        return [*value] == [f"{asked.quantile:g}"] and {*value.values()} <= candidates
    counts = [*asked.values, OTHER] if asked.values else ["units"]
    return sorted(value) == sorted(counts) and all(float(count).is_integer() for count in value.values())


def _is_embedded(release: Release, sums: int) -> bool:
    """Whether clusters or a classifier have as many sums as their mechanism, and a whole count for each name."""
    declared, value = release.declared, release.value or {}
    kind: embedded.Kind = "clusters" if declared.clusters else "classifier"
    due = embedded.figures(kind, release.noise_multiplier, sums)
    if declared.clusters:
        named = [name[:3] for name in sorted(value)] == [f"{number:02} " for number in range(1, declared.clusters + 1)]
        named &= release.statistic == "clusters of texts"
    else:
        named = sorted([*(declared.values or ()), OTHER]) == sorted(value)
        named &= release.statistic.startswith("classifier of ")
    public = {"encoder", "units", "max_length", "dimensions", "clusters" if declared.clusters else "values"}
    return (
        named
        and not any(values.differences({name: getattr(release, name) for name in due}, due))
        and declared.model_dump(exclude_none=True).keys() == public
        and all(map(str.isprintable, value))
        and all(float(count).is_integer() and abs(count) < 2.0**52 for count in value.values())
        and bool(release.vectors and release.encoder)
    )


def of_model(export: Published[PrivacyRecord]) -> Iterator[Check]:
    """What a statement says of its training labels."""
    shown, before = export.record.labels, export.record.labels_before
    if export.run is not None:
        wanted = export.run.load_config().data.label_epsilon
        if wanted != (shown.epsilon if shown else None):
            raise Wrong(f"the loss was made for labels of epsilon {wanted}, and another is stated. {export.again}")
    if shown is not None:
        stated, due = shown.account_epsilon, shown.with_account(before=before).account_epsilon
        if stated != due:
            raise Wrong(f"{shown.dataset} holds {due} with the models before; {stated} is stated. {export.again}")
        yield from _draw(export, shown)


def beside(flipped: Published[LabelRecord]) -> Iterator[Check]:
    """The file of flipped labels beside its record."""
    yield from _draw(flipped, flipped.record)
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
    """Shapes and numbers of centres or weights."""
    path = folder.directory / released.VECTORS
    with values.regular(path, released.MOST_VECTORS):
        released.read_vectors(path, folder.record.releases[0])
    yield values.verified("vectors", f"{released.VECTORS} has the stated shapes.")


def _draw(release: Published[Any], shown: Labels) -> Iterator[Check]:
    """A draw of labels: its coins, and its entry in the ledger, of their own relation."""
    costs = f"epsilon {shown.epsilon:g}, {shown.unit_epsilon:g} for the {shown.max_labels} of one unit"
    yield values.verified("labels", f"a flip with probability {shown.probability:.6g} is {costs}.")
    name, where = "labels: ledger", check_ledger.ledger_of(release)
    if where is None:
        entry = f"entry {shown.entry} of {shown.dataset}, and what its account holds,"
        yield values.asserted(name, f"{entry} is what the author says. To check: --ledger FILE.")
        return
    chain = check_ledger.chain_at(where, None)
    check_ledger.charged(chain, name, [shown.paid], release.again)
    account = [e for e in chain.entries if e.dataset == shown.dataset and e.kind in ("reserve", "import")]
    # Without a total (of models before, some counted other units) what is stated is this draw alone.
    events, known = [event_of(e) for e in account], shown.account_epsilon or shown.unit_epsilon
    before = account.index(chain.reserved()[shown.entry]) + 1
    now, least = added(*events), added(*events[:before])
    charged = f"{chain.where} charged {shown.unit_epsilon:g} for this draw, and its account holds {now:g} in all"
    if known < least * (1 - 1e-9):
        raise Wrong(f"{charged}, {least:g} at the time; {known:g} is stated. {release.again}")
    if len(events) == 1:
        yield values.verified(name, f"{chain.where} charged exactly this, in an account that nothing else is added to.")
    elif now <= known * (1 + 1e-9):
        yield values.verified(name, f"{charged}, as is stated.")
    else:
        yield values.asserted(name, f"{charged}, more than is stated: whoever sees all draws learns that much.")
