"""An audit for a person at a terminal.

Comes in: the report. Goes out: a table whose every line says what was found for each number of repetitions, what nothing
learned would look like, and what the claim allows. Computes nothing but sums.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dpllm.auditing.record import AuditRecord, Discoverable, Generation, Summary
from dpllm.auditing.summary import PRIMARY_ATTACK

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

    from dpllm.auditing.mechanism_report import MechanismReport

Json = Mapping[str, Any]
FEW = "too few"
NO_LIMIT = "no limit"


def table(report: Summary) -> Group:
    """A report for the terminal: the verdict, what was found for each group, and the controls."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    groups = sorted(report.exposure, key=int)
    result = Table(
        "what was asked", *(_times(group) for group in groups), "if nothing is learned", "the claim allows, once"
    )
    primary = {group: seen[PRIMARY_ATTACK] for group, seen in report.by_group().items()}
    beside = report if isinstance(report, AuditRecord) else None

    def row(name: str, found: Callable[[str], str], null: str, allowed: str = "") -> None:
        result.add_row(name, *(found(group) for group in groups), null, allowed)

    _bound(report, row)
    limits = next((one.limits for one in report.attacks.values()), None) if "1" in primary else None
    result.add_section()
    row(
        "told from those left out (AUC)",
        lambda group: _interval(primary[group].auc, primary[group].auc_interval),
        "0.5",
        f"{limits.auc:.3f}" if limits else NO_LIMIT,
    )
    for key, words, fpr, limit in (
        ("tpr_at_1_percent_fpr", "1 %", "0.01", limits and limits.tpr_at_fpr_0_01),
        ("tpr_at_0_1_percent_fpr", "0.1 %", "0.001", limits and limits.tpr_at_fpr_0_001),
    ):
        caught = {group: (getattr(primary[group], key), getattr(primary[group], f"{key}_interval")) for group in groups}
        if any(rate is not None for rate, _ in caught.values()):
            allowed = NO_LIMIT if limit is None else f"{limit:.3f}"
            row(f"caught at {words} false alarms", lambda group, seen=caught: _interval(*seen[group]), fpr, allowed)  # type: ignore[misc]
    if beside and beside.shadows:
        _shadows(beside.shadows, row)
    _extraction(report, row)
    if beside and beside.generation:
        _beams(beside.generation, row, groups)
    if report.sampling:
        _samples(report.sampling, row, groups)
    return Group(
        Text.assemble((f"Audit: {report.verdict}", "bold"), "\n", report.verdict_reason),
        result,
        _controls(report, groups),
    )


def _shadows(shadows: Json, row: Callable[..., None]) -> None:
    """AUC of the attacks that compare with shadow runs."""
    for name in ("lira", "rmia_online", "rmia_offline"):

        def found(group: str, name: str = name) -> str:
            seen = shadows["attacks"].get(group, {}).get(name)
            return _interval(seen["auc"], seen["auc_interval"]) if seen else "-"

        row(f"{name} with {shadows['shadows']} shadows (AUC)", found, "0.5")


def _controls(report: Summary, groups: Sequence[str]) -> Table:
    """What is one value for the whole audit."""
    from rich.table import Table

    result = Table(show_header=False)
    beside = report if isinstance(report, AuditRecord) else None
    if groups:
        others = {name: attack.auc for name, attack in report.attacks.items() if name != PRIMARY_ATTACK}
        shown = [f"{name} {value:.2f}" for name, value in others.items() if value is not None]
        result.add_row(f"other attacks, {_times(groups[0])} (AUC)", ", ".join(shown))
    if beside and beside.shadows:
        many = beside.shadows["many_runs"]
        value = (
            "too few runs" if many["value"] is None else f"{many['value']:.3g} (they could show {many['ceiling']:.3g})"
        )
        result.add_row("epsilon is at least, from many runs", value)
    if (gradient := report.gradient) and gradient.noise is not None:
        sure, most = f"{100 * (1 - gradient.alpha):.4g}% sure", f"a perfect attack: {gradient.ceiling:.3g}"
        result.add_row(
            "epsilon is at least, on gradient canaries, for whoever saw every step",
            f"{gradient.epsilon_lower_bound:.3g} ({sure}; {most})",
        )
        measured = _interval(gradient.noise, gradient.noise_interval)
        result.add_row("noise over C, as measured on them", f"{measured}; planned {gradient.noise_planned:.3f}")
    details = beside.generation.personal if beside and beside.generation else None
    if details:
        inserted, base, held_out = (
            f"{sum(one.own for one in side)} of {sum(one.prompts for one in side)}"
            for side in zip(*((seen.inserted, seen.base, seen.held_out) for seen in details.values()), strict=True)
        )
        result.add_row("personal details that came out by name", f"{inserted} (base model {base}, left out {held_out})")
    controls = report.controls
    separates = "it separates: do not trust this audit" if controls.base_separates else "it does not separate"
    result.add_row("control: base model on the same canaries", separates)
    if controls.words:
        words_seen = _interval(controls.words.auc, controls.words.interval)
        result.add_row("control: words alone, no model (AUC)", words_seen + "; 0.5 if nothing")
    result.add_row("control: the attack works where it should", controls.positive or "seen nowhere")
    if beside:
        result.add_row("audits in this run directory so far", str(beside.audits_run))
    return result


def _bound(report: Summary, row: Callable[..., None]) -> None:
    bound, claim = report.epsilon_lower_bound, report.claim

    def found(group: str) -> str:
        if group == "1":
            return f"{bound.value:.3g} (a perfect attack: {bound.ceiling:.3g})"
        seen = report.repeated.get(group)
        return (
            f"{seen.test.value:.3g} of {seen.claim.epsilon:.3g} allowed" if seen and seen.test and seen.claim else "-"
        )

    allowed = f"{claim.epsilon:.3g}" if claim else NO_LIMIT
    row(f"epsilon is at least ({100 * (1 - bound.alpha):.4g}% sure)", found, "0", allowed)


def _extraction(report: Summary, row: Callable[..., None]) -> None:
    """What comes out of the model, beside what the base model and canaries that were left out give."""
    exposure, counts = report.exposure, report.extraction

    def exposed(group: str) -> str:
        mean = exposure[group].mean
        return "-" if mean is None else f"{mean:.2f}"

    null = max((seen.null_mean or 0.0 for seen in exposure.values()), default=0.0)
    row("mean exposure (bits)", exposed, f"{null:.2f}")
    base, held_out = (sum(count.base for count in counts.values()), sum(c.held_out_tuned for c in counts.values()))
    row(
        "completed word for word",
        lambda group: f"{counts[group].tuned} of {counts[group].inserted}",
        _beside(str(base), str(held_out)),
    )


def _beams(generation: Generation, row: Callable[..., None], groups: Sequence[str]) -> None:
    found = {group: generation.completion[group].beam for group in groups}
    base, held_out = (sum(getattr(seen, side).near_tokens for seen in found.values()) for side in ("base", "held_out"))
    row(
        "completed or nearly, by beam search",
        lambda group: f"{found[group].inserted.near_tokens} of {found[group].inserted.prompts}",
        _beside(str(base), str(held_out)),
    )


def _samples(sampling: Mapping[str, Discoverable], row: Callable[..., None], groups: Sequence[str]) -> None:
    needed = {group: sampling[group].all_tokens.median_attempts for group in groups}
    row(
        "samples for an even chance of the secret",
        lambda group: _attempts(needed[group].inserted),
        _beside(*(_attempts(getattr(needed[groups[0]], side) if groups else None) for side in ("base", "held_out"))),
    )


def _beside(base: str, held_out: str) -> str:
    return f"base model {base}, left out {held_out}"


def _times(group: str) -> str:
    return "planted once" if group == "1" else f"planted {group} times"


def _attempts(value: float | None) -> str:
    if value is None:
        return "never"
    return f"{value:,.0f}" if value < 1e6 else f"{value:.0e}" if value < 1e12 else "over 1e12"


def _rate(attack: Json, key: str) -> str:
    return _interval(attack[key], attack[f"{key}_interval"])


def _interval(value: float | None, interval: Sequence[float] | None) -> str:
    return FEW if value is None or interval is None else f"{value:.3f} ({interval[0]:.3f} to {interval[1]:.3f})"


def members_table(report: Json) -> Table:
    """Membership of real rows."""
    from rich.table import Table

    result = Table(
        *("score", "AUC", "the same on the base model", "caught at 1 % false alarms"),
        title=f"Members and others: {report['word']}",
        caption=f"{report['reason']} {report['note']}",
    )
    for name, seen in report["scores"].items():
        base, rate = seen["base_auc"], seen["tpr_at_1_percent_fpr"]
        result.add_row(
            name,
            _interval(seen["auc"], seen["auc_interval"]),
            "it compares both" if base is None else _interval(base, seen["base_auc_interval"]),
            "too few others" if rate is None else _rate(seen, "tpr_at_1_percent_fpr"),
        )
    result.add_section()
    controls = report["controls"]
    controlled = {"base model": controls["base_model"], "words alone, no model": controls["blind"]}
    for name, seen in controlled.items():
        if seen:
            result.add_row(f"control: {name}", _interval(seen["auc"], seen["auc_interval"]), "", "")
    return result


def mechanism_table(report: MechanismReport) -> Table:
    """An audit of the mechanism for the terminal."""
    from rich.table import Table

    result = Table(
        *("what, on a small model that stands for yours", "found", "by the Plan", "p"),
        title=f"Audit of the mechanism: {report.verdict}",
        caption=f"{report.reason} A test fails below p = {report.level:.1g}.",
    )
    for test in report.tests:
        mark = "" if test.p_value > report.level else " !"
        result.add_row(test.name, f"{test.found:.4g}", f"{test.promised:.4g}", f"{test.p_value:.2g}{mark}")
    result.add_row("largest contribution of a unit", f"{report.largest_contribution:.7g} C", "at most 1 C", "exact")
    for label, several in (("one row", False), ("several rows", True)):
        of_kind = [pair.sum_difference for pair in report.pairs if (pair.rows > 1) == several]
        if of_kind:
            name = f"neighbours, a unit of {label} ({len(of_kind)} pair{'s' * (len(of_kind) != 1)})"
            result.add_row(name, f"{max(of_kind):.7g} C", "at most 1 C", "exact")
    shown = f"{report.epsilon:.3g} stated at delta {report.bound.delta:.1g}; a perfect attack shows {report.bound.ceiling:.3g}"
    result.add_row(f"epsilon of {report.promised_steps} steps, lower bound", f"{report.bound.value:.3g}", shown, "")
    return result


def part_table(name: str, values: Json) -> Table:
    """One attack: for a score one column for each group; else every number by its place in the report."""
    from rich.table import Column, Table

    first = next(iter(values.values()), None)
    if isinstance(first, Mapping) and "auc" in first:
        result = Table("what", *(_times(group) for group in values), title=f"Attack: {name}")
        limits = [one["limits"] for one in values.values()]
        result.add_row("AUC", *(_interval(one["auc"], one["auc_interval"]) for one in values.values()))
        result.add_row("the claim allows", *(f"{one['auc']:.3f}" if one else NO_LIMIT for one in limits))
        for part, words, fpr in (("1_percent", "1 %", "0.01"), ("0.1_percent", "0.1 %", "0.001")):
            key = f"tpr_at_{part}_fpr"
            result.add_row(f"caught at {words} false alarms", *(_rate(one, key) for one in values.values()))
            allowed = (f"{one[f'tpr_at_fpr_{fpr}']:.3f}" if one else NO_LIMIT for one in limits)
            result.add_row("the claim allows", *allowed)
        control = (_rate(one, "base_control_auc") for one in values.values())
        result.add_row("control: loss of the base model (AUC)", *control)
        result.add_row("planted", *(str(one["positives"]) for one in values.values()))
        result.add_row("not planted", *(str(one["negatives"]) for one in values.values()))
        return result
    result = Table(Column("what", overflow="fold"), Column("found", overflow="fold"), title=f"Attack: {name}")
    for place, value in _flat(values):
        result.add_row(place, f"{value:.4g}" if isinstance(value, float) else str(value))
    return result


def _flat(value: Any, place: str = "") -> list[tuple[str, Any]]:
    if isinstance(value, Mapping):
        return [pair for key, inner in value.items() for pair in _flat(inner, f"{place}.{key}" if place else str(key))]
    if isinstance(value, list) and all(isinstance(one, float) for one in value):
        return [(place, " to ".join(f"{one:.4g}" for one in value))]
    return [] if value is None else [(place, value)]
