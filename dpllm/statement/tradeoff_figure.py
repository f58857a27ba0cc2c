"""A small figure of what the guarantee means for one person: the limit on any test for their presence.

Comes in: the Plan of a privacy statement. Goes out: SVG text, its description. The figure depends on the Plan alone and needs no
plotting library, so that anyone with the Plan can draw the same bytes.
"""

from __future__ import annotations

import math
from xml.sax.saxutils import escape

from dpllm.privacy.limits import DECADES, RATES, attacker_limits, most_recognised
from dpllm.privacy.plan import Plan
from dpllm.statement import formatting
from dpllm.statement.formatting import template

FILE = "privacy.svg"


def recognised(plan: Plan, beside: float = 0.0) -> float:
    """The largest true-positive rate of any membership test at a false-positive rate of 1%.

    Guarantee:
        An upper bound, even if the tester sees other releases about the same units, of epsilon ``beside`` at delta 0.
        The curve F is concave and increasing. Given their outcome, a test with false-positive rate a recognises at most F(a);
        the mean of a over outcomes with the unit is at most e^beside 1%, so that of F(a) is at most F(e^beside 1%) (Jensen).
    """
    if not beside:
        return _limits(plan)["tpr_at_fpr_0.01"]
    return next((reached for rate, reached in _curve(plan) if rate >= 0.01 * math.exp(min(beside, 700.0))), 1.0)


def alt_text(plan: Plan) -> str:
    """The figure in words, for readers who cannot see it."""
    limits = _limits(plan)
    area = formatting.bound(limits["auc"])
    at_one, at_a_tenth = (formatting.percent_bound(limits[f"tpr_at_fpr_{rate}"]) for rate in (0.01, 0.001))
    # Brackets would end the description in Markdown.
    person = formatting.line(_who(plan.unit).replace("[", "(").replace("]", ")"))
    return (
        f"Curve of the largest true-positive rate that any test for the presence of {person} can have against its "
        f"false-positive rate: at most {at_one} at 1%, at most {at_a_tenth} at 0.1%. "
        f"A dotted diagonal shows guessing. The area under the curve is at most {area}, of "
        f"guessing 0.5."
    )


def figure(plan: Plan) -> str:
    """The figure as SVG, on a white background with a frame, for light and dark pages.

    Args:
        plan: The guarantee.

    Returns:
        SVG text; equal Plans give equal text.
    """
    limits = _limits(plan)
    svg = template("privacy.svg.j2").render(
        w=formatting,
        plan=plan,
        escape=escape,
        alt_text=alt_text(plan),
        who=_who(plan.unit),
        place=_place,
        curve=_curve(plan),
        marks=[(rate, limits[f"tpr_at_fpr_{rate}"]) for rate in (0.001, 0.01)],
        area=limits["auc"],
    )
    return svg + "\n"


def _who(unit: str) -> str:
    unit = formatting.visible(unit)
    return "one training example" if unit == "example" else f"one {unit if len(unit) <= 24 else unit[:23] + '…'}"


def _curve(plan: Plan) -> list[tuple[float, float]]:
    """The limit at each of ``RATES``, tightened by the mechanism's trade-off curve where it is known."""
    rates = dict(plan.trade_off)
    return [(rate, min(most_recognised(plan.epsilon, plan.delta, rate), rates.get(rate, 1.0))) for rate in RATES]


def _limits(plan: Plan) -> dict[str, float]:
    """Smallest limits on rates and area: by the curve, by epsilon and delta, and by the mechanism where it is known."""
    limits = plan.limits.to_json()
    points = {f"tpr_at_fpr_{rate}": limit for rate, limit in _curve(plan)}
    return {
        name: min(value, points.get(name, 1.0), 1.0 if limits[name] is None else limits[name])
        for name, value in attacker_limits(plan.epsilon, plan.delta).items()
    }


def _place(rate: float) -> float:
    return 1 + math.log10(max(rate, 1e-3)) / DECADES
