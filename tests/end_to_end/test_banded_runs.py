"""A run with banded noise from recipe to a card that verifies, also where it stopped, and what a budget reserves of it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import dp_accounting as dp
import pytest
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from running import Place, calls, contents, done, dpllm_, edit_json, make_place, python, refused, results, train_until

from dpllm.card.artifact import model_rules
from dpllm.files import digest, read_json
from dpllm.ledger import Ledger, admission
from dpllm.privacy import accounting, renyi
from dpllm.privacy.events import Gaussian, read
from dpllm.privacy.noise import BandedNoise
from dpllm.privacy.sampling import PoissonSampler
from dpllm.records import NotAStatement
from dpllm.run.directory import RunDir
from dpllm.statement import privacy_record

BANDS, STEPS = 3, 7
TEXTS = {"audit.canaries": {"groups": {1: 28}, "references": 100, "digits": 12}}
NOISE = {"privacy.noise": "banded", "privacy.bands": BANDS}
RECIPE = {**NOISE, **TEXTS, "train.steps": STEPS, "train.checkpoint_every": 2}


@pytest.fixture(scope="module")
def banded_run(tmp_path_factory: pytest.TempPathFactory, base: Path, data_home: Path) -> Place:
    """A finished run with a card; read only."""
    place = make_place(tmp_path_factory.mktemp("banded"), base, RECIPE)
    place.does("train", "card")
    return place


def test_the_card_of_a_run_verifies_and_says_how(banded_run: Place) -> None:
    output = done("verify", banded_run.run).out
    assert "0 failed" in output
    assert "of groups in turn, with banded noise" in output
    block = banded_run.json("export/privacy.json")
    plan = block["plan"]
    assert (block["guarantee"], plan["mechanism"]) == (True, "dp-bandmf")
    assert len(plan["coefficients"]) == plan["event"]["bands"] == BANDS
    assert plan["event"]["count"] == STEPS
    assert plan["without_amplification"] is None
    card = banded_run.card
    assert f"step i was for group i mod {BANDS}" in card
    assert "3 Poisson-sampled Gaussian rounds" in card


def test_groups_are_private_and_buffers_are_nowhere(banded_run: Place) -> None:
    groups = banded_run.run / "private" / "groups.json"
    assert groups.stat().st_mode & 0o077 == 0
    secret = json.loads(groups.read_text())["key"].encode()
    assert {name.split("/")[0] for name, text in contents(banded_run.run).items() if secret in text} == {"private"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda plan: plan["coefficients"].__setitem__(0, 1.1), "no strategy"),
        (lambda plan: plan["coefficients"].pop(), "event does not follow"),
        (lambda plan: plan["event"].__setitem__("bands", 7), "event does not follow"),
        (lambda plan: plan.__setitem__("mechanism", "dp-sgd"), "mechanism does not follow"),
        (lambda plan: plan.__setitem__("coefficients", []), "event does not follow"),
        (lambda plan: plan.__setitem__("sampling", "example"), "for whole units"),
    ],
)
def test_a_statement_that_contradicts_itself_is_none(
    banded_run: Place, change: Callable[[dict[str, Any]], Any], words: str
) -> None:
    block = banded_run.json("export/privacy.json")
    change(block["plan"])
    with pytest.raises(NotAStatement, match=words):
        privacy_record.read(block)


@pytest.mark.parametrize(
    "change", [lambda c: c[::-1], lambda _: [1.0, 0.0, 0.0], lambda c: [0.99 * each for each in c]]
)
def test_coefficients_that_are_not_the_best_do_not_verify(
    banded_run: Place, change: Callable[[list[float]], list[float]]
) -> None:
    block = banded_run.json("export/privacy.json")
    block["plan"]["coefficients"] = change(block["plan"]["coefficients"])
    record = privacy_record.read(block)
    assert record.plan is not None
    assert not model_rules(record)["coefficients are not the best of any schedule"]


def test_a_run_that_lost_steps_goes_on_in_turn_with_empty_buffers(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fails in its fourth step, two steps after its checkpoint; both are charged, and stay lost."""
    past = calls(monkeypatch, BandedNoise, "add_to", lambda noise, *_: len(noise._past))
    turns = calls(monkeypatch, PoissonSampler, "draw", lambda sampler: sampler._step)
    draws = results(monkeypatch, PoissonSampler, "draw")
    place.write({**RECIPE, "audit.gradient_canaries": 40})
    train_until(monkeypatch, 4, place.recipe)
    before, groups = place.json("plan.json"), place.json("private/groups.json")
    assert groups["starts"] == [0]
    done("train", place.recipe, "--resume")
    assert place.json("private/groups.json") == {**groups, "starts": [0, 4]}
    record = place.json("run.json")
    assert (record["status"], record["steps_taken"], record["steps_lost"]) == ("completed", STEPS, 2)
    assert place.json("plan.json") == before
    # Four steps were charged, of which two were lost: the next is the fifth, so its turn is that of group 1.
    resumed = next(number for number in range(1, len(turns)) if turns[number] <= turns[number - 1])
    assert turns[resumed] == 4
    assert past[-(STEPS - 4)] == 0
    executed = [*zip(turns, draws, strict=True)]
    executed = [*executed[:4], *executed[resumed:]]
    assert [at for at, _ in executed] == list(range(STEPS))
    for slot in range(before["dataset_size"]):
        at = [number for number, drawn in executed if slot in drawn]
        assert all(later - earlier >= BANDS for earlier, later in itertools.pairwise(at))
    with Ledger(place.ledger) as ledger:
        (reserved,) = [read(link.facts["event"]) for link in ledger.history("notes") if link.kind == "reserve"]
    assert before["epsilon"] == accounting.epsilon(reserved, before["delta"], "zero_out")
    place.does("audit", "card")
    assert "0 failed" in done("verify", place.run).out
    report = place.json("export/privacy.json")["audit"]["gradient"]
    assert report["steps"] == STEPS - 1  # the one that failed released nothing
    low, high = report["noise_interval"]  # of 95%: four standard errors, and twice as many are never seen
    assert abs(report["noise"] - report["noise_planned"]) < 2 * (high - low)


def replanned(path: Path, **changes: Any) -> None:
    """As somebody would who changes the manifest too; the ledger knows nothing of a run that was killed."""
    run = RunDir(path.parent)
    edit_json(path, **changes)
    edit_json(run.run, manifest={**read_json(run.run)["manifest"], "plan.json": digest(read_json(run.plan))})


OTHER_GROUPS = "does not hold the groups that the run began with"
HARMS: list[tuple[str, Callable[[Path], Any], str]] = [
    ("private/groups.json", lambda path: path.unlink(), OTHER_GROUPS),
    ("private/groups.json", lambda path: path.write_text("{}"), OTHER_GROUPS),
    ("private/groups.json", lambda path: path.write_text('{"bands": 4, "key": "ab"}'), OTHER_GROUPS),
    ("private/groups.json", lambda path: edit_json(path, key="ab"), OTHER_GROUPS),
    ("private/groups.json", lambda path: edit_json(path, slots=5), OTHER_GROUPS),
    ("private/groups.json", lambda path: edit_json(path, starts="abc"), OTHER_GROUPS),
    ("private/groups.json", lambda path: edit_json(path, key="f" * 70), OTHER_GROUPS),
    ("plan.json", lambda path: replanned(path, coefficients=[3.0, 0.1, 0.1]), "no strategy"),
    ("plan.json", lambda path: replanned(path, coefficients=[0.0, 0.1, 0.1]), "no strategy"),
]


def test_a_run_whose_groups_are_gone_does_not_go_on(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.write(RECIPE)
    train_until(monkeypatch, 3, place.recipe)
    assert "privacy.bands differs" in refused("train", place.recipe, "--resume", "--privacy.bands", 2, code=3)
    for name, harm, words in HARMS:
        kept = {path: path.read_bytes() for path in (place.run / name, place.run / "run.json")}
        harm(place.run / name)
        assert words in refused("train", place.recipe, "--resume", code=2 if name == "plan.json" else 3)
        for path, content in kept.items():
            path.write_bytes(content)
    (place.run / "run.json").rename(place.root / "run.json")
    assert "run.json: missing" in dpllm_("train", place.recipe, "--resume").err
    (place.root / "run.json").rename(place.run / "run.json")
    done("train", place.recipe, "--resume")


def test_a_seeded_run_is_repeated_and_gives_no_guarantee(place: Place) -> None:
    place.write({**RECIPE, "privacy.insecure_seed": 3, "audit.canaries": None})
    weights = set()
    for _ in range(2):
        done("train", place.recipe, "--overwrite")
        weights.add((place.run / "export" / "adapter_model.safetensors").read_bytes())
    assert len(weights) == 1
    assert place.json("run.json")["guarantee"]["holds"] is False


def test_two_bands_take_back_one_step(place: Place) -> None:
    place.write({**RECIPE, "privacy.bands": 2, "privacy.secure_noise": True})
    place.does("train", "card")
    assert place.json("run.json")["guarantee"]["holds"] is True
    assert "x_t = (z_t \u2212 c_1 x_(t\u22121)) / c_0" in place.card


# --- under a budget: reserved, charged, given back and refused in rounds of all groups -------------------------------


STEPS_OF_BUDGET, ROUNDS, RATE = 8, 3, 3 * 8 / 40
BANDED = {**NOISE, "train.steps": STEPS_OF_BUDGET, "privacy.fit_budget": True}
AUDITED = {**TEXTS, "audit.gradient_canaries": 40}
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
    assert (event["type"], event["bands"], event["count"]) == ("cyclic_poisson", BANDS, STEPS_OF_BUDGET)
    assert rate == pytest.approx(BANDS * 8 / size)
    with Ledger(whole.ledger) as book:
        (run,), budget = book.runs("notes"), book.budget("notes")
        spent, used = book.spent("notes"), book.used("notes")
    assert budget is not None
    assert budget.order is not None
    assert (run.event.to_json(), run.steps, run.state) == (event, STEPS_OF_BUDGET, "completed")
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
    assert block["audit"]["gradient"]["steps"] == STEPS_OF_BUDGET


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
    message = refused("train", place.recipe, *ask, "--train.steps", 3, code=3)
    assert "and this run would use" in message  # an interrupted run stays charged in full
    (entry,) = [run.reservation.entry for run in place.runs()]
    done("ledger", "reconcile", entry, "--ledger", place.ledger, *TERMS[4:])
    assert left()[1] == pytest.approx(2, rel=1e-6)
    message = refused("train", place.recipe, *ask, "--train.steps", 4, code=3)
    assert "and this run would use" in message  # of four steps, the last begins a round of its own
    done("train", place.recipe, *ask, "--train.steps", 3)
    assert left()[1] == pytest.approx(3, rel=1e-6)
