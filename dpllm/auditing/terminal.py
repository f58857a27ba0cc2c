"""An audit report for the terminal.

Comes in: the report. Goes out: the rows that its card shows too, followed by findings that only audit.json holds. Must not
compute anything but sums.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from dpllm.statement import audit_rows
from dpllm.statement.audit import Attack, AuditRecord, Summary
from dpllm.statement.audit_rows import Row
from dpllm.statement.formatting import bound, by_number, estimate, measured, proven

Json = Mapping[str, Any]


def table(report: Summary) -> Group:
    """The report, readable at 80 columns: the verdict, one row for each finding, the attacks and the secrets."""
    claim, gradient, groups = report.claim, report.gradient, report.by_group()
    claimed = f", beside ε = {bound(claim.epsilon)} claimed" if claim else ""
    rows = audit_rows.findings(
        report.epsilon_lower_bound,
        report.controls,
        gradient,
        beside=claimed,
        thing="row" if claim and claim.unit == "example" else "unit",
        planned=gradient.steps if gradient else 0,
    )
    attacks = [(name, attack) for group in by_number(groups) for name, attack in groups[group].items()]
    findings = Table.grid(padding=(0, 2, 0, 0))
    findings.add_column(max_width=24)
    for row in (*rows, *_repeated_groups(report)):
        findings.add_row(row.label, Text.assemble(row.value, " ", (row.meaning, "dim")))
    return Group(
        Text.assemble((f"Audit: {report.verdict}", "bold"), "\n", report.verdict_reason, "\n"),
        findings,
        *(("", _attacks(attacks), "", _secrets(report)) if attacks else ()),
    )


def _attacks(attacks: list[tuple[str, Attack]]) -> Table:
    rows = audit_rows.attacks(attacks)
    result, previous = _columns("Attack", *rows.header[2:6]), ""
    for name, group, *cells, _ in rows.rows:
        if group != previous:
            result.add_section()
            result.add_row(f"planted {_times(group)}", style="bold")
        result.add_row(name, *cells)
        previous = group
    return result


def _secrets(report: Summary) -> Table:
    rows = audit_rows.secrets(report.exposure, report.extraction)
    result = _columns(rows.header[0], *(row[0] for row in rows.rows))
    for number, label in enumerate(rows.header[1:], start=1):
        result.add_row(label, *(row[number] for row in rows.rows))
    return result


def _columns(*header: str) -> Table:
    return Table(*header, box=box.SIMPLE_HEAD, show_edge=False, padding=0, pad_edge=False)


def _repeated_groups(report: Summary) -> Iterator[Row]:
    for group in by_number(report.repeated):
        group_summary = report.repeated[group]
        if group_summary.test and group_summary.claim:
            allowed = f"beside ε = {bound(group_summary.claim.epsilon)} allowed for so many copies."
            yield Row(f"Lower bound, planted {_times(group)}", proven(group_summary.test.value), allowed)
    if report.sampling:
        for group in by_number(report.sampling):
            needed = report.sampling[group].all_tokens.median_attempts
            controls = f"base model {_attempts(needed.base)}, left out {_attempts(needed.held_out)}."
            yield Row(f"Samples for an even chance, {_times(group)}", f"{_attempts(needed.inserted)};", controls)
    if not isinstance(report, AuditRecord):
        return
    if report.claim and not report.published and not report.canaries.references:
        yield Row(
            "Coins",
            "labels.",
            "Every pair was planted; planted here says that the coin preferred the first answer. Each was flipped as the "
            "record's epsilon says; that the labels of the data were is the author's word.",
        )
    if report.shadows:
        yield from _shadows(report.shadows)
    yield Row("Audits of this run so far", str(report.audits_run), "")


def _shadows(shadows: Json) -> Iterator[Row]:
    lira = {group: attacks["lira"] for group, attacks in shadows["attacks"].items()}
    areas = [
        f"{_times(group)} {estimate(lira[group]['auc'], lira[group]['auc_interval'])}" for group in by_number(lira)
    ]
    yield Row(f"AUC of lira, {shadows['shadows']} shadow runs", "; ".join(areas) or "-", "")
    runs = shadows["many_runs"]
    if runs["value"] is None:
        yield Row("Lower bound, from many runs", "too few runs", "")
    else:
        yield Row("Lower bound, from many runs", proven(runs["value"]), f"They could show {measured(runs['ceiling'])}.")


def _times(group: str) -> str:
    return "once" if group == "1" else f"{group} times"


def _attempts(value: float | None) -> str:
    if value is None:
        return "never"
    return f"{value:,.0f}" if value < 1e6 else f"{value:.0e}" if value < 1e12 else "over 1e12"


def members_table(report: Json) -> Table:
    """The report of ``audit_members``: membership inference on real rows."""
    result = Table(
        *("score", "AUC", "caught at 1 % false alarms"),
        title=f"Members and others: {report['word']}",
        caption=f"{report['reason']} {report['note']}",
    )
    for name, attack in report["scores"].items():
        rate = attack["tpr_at_1_percent_fpr"]
        result.add_row(
            name,
            estimate(attack["auc"], attack["auc_interval"]),
            "too few others" if rate is None else estimate(rate, attack["tpr_at_1_percent_fpr_interval"], 3),
        )
    result.add_section()
    for name, control in (("base model", "base_model"), ("words alone, no model", "blind")):
        attack = report["controls"][control]
        result.add_row(f"control: {name}", estimate(attack["auc"], attack["auc_interval"]), "")
    return result
