"""The figure of what a test for one person's presence can reach, and the guarantee in prose: as the numbers say, and no more."""

import re
import xml.etree.ElementTree as ET
from typing import Any

import pytest
from cards import config, plan, record, render_card
from hypothesis import given, settings
from hypothesis import strategies as st

from dpllm.privacy.accounting import compose
from dpllm.privacy.events import PureDP, dp_sgd_event
from dpllm.privacy.limits import RATES, MechanismLimits, attacker_limits_of, trade_off
from dpllm.privacy.plan import Plan
from dpllm.statement import tradeoff_figure
from dpllm.statement.formatting import bound_or_infinite as up
from dpllm.statement.formatting import epsilon_in_prose as statement

EVENT = dp_sgd_event(0.05, 1.1, 100)
NO_LIMITS = MechanismLimits.pick(dict.fromkeys(("tpr_at_fpr_0.001", "tpr_at_fpr_0.01", "auc", "gdp_mu")))


def terms(**changes: Any) -> Plan:
    stated = {"limits": NO_LIMITS, "trade_off": (), "epsilon": 3.0, "delta": 1e-5, "unit": "patient_id"}
    return Plan.model_construct(**{**stated, **changes})


def test_the_curve_is_above_guessing_rising_and_holds_the_stated_limits() -> None:
    curve = trade_off(EVENT, "zero_out")
    rates, reached = [rate for rate, _ in curve], [tpr for _, tpr in curve]
    assert tuple(rates) == RATES
    assert {0.001, 0.01, 0.1, 1.0} <= set(rates)
    assert reached == sorted(reached)
    assert all(rate <= tpr <= 1 for rate, tpr in curve)
    limits = attacker_limits_of(EVENT, "zero_out")
    for rate in (0.001, 0.01):
        exact = limits[f"tpr_at_fpr_{rate:g}"]
        assert exact <= dict(curve)[rate] <= exact * 1.0011


@given(st.floats(min_value=0, max_value=800), st.floats(min_value=1e-12, max_value=1e-2), st.booleans())
@settings(deadline=None, derandomize=True)
def test_any_guarantee_has_a_figure_that_stays_in_its_frame(epsilon: float, delta: float, known: bool) -> None:
    curve = [[rate, min(1.0, 3 * rate)] for rate in RATES] if known else ()
    drawn = tradeoff_figure.figure(terms(epsilon=epsilon, delta=delta, trade_off=curve))
    root = ET.fromstring(drawn)
    _, _, width, height = map(float, root.get("viewBox", "").split())
    for x, y in re.findall(r"(-?[\d.]+),(-?[\d.]+)", drawn):
        assert 0 <= float(x) <= width
        assert 0 <= float(y) <= height
    for number in re.findall(r'(?:cx|x|x1|x2)="(-?[\d.]+)"', drawn):
        assert 0 <= float(number) <= width


def test_text_fits_its_frame() -> None:
    """At 0.58 of its size a letter: wider than Helvetica, Arial and DejaVu Sans set these words."""
    for shown in (terms(), terms(epsilon=12345.678901, delta=1.2345678901e-11), terms(unit="example", epsilon=0.01)):
        root = ET.fromstring(tradeoff_figure.figure(shown))
        width = float(root.get("width", "0"))
        for text in root.iter("{http://www.w3.org/2000/svg}text"):
            if text.get("transform") or text.get("text-anchor") != "start":
                continue
            letter = 0.58 + (0.04 if text.get("font-weight") else 0)
            end = float(text.get("x", "0")) + letter * float(text.get("font-size", "13")) * len(text.text or "")
            assert end <= width - 4, text.text


def test_it_needs_no_font_no_script_and_no_network() -> None:
    drawn = tradeoff_figure.figure(terms())
    assert drawn.count("http") == 1  # the namespace
    for word in ("<script", "href", "<style", "<image", "@import"):
        assert word not in drawn
    assert 'fill="#ffffff" stroke=' in drawn  # a white ground with a frame, for dark pages
    assert len(drawn) < 8000


def test_a_long_or_odd_unit_is_escaped_and_cut() -> None:
    unit = '<&"]' + "x" * 200
    drawn = tradeoff_figure.figure(terms(unit=unit))
    root = ET.fromstring(drawn)
    title = next(text.text or "" for text in root.iter("{http://www.w3.org/2000/svg}text"))
    assert len(title) < 60
    assert "]" not in tradeoff_figure.alt_text(terms(unit=unit))


@pytest.mark.parametrize("unit", ["example", "patient_id"])
def test_the_description_states_the_figures_of_the_terms(unit: str) -> None:
    limits = {"tpr_at_fpr_0.001": 0.0061, "tpr_at_fpr_0.01": 0.0367, "auc": 0.6265, "gdp_mu": None}
    text = tradeoff_figure.alt_text(terms(unit=unit, limits=MechanismLimits.pick(limits)))
    assert ("one training example" if unit == "example" else "one patient_id") in text
    assert "at most 3.7% at 1%, at most 0.7% at 0.1%" in text
    assert "at most 0.6265, of guessing 0.5" in text


@pytest.mark.parametrize("beside", [0.1, 0.5, 2.0])
def test_other_releases_raise_the_share_that_is_recognised(beside: float) -> None:
    """Beside what the composed mechanism allows: never less, and not much more."""
    known = terms(epsilon=8.0, trade_off=trade_off(EVENT, "zero_out"))
    exact = attacker_limits_of(compose([EVENT, PureDP(beside)]), "zero_out")["tpr_at_fpr_0.01"]
    assert tradeoff_figure.recognised(known) < exact <= tradeoff_figure.recognised(known, beside) <= 2 * exact


def test_the_card_shows_it_with_its_description() -> None:
    text, block = render_card(config(), plan(), record(), None)
    whole = Plan.checked(block["plan"])
    drawn, said = tradeoff_figure.figure(whole), tradeoff_figure.alt_text(whole)
    assert f"![{said}](privacy.svg)" in text
    assert f"<title>{said}</title>".replace("'", "&#x27;") in drawn.replace("'", "&#x27;")


def answer(**changes: Any) -> dict[str, Any]:
    sizes = {"dataset_size": 5000, "batch_size": 100, "sampling_rate": 0.02, "num_steps": 150, "noise_multiplier": 0.8}
    limits = {"tpr_at_fpr_0.001": 0.0061848, "tpr_at_fpr_0.01": 0.0367772, "auc": 0.626541, "gdp_mu": 0.93}
    stated = {
        "epsilon": 2.96331, "delta": 1e-5, "accountant": "pld", "relation": "zero_out", "group_size": 1, "bands": 1,
    }  # fmt: skip
    return {**sizes, **stated, "limits": limits, "shuffled": {"epsilon": 11.02781, "epochs": 3}, **changes}


def test_every_bound_is_rounded_up() -> None:
    text = statement(answer())
    assert "(2.964, 1e-05)-differentially private" in text
    assert "e^2.964" in text
    assert "11.03" in text
    for share, true in ((0.619, 0.61848), (3.68, 3.67772)):
        assert f"{share}%" in text
        assert share >= true
    assert "at most 0.6266 (0.5 is guessing)" in text
    assert up(2.0000001) == "2.001"
    assert up(None) == "infinite"


def test_the_assumptions_are_named() -> None:
    text = statement(answer())
    for assumption in ("Poisson sampling", "clipped to norm C", "0.8 C", "own coin", "public", "N = 5000", "150 steps"):
        assert assumption in text
    for gap in ("base model", "evaluation data", "hyper-parameters", "further runs", "floating-point"):
        assert gap in text
    assert "shuffling instead" in text
    assert "3 epochs" in text
    assert "1 epoch " in statement(answer(shuffled={"epsilon": 5.0, "epochs": 1}))


def test_relation_groups_and_bands_stand_in_words() -> None:
    other = statement(answer(relation="add_or_remove_one"))
    assert "replaced by nothing while N stays the same" in statement(answer())
    assert "one has one unit more than the other" in other
    assert ("declared in advance" in other) > ("declared in advance" in statement(answer()))
    group = statement(answer(group_size=4))
    assert "up to 4 units together" in group
    assert "4 of them together" in group
    assert "4" not in re.sub(r"2\.964|0\.6266", "", statement(answer()))
    said = statement(answer(bands=8))
    assert "banded noise of 8 bands" in said
    assert "Each unit has one of 8 groups" in said


def test_without_a_finite_epsilon_nothing_is_claimed() -> None:
    text = statement(answer(epsilon=None))
    assert "no guarantee" in text
    assert "differentially private" not in text
    assert "infinite" in statement(answer(shuffled={"epsilon": None, "epochs": 3}))
