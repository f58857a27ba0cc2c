"""A comparison as Markdown, for people who were not there.

Comes in: the JSON value of a comparison, and which pictures were drawn. Goes out: Markdown. Every number in it is a rounding
of one in the value.
"""

from __future__ import annotations

from collections.abc import Sequence

from dpllm.report import words
from dpllm.report.claim import Json
from dpllm.report.comparison import rows

SECTIONS = {"privacy": "Privacy", "utility": "Utility", "leakage": "Leakage", "cost": "Cost"}
PICTURES = {
    "utility.png": "Held-out loss against epsilon",
    "leakage.png": "Success of the attacks against epsilon",
    "comparison.png": "Utility and leakage of the compared runs",
}
PRIVATE = "Private: holds un-noised figures. Do not publish."
PUBLIC = "Public and released figures only."


def caption(values: Json) -> list[str]:
    """What must be said beside the table, in sentences."""
    lines = [PUBLIC if values["public"] else PRIVATE]
    for run in values["runs"]:
        privacy = run["privacy"]
        if privacy["enabled"] and not privacy["guarantee"]:
            lines.append(f"{run['name']} gives no guarantee: {str(privacy['reason']).rstrip('. ')}.")
        if run["status"] != "completed":
            lines.append(f"{run['name']} is {run['status']}.")
    return lines


def render(values: Json, pictures: Sequence[str]) -> str:
    """The page."""
    lines = ["# Runs side by side", "", " ".join(caption(values)), ""]
    shown = rows.rows(values)
    for section, title in SECTIONS.items():
        part = [row for row in shown if row.section == section]
        if part:
            lines += [f"## {title}", "", *_table(rows.headings(values), part), ""]
        if section == "privacy":
            lines += _together(values)
        if section == "utility" and part:
            lines += [*_picture("utility.png", pictures), _intervals(values), ""]
        if section == "leakage" and part:
            lines += _picture("leakage.png", pictures)
    lines += _picture("comparison.png", pictures)
    if values["left_out"]:
        lines += [
            "## Left out",
            "",
            "These may not be published:",
            "",
            *(f"- {line}" for line in values["left_out"]),
            "",
        ]
    if values["differences"]:
        names = [run["name"] for run in values["runs"]]
        lines += ["## Settings that differ", "", _line(["key", *names]), "|---|" + "---|" * len(names)]
        lines += [_line([key, *(row[name] for name in names)]) for key, row in values["differences"].items()]
        lines += [""]
    if values["public"]:
        lines += ["Times are measured and carry no noise: a side channel that no guarantee here covers.", ""]
    return "\n".join(lines)


def _together(values: Json) -> list[str]:
    found = values["together"]
    if found is None:
        return []
    stated = f"epsilon {words.bound(found['epsilon'])} at delta {words.number_text(found['delta'])}"
    line = f"The {found['runs']} runs with a guarantee come to {stated} together"
    line += (
        ", fixed before the first of them as one tuning group. "
        if found["fixed_together"]
        else ", if they were fixed before the first of them; the ledger says what holds otherwise. "
    )
    return [line + "A page with figures of several models tells of all of them.", ""]


def _intervals(values: Json) -> str:
    sure = words.percent(values["confidence"])
    measures = [one for part in (values["base"], *values["runs"]) for one in part["utility"].values()]
    if not any(one["interval"] for one in measures):
        return (
            "No intervals: the losses of single evaluation examples were not computed (dpllm compare does, unless told "
            "--no-intervals)."
        )
    return (
        f"In brackets: {sure} intervals, by drawing the evaluation examples anew. They do not cover the randomness of training: "
        "another run of the same recipe may lie outside. Below some fifty examples they are too narrow."
    )


def _picture(name: str, pictures: Sequence[str]) -> list[str]:
    return [f"![{PICTURES[name]}]({name})", ""] if name in pictures else []


def _table(headings: Sequence[str], part: Sequence[rows.Row]) -> list[str]:
    lines = [_line(["", *headings]), "|---|" + "---:|" * len(headings)]
    return lines + [_line([row.measure, *(cell.line() for cell in row.cells)]) for row in part]


def _line(cells: Sequence[object]) -> str:
    return "| " + " | ".join(words.cell(cell) for cell in cells) + " |"
