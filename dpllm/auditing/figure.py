"""The audit as pictures: ROC, exposure, the bound beside the claim, and extraction.

Comes in: the score table and the report made of it. Goes out: four PNG files. Nothing is shown that those two do not
hold.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from dpllm.auditing import attacks, statistics
from dpllm.auditing.rates import upper_limit
from dpllm.auditing.record import AuditRecord, Summary
from dpllm.auditing.table import CanaryScores, TokenTable, by_group

# Okabe and Ito's palette: told apart with any kind of colour vision; line styles and markers say the same in grey.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#000000")
_LINES = ("-", "--", "-.", ":")
_GREY = "#767676"

FILES = ("roc.png", "exposure.png", "bound.png", "extraction.png")


def draw(table: Sequence[CanaryScores], tokens: TokenTable, report: AuditRecord, folder: Path) -> None:
    """Draws the four pictures into a folder that exists.

    Args:
        table: Candidates and references.
        tokens: Of the same ones.
        report: What ``summarise`` made of them, and by which settings.
        folder: Where ``FILES`` are written.
    """
    groups = by_group(table)
    references = groups.pop(0)
    rows = by_group(attacks.of_version(table, tokens, report.settings.version))
    pictures: tuple[tuple[str, tuple[float, float], Callable[[Figure], None]], ...] = (
        ("roc.png", (6.0, 5.6), lambda figure: _roc(figure, rows, report)),
        ("exposure.png", (3.0 * max(1, len(groups)) + 1.0, 4.2), lambda f: _exposure(f, groups, references)),
        ("bound.png", (7.0, 3.2), lambda figure: _bound(figure, report)),
        ("extraction.png", (6.0, 4.2), lambda figure: _extraction(figure, report)),
    )
    for name, size, content in pictures:
        figure = Figure(figsize=size, dpi=130, layout="constrained")
        FigureCanvasAgg(figure)
        content(figure)
        # No software tag, so that the same scores give the same bytes.
        figure.savefig(folder / name, metadata={"Software": None})


def _roc(figure: Figure, groups: Mapping[int, Sequence[CanaryScores]], report: Summary) -> None:
    axes, claim, slope = figure.subplots(), report.claim, report.epsilon_lower_bound.slope or 0.0
    outside = [row for rows in groups.values() for row in attacks.held_out(rows)]
    negative_N = np.sort(attacks.calibrated(outside, slope))
    least = 1 / max(1, len(negative_N))
    rates = np.geomspace(least, 1, 300)
    axes.plot(rates, rates, color=_GREY, linewidth=1, linestyle=":", label="guessing")
    if claim:
        if report.roc_limit:  # of the whole mechanism
            fpr, tpr = np.array(report.roc_limit).T
            limit = np.interp(rates, fpr, tpr, right=1.0)
        else:
            grow, shrink, delta = math.exp(min(claim.epsilon, 700.0)), math.exp(-claim.epsilon), claim.delta
            limit = np.minimum(np.minimum(grow * rates + delta, 1 - shrink * (1 - delta - rates)), 1)
        axes.plot(rates, limit, color="black", linewidth=1.6, label="most that the claim allows, once-planted")
        axes.fill_between(rates, limit, 1, color="black", alpha=0.07, linewidth=0)
    lowest = least
    for place, (group, rows) in enumerate((group, rows) for group, rows in groups.items() if group):
        positive_P = attacks.calibrated(attacks.members(rows), slope)
        if not len(positive_P):
            continue
        thresholds = np.concatenate(([math.inf], np.unique(np.concatenate((positive_P, negative_N)))[::-1]))
        # A score counts from the threshold on, ties with it included on both axes.
        fpr = 1 - np.searchsorted(negative_N, thresholds, side="left") / len(negative_N)
        tpr = 1 - np.searchsorted(np.sort(positive_P), thresholds, side="left") / len(positive_P)
        axes.plot(
            np.maximum(fpr, least / 2),
            tpr,
            drawstyle="steps-post",
            linewidth=1.8,
            label=f"{_times(group)} ({len(positive_P)})",
            color=_COLOURS[place % len(_COLOURS)],
            linestyle=_LINES[place % len(_LINES)],
        )
        lowest = min(lowest, 1 / len(positive_P))
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(least, 1)
    axes.set_ylim(lowest / 1.5, 1.5)
    axes.set_xlabel(f"false positive rate (all {len(negative_N):,} that were never planted)")
    axes.set_ylabel("true positive rate")
    axes.set_title("Telling planted canaries from the others", fontsize=11)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2, fontsize=8, frameon=False)


def _exposure(figure: Figure, groups: Mapping[int, Sequence[CanaryScores]], references: Sequence[CanaryScores]) -> None:
    known = attacks.loss(references)
    top = math.log2(len(references))
    edges = np.append(np.arange(0, math.floor(top)), top)
    middles, null = (edges[:-1] + edges[1:]) / 2, 100 * (0.5 ** edges[:-1] - np.append(0.5 ** edges[1:-1], 0))
    panels = figure.subplots(1, max(1, len(groups)), sharey=True, squeeze=False)[0]
    for place, (axes, (group, rows)) in enumerate(zip(panels, groups.items(), strict=False)):
        inside = attacks.members(rows)
        bits = np.maximum(statistics.exposure(attacks.loss(inside), known), 0)
        share = 100 * np.histogram(bits, edges)[0] / max(1, len(bits))
        axes.bar(middles, share, np.diff(edges) * 0.85, color=_COLOURS[place % len(_COLOURS)], label="planted")
        axes.step(np.append(edges[:-1], top), np.append(null, null[-1]), where="post", color="black", linewidth=1.4)
        axes.plot([], [], color="black", linewidth=1.4, label="if nothing is learned")
        axes.set_title(f"{_times(group)} ({len(inside)})", fontsize=10)
        axes.set_xlabel("exposure (bits)")
        axes.set_xlim(0, top * 1.02)
        if len(bits):
            axes.axvline(bits.mean(), color=_GREY, linestyle="--", linewidth=1.2, label=f"mean {bits.mean():.2f}")
        axes.legend(loc="upper right", fontsize=8, frameon=False)
    panels[0].set_ylabel("share of canaries (%)")
    figure.suptitle(f"Rank of planted secrets among {len(references):,} references", fontsize=11)


def _bound(figure: Figure, report: Summary) -> None:
    axes = figure.subplots()
    bound, claim = report.epsilon_lower_bound, report.claim
    rows = [("lower bound, once-planted", bound.value, _COLOURS[0], f"{bound.value:.2f}")]
    rows.append(("most it could have shown", bound.ceiling, _GREY, f"{bound.ceiling:.2f}"))
    for group, seen in report.repeated.items():
        if seen.test and seen.claim:
            value, allowed = seen.test.value, seen.claim.epsilon
            rows.append(
                (f"lower bound, {_times(int(group))}", value, _COLOURS[2], f"{value:.2f} of {allowed:.3g} allowed")
            )
    if claim:
        rows.append(("claimed epsilon", claim.epsilon, _COLOURS[1], f"{claim.epsilon:.2f}"))
    places = np.arange(len(rows))[::-1]
    values = [row[1] for row in rows]
    axes.barh(places, values, color=[row[2] for row in rows], height=0.6)
    longest = max([*values, 0.1])
    for place, (_, value, _, text) in zip(places, rows, strict=True):
        axes.text(value + longest * 0.01, place, text, va="center", fontsize=9)
    if claim:
        axes.axvline(claim.epsilon, color=_COLOURS[1], linestyle="--", linewidth=1)
    axes.set_yticks(places, [row[0] for row in rows])
    axes.set_xlim(0, longest * 1.22)
    axes.set_xlabel(f"epsilon (confidence {1 - bound.alpha:.4g}, delta {bound.delta:g})")
    axes.set_title(f"What was shown beside what is claimed: {report.verdict.replace('_', ' ')}", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)


def _extraction(figure: Figure, report: Summary) -> None:
    axes = figure.subplots()
    counts = report.extraction
    series = (
        ("tuned", "inserted", "planted, completed by the tuned model", _COLOURS[1], "o"),
        ("base", "inserted", "planted, completed by the base model", _GREY, "s"),
        ("held_out_tuned", "held_out", "left out, completed by the tuned model", _COLOURS[0], "^"),
    )
    places = np.arange(len(counts))
    for shift, (part, whole, name, colour, marker) in zip((-0.12, 0.0, 0.12), series, strict=True):
        found = np.array([getattr(count, part) for count in counts.values()], dtype=float)
        total = np.array([getattr(count, whole) for count in counts.values()], dtype=float)
        share = np.divide(100 * found, total, out=np.full(len(found), np.nan), where=total > 0)
        low, high = _intervals(found, total)
        axes.errorbar(
            places + shift,
            share,
            yerr=[share - low, high - share],
            fmt=marker,
            color=colour,
            capsize=2,
            linewidth=1.2,
            markersize=5,
            label=name,
        )
    axes.set_xticks(places, [f"{_times(int(group))}\n({count.inserted})" for group, count in counts.items()])
    axes.set_xlim(-0.5, len(counts) - 0.5)
    axes.set_ylim(-3, 105)
    axes.set_ylabel("secrets completed word for word (%)")
    axes.set_title("Extraction by repetition (95% intervals)", fontsize=11)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), fontsize=8, frameon=False)


def _intervals(found: statistics.Floats, total: statistics.Floats) -> tuple[statistics.Floats, statistics.Floats]:
    """Clopper and Pearson's 95 % limits in per cent."""
    return 100 * (1 - upper_limit(total - found, found, 0.025)), 100 * upper_limit(found, total - found, 0.025)


def _times(group: int) -> str:
    return "planted once" if group == 1 else f"planted {group} times"
