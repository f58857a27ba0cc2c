"""Draws the README's figure: utility and leakage of a real model at epsilon 3, 8 and without privacy, in one row of panels.

    python scripts/figure_readme.py           writes docs/figures/real-model.png

Comes in: the committed comparison and Plans of ``model_cards/smollm2-e2e*``; nothing is measured here.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from matplotlib import pyplot

ROOT = Path(__file__).parents[1]
INK, PRIVATE, OPEN, BASE = "#333333", "#0072b2", "#d55e00", "#7a7a7a"
LABELS = ("ε = 3", "ε = 8", "no privacy")


def read(name: str) -> dict[str, Any]:
    return dict(json.loads((ROOT / "model_cards" / name).read_text(encoding="utf-8")))


def main() -> None:
    comparison = read("smollm2-e2e/comparison.json")
    runs, base = comparison["runs"], comparison["base"]
    limits = [read(f"{run['name']}/plan.json")["limits"]["tpr_at_fpr_0.01"] for run in runs if run["epsilon"]]
    figure, (bleu, loss, recognised) = pyplot.subplots(1, 3, figsize=(9, 2.9), layout="constrained", facecolor="white")

    scores = [run["bleu"]["value"] for run in runs]
    reach = [[abs(run["bleu"]["interval"][side] - run["bleu"]["value"]) for run in runs] for side in (0, 1)]
    bleu.bar(LABELS, scores, 0.6, yerr=reach, color=[PRIVATE, PRIVATE, OPEN], ecolor=INK, capsize=3)
    bleu.bar_label(bleu.containers[-1], [f"{score:.1f}" for score in scores], label_type="center", color="white")
    bleu.axhline(base["bleu"]["value"], color=BASE, linestyle="--")
    bleu.set_xlabel(f"dashed: base model, {base['bleu']['value']:.1f}", color=INK)
    bleu.set_title("BLEU, more is better", loc="left", fontsize=10, color=INK)

    losses = [run["loss"] for run in runs]
    loss.bar(LABELS, losses, 0.6, color=[PRIVATE, PRIVATE, OPEN])
    loss.bar_label(loss.containers[0], [f"{value:.2f}" for value in losses], label_type="center", color="white")
    loss.axhline(base["loss"], color=BASE, linestyle="--")
    loss.set_xlabel(f"dashed: base model, {base['loss']:.2f}", color=INK)
    loss.set_title("held-out loss, nats per token", loc="left", fontsize=10, color=INK)

    shares = [math.ceil(1000 * limit) / 10 for limit in limits] + [100]  # as the cards round them
    recognised.bar(LABELS, shares, 0.6, color=[PRIVATE, PRIVATE, OPEN])
    recognised.bar_label(
        recognised.containers[0], [*(f"{share:.1f}%" for share in shares[:2]), "no limit"], padding=2, color=INK
    )
    recognised.axhline(1, color=BASE, linestyle="--")
    recognised.set_xlabel("dashed: guessing, 1%", color=INK)
    recognised.set_ylim(0, 115)
    recognised.set_title("recognised at most, 1% false alarms", loc="left", fontsize=10, color=INK)
    for axis in (bleu, loss, recognised):
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(ROOT / "docs" / "figures" / "real-model.png", dpi=150)


if __name__ == "__main__":
    main()
