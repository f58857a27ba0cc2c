"""Runs with banded noise under a budget: what is reserved, charged, given back and refused, in rounds of all groups."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import dp_accounting as dp
import pytest
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from running import Place, done, make_place, python, refused, train_until

from dpllm.ledger import Ledger, admission
from dpllm.privacy import renyi
from dpllm.privacy.events import Gaussian

BANDS, STEPS, ROUNDS, RATE = 3, 8, 3, 3 * 8 / 40
BANDED = {"privacy.noise": "banded", "privacy.bands": BANDS, "train.steps": STEPS, "privacy.fit_budget": True}
AUDITED = {"audit.canaries": {"groups": {1: 28}, "references": 100, "digits": 12}, "audit.gradient_canaries": 40}
TERMS = ("--epsilon", 8, "--delta", 1e-3, "--reason", "a test", "--by", "Ada")
TORCHLESS = """
import sys
from dpllm.cli import main
code = main(["verify", *sys.argv[1:]])
sys.exit(code or 9 * ("torch" in sys.modules))
"""


def init(place: Place, *arguments: object) -> None:
    done("ledger", "init", "notes", "--ledger", place.ledger, *TERMS, *arguments)


def rounds(sigma: float, count: int, rate: float = RATE) -> dp.DpEvent:
    return dp.SelfComposedDpEvent(dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(sigma)), count)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, base: Path, data_home: Path) -> Place:
    """A finished run that takes a whole budget, with a card; read only."""
    place = make_place(tmp_path_factory.mktemp("whole"), base, BANDED | AUDITED)
    init(place, "--data", place.train)
    place.does("train", "audit", "card")
    return place


def test_its_noise_fits_what_the_filter_allows(whole: Place) -> None:
    plan = whole.json("plan.json")
    event, sigma = plan["event"], plan["noise_multiplier"]
    rate, size = event["probability"], plan["dataset_size"]  # with the slots of canaries
    assert (event["type"], event["bands"], event["count"]) == ("cyclic_poisson", BANDS, STEPS)
    assert rate == pytest.approx(BANDS * 8 / size)
    with Ledger(whole.ledger) as book:
        (run,), budget = book.runs("notes"), book.budget("notes")
        spent, used = book.spent("notes"), book.used("notes")
    assert budget is not None
    assert budget.order is not None
    assert (run.event.to_json(), run.steps, run.state) == (event, STEPS, "completed")
    # dp-accounting knows nothing of bands: so many Poisson-sampled Gaussian rounds at the rate of one group.
    exact = PLDAccountant(dp.NeighboringRelation.REPLACE_SPECIAL, value_discretization_interval=1e-4)
    assert spent == pytest.approx(exact.compose(rounds(sigma, ROUNDS, rate)).get_epsilon(1e-3), rel=1e-3)
    filtered = RdpAccountant([budget.order], dp.NeighboringRelation.REPLACE_SPECIAL)
    stated = filtered.compose(rounds(sigma, ROUNDS, rate)).get_epsilon(1e-3)
    assert (used, stated) == (pytest.approx(1, abs=2e-3), pytest.approx(budget.epsilon, rel=2e-3))
    allowed = renyi.allowance(budget.epsilon, budget.delta, budget.order)
    smaller = replace(run.event, event=Gaussian(sigma - 1e-3))
    assert renyi.rdp(run.event, budget.order) <= allowed < renyi.rdp(smaller, budget.order)


def test_the_next_run_is_refused(whole: Place) -> None:
    second = ("--privacy.fit_budget", "false", "--output_dir", whole.root / "second")
    assert "% of epsilon 8 used, and this run would use" in refused("train", whole.recipe, *second, code=3)
    with Ledger(whole.ledger) as book:
        assert len(book.runs("notes")) == 1
        assert book.refusals() == {("notes", "over_budget"): 1}


def test_its_card_verifies_where_no_torch_is(whole: Place) -> None:
    """Also the groups of its gradient canaries, which are found again from a secret."""
    answer = python(TORCHLESS, whole.run, "--ledger", whole.ledger)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    assert "0 failed" in answer.stdout
    block = whole.json("export/privacy.json")
    assert (block["guarantee"], block["plan"]["mechanism"]) == (True, "dp-bandmf")
    assert block["audit"]["gradient"]["steps"] == STEPS


def test_an_early_stop_counts_the_rounds_that_were_begun(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Five of eight steps are two rounds of three groups: once it is reconciled, the third round is free again."""
    place.write(BANDED)
    init(place)
    train_until(monkeypatch, 5, place.recipe)
    sigma = place.json("plan.json")["noise_multiplier"]

    def left() -> tuple[float, float]:
        """Of the filter, in rounds; and how many are spent."""
        with Ledger(place.ledger) as book:
            account = book.account("notes")
        assert account.budget is not None
        assert account.budget.order is not None
        order = account.budget.order
        one_round = RdpAccountant([order], dp.NeighboringRelation.REPLACE_SPECIAL).compose(rounds(sigma, 1))
        cost = float(one_round._rdp[0])
        return admission.filter_allowance(account.budget) / cost, admission.filter_spent(account, order) / cost

    assert left() == pytest.approx((ROUNDS, ROUNDS), rel=2e-3)
    ask = ("--output_dir", place.root / "next", "--privacy.noise_multiplier", sigma)
    assert "and this run would use" in refused(
        "train", place.recipe, *ask, "--train.steps", 3, code=3
    )  # an interrupted run stays charged in full
    (entry,) = [run.reservation.entry for run in place.runs()]
    done("ledger", "reconcile", entry, "--ledger", place.ledger, *TERMS[4:])
    assert left()[1] == pytest.approx(2, rel=1e-6)
    assert "and this run would use" in refused(
        "train", place.recipe, *ask, "--train.steps", 4, code=3
    )  # of four steps, the last begins a round of its own
    done("train", place.recipe, *ask, "--train.steps", 3)
    assert left()[1] == pytest.approx(3, rel=1e-6)
