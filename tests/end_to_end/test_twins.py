"""``--twin``: a run without canaries of text and its audit twin, planned, reserved and trained as one group."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from running import CANARIES, Answer, Place, done, dpllm_, make_place, refused

from dpllm.canaries import canaries
from dpllm.ledger import Ledger
from dpllm.ledger.admission import group_total
from dpllm.recipe.config import load_config
from dpllm.run.directory import RunDir

SETTINGS = {"audit.canaries": CANARIES, "audit.gradient_canaries": 30, "privacy.epsilon": 2.0}


def place_of(root: Path, base: Path, epsilon: float) -> Place:
    place = make_place(root, base, {**SETTINGS, "output_dir": str(root / "both")})
    who = ("--by", "owner", "--reason", "test", "--ledger", place.ledger)
    done("ledger", "init", "notes", "--epsilon", epsilon, "--delta", 1e-3, *who)
    return place


def twin(place: Place, *more: object) -> Answer:
    return dpllm_("sweep", place.recipe, "--twin", *more)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, base: Path, data_home: Path) -> tuple[Place, dict[str, object]]:
    """Under the default budget; with what plan said before."""
    place = place_of(tmp_path_factory.mktemp("twins") / "place", base, 8)
    planned = json.loads(done("plan", place.recipe, "--twin", "--json").out)
    answer = twin(place, "--json")
    assert answer.code == 0, answer.err
    return place, {**json.loads(answer.out), "planned": planned}


def test_both_are_one_group_and_plan_and_card_state_its_total(trained: tuple[Place, dict[str, object]]) -> None:
    place, summary = trained
    with Ledger(place.ledger) as book:
        account = book.account("notes")
        ((name, runs),) = account.groups().items()
        states = [(run.reservation.run, run.state) for run in runs]
        assert states == [(f"{name}/{run}", "completed") for run in ("production", "twin")]
        total = group_total(account, name)
        assert 0 < (book.used("notes") or 0) < 1
    assert summary["together"] == total
    assert summary["planned"]["twin"]["epsilon"] == pytest.approx(total["epsilon"])  # type: ignore[index]
    assert total["epsilon"] > 2.0
    for item in ("production", "twin"):
        export = place.root / "both" / item / "export"
        assert json.loads((export / "privacy.json").read_text())["composed"]["group"] == total
        assert "0 failed" in done("verify", export.parent, "--ledger", place.ledger).out
    card = (place.root / "both" / "production" / "export" / "README.md").read_text("utf-8")
    assert f"together ε = {total['epsilon']:.2f}"[:-1] in card


def test_no_canary_of_text_is_in_what_is_published(trained: tuple[Place, dict[str, object]]) -> None:
    place, _ = trained
    production, audit_twin = (RunDir(place.root / "both" / name) for name in ("production", "twin"))
    assert canaries.load(production.canaries).canaries == ()
    assert len(canaries.load(audit_twin.canaries).canaries) == 24
    for run in (production, audit_twin):
        assert run.load_config().audit.gradient_canaries == 30
        assert (run.export / "audit" / "audit.json").exists()
    assert twin(place, "--resume").code == 0  # nothing is trained or charged again
    assert len(place.runs()) == 2


def test_a_twin_may_keep_its_rate_and_its_card_says_so(tmp_path: Path, base: Path) -> None:
    """The published run's stays as the recipe has it."""
    place = place_of(tmp_path / "place", base, 8)
    planned = json.loads(done("plan", place.recipe, "--twin", "--constant-rate", "--json").out)
    chosen = ("--card.tuning", "Settings were chosen on public notes.")
    record = json.loads(done("sweep", place.recipe, "--twin", "--constant-rate", "--json", *chosen).out)
    assert record["together"]["epsilon"] == pytest.approx(planned["twin"]["epsilon"])
    production, audit_twin = (RunDir(place.root / "both" / name) for name in ("production", "twin"))
    recipe_train = load_config(place.recipe).train
    assert production.load_config().train == recipe_train
    assert recipe_train.lr_scheduler != "constant"
    assert audit_twin.load_config().train == recipe_train.changed({"lr_scheduler": "constant", "warmup": 0.0})
    for run, says in ((production, False), (audit_twin, True)):
        card = (run.export / "README.md").read_text("utf-8")
        assert "Settings were chosen on public notes." in card
        assert ("at a constant learning rate where that run's falls" in card) is says
        assert "0 failed" in done("verify", run.root, "--ledger", place.ledger).out


def test_a_constant_rate_without_a_twin_or_beside_one_is_refused(tmp_path: Path, base: Path) -> None:
    place = place_of(tmp_path / "place", base, 8)
    for command in ("plan", "sweep"):
        assert "Type --twin too" in refused(command, place.recipe, "--constant-rate")
    constant = ("--twin", "--constant-rate", "--train.lr_scheduler", "constant")
    assert "constant already" in refused("sweep", place.recipe, *constant)


def test_a_budget_for_one_of_them_admits_neither(tmp_path: Path, base: Path) -> None:
    place = place_of(tmp_path / "place", base, 3)
    refused("plan", place.recipe, "--twin", code=3)
    done("plan", place.recipe, "--audit.canaries", "null")
    assert twin(place).code == 3
    assert place.runs() == []


def test_a_recipe_without_canaries_gets_the_usual_ones_in_its_twin(tmp_path: Path, base: Path) -> None:
    from dpllm.comparison.sweep import twins

    place = make_place(tmp_path / "place", base, {"audit.canaries": None})
    first, second = twins(place.recipe, {"data.unit": "who", "data.max_examples_per_unit": 8})
    assert first.config.audit.canaries is None
    assert second.config.audit.canaries is not None
    assert second.config.audit.canaries.groups == {1: 1000, 4: 20}
    assert "--twin out" in dpllm_("sweep", place.recipe, "--twin", "--privacy.enabled", "false").err
