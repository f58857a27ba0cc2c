"""What the guarantee means for one person: how far any test for their presence can succeed, as a small figure.

Comes in: the terms of a privacy statement; for its curve, the accounting event. Goes out: SVG text, its description, points of a
curve. The picture is drawn from the terms alone, without a plotting library, so that whoever has them can draw the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from xml.sax.saxutils import escape

from dpllm.errors import ConfigError, Refused
from dpllm.privacy import events
from dpllm.privacy.limits import attacker_limits, profile
from dpllm.privacy.privacy_loss import Relation
from dpllm.statement import formatting
from dpllm.statement.fields import Terms

FILE = "privacy.svg"
POINTS = 25
DECADES = 3  # from a false-positive rate of 0.1 % to 100 %
RATES = tuple(float(f"{10 ** (DECADES * (place / (POINTS - 1) - 1)):.6g}") for place in range(POINTS))
"""False-positive rates at which the curve is known; 0.1 %, 1 % and 10 % are among them."""

_WIDTH, _HEIGHT = 640, 326
_LEFT, _TOP, _SIDE = 74, 42, 232  # of the square that holds the curve
_INK, _GREY, _CURVE, _FILL = "#222222", "#6b6b6b", "#0072B2", "#cfe3f1"  # blue of Okabe and Ito's palette


def trade_off(event: events.Event, relation: Relation) -> list[list[float]] | None:
    """The largest true-positive rate that any membership test can have, at each of ``RATES``.

    Args:
        event: What was released, see ``dpllm.privacy.events``.
        relation: The neighbouring relation.

    Returns:
        [false-positive rate, true-positive rate] pairs; None where no accountant knows the event. The second is rounded up
        to four digits, so that versions of the accountant that differ in the last bits give the same.

    Guarantee:
        Upper bounds, from the (epsilon, delta) of the event at 512 epsilons at once; see ``limits.attacker_limits_of``.

    References:
        Kairouz, Oh and Viswanath 2015, "The Composition Theorem for Differential Privacy" (the lines).
    """
    try:
        return [list(point) for point in _trade_off(events.normal_form(event), relation)]
    except (ConfigError, Refused):
        return None


@lru_cache(maxsize=64)
def _trade_off(terms: events.Terms, relation: Relation) -> tuple[tuple[float, float], ...]:
    pairs = list(zip(*profile(terms, relation), strict=True))
    return tuple((rate, _up(min(_line(epsilon, delta, rate) for epsilon, delta in pairs))) for rate in RATES)


def alt_text(terms: Terms) -> str:
    """The figure in words, for those who do not see it."""
    one, ten = (formatting.percent_bound(_at(terms, rate)) for rate in (0.01, 0.001))
    who = _who(terms.unit).replace("[", "(").replace("]", ")")  # brackets would end the description in Markdown
    return (
        f"Curve of the largest true-positive rate that any test for the presence of {who} can have against its "
        f"false-positive rate: at most {one} at 1%, at most {ten} at 0.1%. "
        f"A dotted diagonal shows guessing. The area under the curve is at most {formatting.bound(_area(terms))}, of "
        f"guessing 0.5."
    )


def figure(terms: Terms) -> str:
    """The figure as SVG, on a white ground with a frame, for light and dark pages.

    Args:
        terms: What is guaranteed.

    Returns:
        SVG text; equal terms give equal text.
    """
    line = " ".join(f"{_x(rate):.1f},{_y(tpr):.1f}" for rate, tpr in _curve(terms))
    bottom = f"{_x(1):.1f},{_y(1e-3):.1f} {_x(1e-3):.1f},{_y(1e-3):.1f}"
    marks = [(rate, _at(terms, rate)) for rate in (0.001, 0.01)]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" '
        f'role="img" font-family="Helvetica, Arial, sans-serif" font-size="13" fill="{_INK}">',
        f"<title>{escape(alt_text(terms))}</title>",
        f'<rect x="0.5" y="0.5" width="{_WIDTH - 1}" height="{_HEIGHT - 1}" rx="6" fill="#ffffff" stroke="#bdbdbd"/>',
        _text(_LEFT, 26, f"Telling whether {_who(terms.unit)} was used", size=15, weight="bold"),
        f'<polygon points="{line} {bottom}" fill="{_FILL}"/>',
        *_grid(),
        f'<line x1="{_x(1e-3):.1f}" y1="{_y(1e-3):.1f}" x2="{_x(1):.1f}" y2="{_y(1):.1f}" stroke="{_INK}" '
        'stroke-width="1.5" stroke-dasharray="2 4"/>',
        f'<polyline points="{line}" fill="none" stroke="{_CURVE}" stroke-width="2.5"/>',
        *(
            f'<circle cx="{_x(rate):.1f}" cy="{_y(tpr):.1f}" r="4.5" fill="{_CURVE}" stroke="#ffffff"/>'
            for rate, tpr in marks
        ),
        *_labels(),
        *_legend(terms, marks),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _grid() -> list[str]:
    shown = []
    for power, name in ((-3, "0.1%"), (-2, "1%"), (-1, "10%"), (0, "100%")):
        x, y = _x(10.0**power), _y(10.0**power)
        shown += [
            f'<line x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{_TOP + _SIDE}" stroke="#d9d9d9"/>',
            f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{_LEFT + _SIDE}" y2="{y:.1f}" stroke="#d9d9d9"/>',
            _text(x, _TOP + _SIDE + 17, name, anchor="middle", size=12),
            _text(_LEFT - 7, y + 4, name, anchor="end", size=12),
        ]
    return shown


def _labels() -> list[str]:
    middle = _TOP + _SIDE / 2
    return [
        _text(_LEFT + _SIDE / 2, _TOP + _SIDE + 38, "wrongly called present", anchor="middle"),
        _text(18, middle, "rightly called present", anchor="middle", turn=-90),
    ]


def _legend(terms: Terms, marks: Sequence[tuple[float, float]]) -> list[str]:
    x, shown = _LEFT + _SIDE + 28, []
    rows = [
        (f"at most {formatting.percent_bound(tpr)} recognised", f"if wrong about {100 * rate:g}% of those not used")
        for rate, tpr in reversed(marks)
    ]
    rows.append(
        (f"area under the curve at most {formatting.bound(_area(terms), 3)}", "0.5 is guessing, 1 is certainty")
    )
    y = _TOP + 18
    for first, second in rows:
        shown += [_text(x, y, first, weight="bold"), _text(x, y + 17, second, colour=_GREY, size=12)]
        y += 50
    y += 6
    shown += [
        f'<line x1="{x}" y1="{y - 4}" x2="{x + 26}" y2="{y - 4}" stroke="{_CURVE}" stroke-width="2.5"/>',
        _text(x + 34, y, "the most that any test can reach", size=12),
        f'<line x1="{x}" y1="{y + 18}" x2="{x + 26}" y2="{y + 18}" stroke="{_INK}" stroke-width="1.5" '
        'stroke-dasharray="2 4"/>',
        _text(x + 34, y + 22, "guessing", size=12),
        _text(x, y + 52, f"ε = {formatting.bound(terms.epsilon)}, δ = {formatting.number_text(terms.delta)}", size=12),
    ]
    return shown


def _text(
    x: float,
    y: float,
    text: str,
    *,
    size: int = 13,
    anchor: str = "start",
    weight: str = "",
    colour: str = "",
    turn: int = 0,
) -> str:
    extra = f' font-weight="{weight}"' if weight else ""
    extra += f' fill="{colour}"' if colour else ""
    extra += f' transform="rotate({turn} {x:.1f} {y:.1f})"' if turn else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}"{extra}>{escape(text)}</text>'


def _who(unit: str) -> str:
    unit = formatting.line(unit)
    return "one training example" if unit == "example" else f"one {unit if len(unit) <= 24 else unit[:23] + '…'}"


def _curve(terms: Terms) -> list[tuple[float, float]]:
    """The limit at each of ``RATES``, from the whole mechanism where it is known."""
    known = dict(terms.trade_off or ())
    return [(rate, min(_line(terms.epsilon, terms.delta, rate), known.get(rate, 1.0))) for rate in RATES]


def _at(terms: Terms, rate: float) -> float:
    whole = None
    if terms.limits is not None:
        whole = terms.limits.tpr_at_fpr_0_01 if rate == 0.01 else terms.limits.tpr_at_fpr_0_001
    return min(dict(_curve(terms))[rate], 1.0 if whole is None else whole)


def _area(terms: Terms) -> float:
    whole = None if terms.limits is None else terms.limits.auc
    return min(attacker_limits(terms.epsilon, terms.delta)["auc"], 1.0 if whole is None else whole)


def _line(epsilon: float, delta: float, rate: float) -> float:
    shrink, grow = math.exp(-epsilon), math.exp(min(epsilon, 700.0))
    return min(1.0, grow * rate + delta, 1.0 - shrink * (1.0 - delta - rate))


def _up(value: float) -> float:
    return min(1.0, float(formatting.bound(value))) if value > 0 else 0.0


def _x(rate: float) -> float:
    return _LEFT + _SIDE * (1 + math.log10(max(rate, 1e-3)) / DECADES)


def _y(rate: float) -> float:
    return _TOP + _SIDE * (1 - (1 + math.log10(max(rate, 1e-3)) / DECADES))
