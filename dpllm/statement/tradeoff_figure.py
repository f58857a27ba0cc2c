"""What the guarantee means for one person: how far any test for their presence can succeed, as a small figure.

Comes in: the terms of a privacy statement; for its curve, the accounting event. Goes out: SVG text, its description, points of a
curve. The picture is drawn from the terms alone, without a plotting library, so that whoever has them can draw the same bytes.
"""

from __future__ import annotations

import math
from xml.sax.saxutils import escape

from dpllm.errors import ConfigError, Refused
from dpllm.privacy.events import Event
from dpllm.privacy.privacy_loss import Relation, attacker_limits, profile
from dpllm.statement import formatting
from dpllm.statement.fields import Terms
from dpllm.statement.formatting import template

FILE = "privacy.svg"
POINTS = 25
DECADES = 3  # from a false-positive rate of 0.1 % to 100 %
RATES = tuple(float(f"{10 ** (DECADES * (place / (POINTS - 1) - 1)):.6g}") for place in range(POINTS))
"""False-positive rates at which the curve is known; 0.1 %, 1 % and 10 % are among them."""


def trade_off(event: Event, relation: Relation) -> list[list[float]] | None:
    """The largest true-positive rate that any membership test can have, at each of ``RATES``.

    Args:
        event: What was released, see ``dpllm.privacy.events``.
        relation: The neighbouring relation.

    Returns:
        [false-positive rate, true-positive rate] pairs; None where no accountant knows the event. The second is rounded up
        to four digits, so that versions of the accountant that differ in the last bits give the same.

    Guarantee:
        Upper bounds, from the (epsilon, delta) of the event at 512 epsilons at once; see ``privacy_loss.attacker_limits_of``.

    References:
        Kairouz, Oh and Viswanath 2015, "The Composition Theorem for Differential Privacy" (the lines).
    """
    try:
        pairs = list(zip(*profile(event, relation), strict=True))
    except (ConfigError, Refused):
        return None
    tops = ((rate, min(_line(epsilon, delta, rate) for epsilon, delta in pairs)) for rate in RATES)
    return [[rate, min(1.0, max(0.0, float(formatting.bound(top))))] for rate, top in tops]


def recognised(terms: Terms, beside: float = 0.0) -> float:
    """The largest share of units that any test recognises while it is wrong about 1% of those that were not used.

    Guarantee:
        An upper bound, also where the tester sees other releases about the same units, of epsilon ``beside`` at a delta of 0.
        The curve F is concave and rises. Given their outcome, a test that is wrong about a share a recognises at most F(a);
        the mean of a over outcomes with the unit is at most e^beside 1%, so that of F(a) is at most F(e^beside 1%) (Jensen).
    """
    if not beside:
        return _limits(terms)["tpr_at_fpr_0.01"]
    return next((most for rate, most in _curve(terms) if rate >= 0.01 * math.exp(min(beside, 700.0))), 1.0)


def alt_text(terms: Terms) -> str:
    """The figure in words, for those who do not see it."""
    limits = _limits(terms)
    area = formatting.bound(limits["auc"])
    one, ten = (formatting.percent_bound(limits[f"tpr_at_fpr_{rate}"]) for rate in (0.01, 0.001))
    # Brackets would end the description in Markdown.
    who = formatting.line(_who(terms.unit).replace("[", "(").replace("]", ")"))
    return (
        f"Curve of the largest true-positive rate that any test for the presence of {who} can have against its "
        f"false-positive rate: at most {one} at 1%, at most {ten} at 0.1%. "
        f"A dotted diagonal shows guessing. The area under the curve is at most {area}, of "
        f"guessing 0.5."
    )


def figure(terms: Terms) -> str:
    """The figure as SVG, on a white ground with a frame, for light and dark pages.

    Args:
        terms: What is guaranteed.

    Returns:
        SVG text; equal terms give equal text.
    """
    limits = _limits(terms)
    drawn = template("privacy.svg.j2").render(
        w=formatting,
        terms=terms,
        escape=escape,
        alt_text=alt_text(terms),
        who=_who(terms.unit),
        place=_place,
        curve=_curve(terms),
        marks=[(rate, limits[f"tpr_at_fpr_{rate}"]) for rate in (0.001, 0.01)],
        area=limits["auc"],
    )
    return drawn + "\n"


def _who(unit: str) -> str:
    unit = formatting.visible(unit)
    return "one training example" if unit == "example" else f"one {unit if len(unit) <= 24 else unit[:23] + '…'}"


def _curve(terms: Terms) -> list[tuple[float, float]]:
    """The limit at each of ``RATES``, from the whole mechanism where it is known."""
    known = dict(terms.trade_off or ())
    return [(rate, min(_line(terms.epsilon, terms.delta, rate), known.get(rate, 1.0))) for rate in RATES]


def _limits(terms: Terms) -> dict[str, float]:
    """Of rates and area: by the curve, by epsilon and delta, and by the whole mechanism where that is known."""
    whole = terms.limits.to_json() if terms.limits else {}
    points = {f"tpr_at_fpr_{rate}": limit for rate, limit in _curve(terms)}
    return {
        name: min(value, points.get(name, 1.0), 1.0 if whole.get(name) is None else whole[name])
        for name, value in attacker_limits(terms.epsilon, terms.delta).items()
    }


def _line(epsilon: float, delta: float, rate: float) -> float:
    shrink, grow = math.exp(-epsilon), math.exp(min(epsilon, 700.0))
    return min(1.0, grow * rate + delta, 1.0 - shrink * (1.0 - delta - rate))


def _place(rate: float) -> float:
    """How far along its axis a rate lies, from 0 to 1."""
    return 1 + math.log10(max(rate, 1e-3)) / DECADES
