"""An audit for a person at a terminal.

Comes in: the report. Goes out: a table whose every line says what was found for each number of repetitions, what nothing
learned would look like, and what the claim allows. Computes nothing but sums.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dpllm.auditing.record import AuditRecord, Summary
from dpllm.auditing.summary import PRIMARY_ATTACK

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table


Json = Mapping[str, Any]
Part = tuple[str, list[tuple[str, str, str, str]]]
"""A question, and for each group of canaries: how often planted, found, expected if nothing is learned, allowed."""
FEW = "too few"
NO_LIMIT = "no limit"


def table(report: Summary) -> Group:
    """A report for the terminal, readable at 80 columns: the verdict, a line for each question and group, the controls."""
    from rich.console import Group
    from rich.text import Text

    result = _grid("", "planted", "found", "chance", "allowed")
    beside = report if isinstance(report, AuditRecord) else None
    parts = [_bound(report), *_membership(report)]
    if beside and beside.shadows:
        parts += _shadows(beside.shadows)
    parts += _extraction(report)
    for name, lines in parts:
        for number, line in enumerate(lines):
            result.add_row("" if number else name, *line)
        result.add_section()
    caption = (
        "chance: found if nothing is learned; allowed: by the claim; never: canaries left out.\n"
        f"epsilon: {100 * (1 - report.epsilon_lower_bound.alpha):.4g}% sure; at most: what a perfect attack would show; "
        "intervals: 95%.\n"
    )
    return Group(
        Text.assemble((f"Audit: {report.verdict}", "bold"), "\n", report.verdict_reason, "\n"),
        result,
        Text(caption, style="dim"),
        _controls(report),
    )


def _grid(*columns: str) -> Table:
    """Columns without rules between them, for cells of one line."""
    from rich import box
    from rich.table import Table

    return Table(
        *columns, box=box.SIMPLE_HEAD, show_edge=False, show_header=bool(columns), padding=(0, 1, 0, 0), pad_edge=False
    )


def _bound(report: Summary) -> Part:
    bound, claim = report.epsilon_lower_bound, report.claim
    lines = [
        (
            "once",
            f"{bound.value:.3g} (at most {bound.ceiling:.3g})",
            "0",
            f"{claim.epsilon:.3g}" if claim else NO_LIMIT,
        ),
    ]
    tests = {group: seen for group, seen in report.repeated.items() if seen.test and seen.claim}
    for group in sorted(tests, key=int):
        seen = tests[group]
        assert seen.test is not None
        assert seen.claim is not None
        lines.append((_times(group), f"{seen.test.value:.3g}", "0", f"{seen.claim.epsilon:.3g}"))
    return "epsilon is at least", lines


def _membership(report: Summary) -> list[Part]:
    """How well the primary attack tells planted canaries from those left out."""
    primary = {group: seen[PRIMARY_ATTACK] for group, seen in report.by_group().items()}
    groups = sorted(report.exposure, key=int)
    limits = next((one.limits for one in report.attacks.values()), None) if "1" in primary else None
    parts: list[Part] = []
    for key, words, digits, null, limit in (
        ("auc", "told apart (AUC)", 2, "0.5", limits and limits.auc),
        ("tpr_at_1_percent_fpr", "caught at 1% false alarms", 3, "0.01", limits and limits.tpr_at_fpr_0_01),
        ("tpr_at_0_1_percent_fpr", "caught at 0.1% false alarms", 3, "0.001", limits and limits.tpr_at_fpr_0_001),
    ):
        seen = {group: (getattr(primary[group], key), getattr(primary[group], f"{key}_interval")) for group in groups}
        if key != "auc" and all(rate is None for rate, _ in seen.values()):
            continue
        allowed = NO_LIMIT if limit is None else f"{limit:.3f}"
        lines = [(_times(g), _interval(*seen[g], digits), null, allowed if g == groups[0] else "") for g in groups]
        parts.append((words, lines))
    return parts


def _shadows(shadows: Json) -> list[Part]:
    """AUC of the attacks that compare with shadow runs."""
    parts = []
    for name in ("lira", "rmia_online", "rmia_offline"):
        seen = {group: attacks[name] for group, attacks in shadows["attacks"].items() if attacks.get(name)}
        lines = [
            (_times(g), _interval(seen[g]["auc"], seen[g]["auc_interval"]), "0.5", "") for g in sorted(seen, key=int)
        ]
        parts.append((f"{name}, {shadows['shadows']} shadows (AUC)", lines or [("", "-", "0.5", "")]))
    return parts


def _controls(report: Summary) -> Table:
    """What is one value for the whole audit."""
    result, groups = _grid(), sorted(report.exposure, key=int)
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
            "epsilon is at least, to who saw each step",
            f"{gradient.epsilon_lower_bound:.3g} ({sure}; {most})",
        )
        measured = _interval(gradient.noise, gradient.noise_interval, 3)
        result.add_row("noise over C, on gradient canaries", f"{measured}; planned {gradient.noise_planned:.3f}")
    controls = report.controls
    separates = "it separates: do not trust this audit" if controls.base_separates else "it does not separate"
    result.add_row("control: base model, same canaries", separates)
    if controls.words:
        words_seen = _interval(controls.words.auc, controls.words.interval)
        result.add_row("control: words, no model (AUC)", words_seen + "; 0.5 if nothing")
    result.add_row("control: the attack works", controls.positive or "seen nowhere")
    if beside:
        result.add_row("audits of this run so far", str(beside.audits_run))
    return result


def _extraction(report: Summary) -> list[Part]:
    """What comes out of the model, and what the base model and canaries that were left out give."""
    exposure, counts, groups = report.exposure, report.extraction, sorted(report.exposure, key=int)

    def part(words: str, found: Callable[[str], object], never: object, base: object) -> Part:
        lines = [(_times(group), str(found(group)), "", "") for group in groups]
        return words, [*lines, ("never", str(never), "", ""), ("base model", str(base), "", "")]

    means = [(group, exposure[group].mean) for group in groups]
    null = f"{max((seen.null_mean or 0.0 for seen in exposure.values()), default=0.0):.2f}"
    shown = [(_times(group), "-" if mean is None else f"{mean:.2f}", null, "") for group, mean in means]
    parts: list[Part] = [("mean exposure (bits)", shown)]
    left_out, base = (sum(count.held_out_tuned for count in counts.values()), sum(c.base for c in counts.values()))
    words = "completed word for word"
    parts.append(part(words, lambda group: f"{counts[group].tuned} of {counts[group].inserted}", left_out, base))
    if isinstance(report, AuditRecord) and report.generation:
        written = {group: report.generation.completion[group].greedy for group in groups}
        sums = [sum(getattr(seen, side).near_tokens for seen in written.values()) for side in ("held_out", "base")]

        def near(group: str) -> str:
            return f"{written[group].inserted.near_tokens} of {written[group].inserted.prompts}"

        parts.append(part("nearly word for word", near, *sums))
    if report.sampling and groups:
        needed = {group: seen.all_tokens.median_attempts for group, seen in report.sampling.items()}
        first = needed[groups[0]]
        controls = _attempts(first.held_out), _attempts(first.base)
        parts.append(part("samples for an even chance", lambda group: _attempts(needed[group].inserted), *controls))
    return parts


def _times(group: str) -> str:
    return "once" if group == "1" else f"{group} times"


def _attempts(value: float | None) -> str:
    if value is None:
        return "never"
    return f"{value:,.0f}" if value < 1e6 else f"{value:.0e}" if value < 1e12 else "over 1e12"


def _rate(attack: Json, key: str) -> str:
    return _interval(attack[key], attack[f"{key}_interval"], 3)


def _interval(value: float | None, interval: Sequence[float] | None, digits: int = 2) -> str:
    if value is None or interval is None:
        return FEW
    return f"{value:.{digits}f} [{interval[0]:.{digits}f}, {interval[1]:.{digits}f}]"


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
