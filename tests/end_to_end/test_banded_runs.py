"""A run with banded noise from recipe to a card that verifies, also where it stopped and steps were lost."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from running import Place, done, dpllm_, make_place, refused, train_until

from dpllm.card.artifact import model_rules
from dpllm.files import digest, read_json
from dpllm.ledger import Ledger
from dpllm.privacy import accounting
from dpllm.privacy.events import read
from dpllm.privacy.noise import BandedNoise
from dpllm.privacy.sampling import PoissonSampler
from dpllm.records import NotAStatement
from dpllm.run.directory import RunDir
from dpllm.statement import privacy_record

BANDS, STEPS = 3, 7
RECIPE = {
    "privacy.noise": "banded",
    "privacy.bands": BANDS,
    "train.steps": STEPS,
    "train.checkpoint_every": 2,
    "audit.canaries": {"groups": {1: 28}, "references": 100, "digits": 12},
}


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
    secret = json.loads(groups.read_text())["key"]
    public = [path for path in banded_run.run.rglob("*") if path.is_file() and "private" not in path.parts]
    assert all(secret.encode() not in path.read_bytes() for path in public)


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


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Draws of each step and noise of each attempt."""
    seen: dict[str, Any] = {"drawn": [], "attempts": [], "steps": 0}
    draw, init, add = PoissonSampler.draw, BandedNoise.__init__, BandedNoise.add_to

    def begin(self: BandedNoise, *arguments: Any) -> None:
        init(self, *arguments)
        if self.device.type == "cpu":
            seen["attempts"].append([])

    def drawn(self: PoissonSampler) -> list[int]:
        result = draw(self)
        seen["drawn"].append((self._step - 1, result))
        return result

    def added(self: BandedNoise, sum_P: torch.Tensor, scale: float) -> None:
        seen["attempts"][-1].append(len(self._past))
        add(self, sum_P, scale)

    monkeypatch.setattr(BandedNoise, "__init__", begin)
    monkeypatch.setattr(BandedNoise, "add_to", added)
    monkeypatch.setattr(PoissonSampler, "draw", drawn)
    return seen


def test_a_run_that_lost_steps_goes_on_in_turn_with_empty_buffers(
    place: Place, watched: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fails in its fourth step, two steps after its checkpoint; both are charged, and stay lost."""
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
    assert watched["attempts"][-1][0] == 0
    second = next(i for i, one in enumerate(watched["drawn"]) if i and one[0] <= watched["drawn"][i - 1][0])
    assert watched["drawn"][second][0] == 4
    executed = [*watched["drawn"][:4], *watched["drawn"][second:]]
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


def edited(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def replanned(path: Path, **changes: Any) -> None:
    """As somebody would who changes the manifest too; the ledger knows nothing of a run that was killed."""
    run = RunDir(path.parent)
    edited(path, **changes)
    manifest = json.loads(run.run.read_text())["manifest"]
    edited(run.run, manifest={**manifest, "plan.json": digest(read_json(run.plan))})


OTHER_GROUPS = "not the groups that the run began with"
HARMS: list[tuple[str, Callable[[Path], Any], str]] = [
    ("private/groups.json", lambda path: path.unlink(), OTHER_GROUPS),
    ("private/groups.json", lambda path: path.write_text("{}"), OTHER_GROUPS),
    ("private/groups.json", lambda path: path.write_text('{"bands": 4, "key": "ab"}'), OTHER_GROUPS),
    ("private/groups.json", lambda path: edited(path, key="ab"), OTHER_GROUPS),
    ("private/groups.json", lambda path: edited(path, slots=5), OTHER_GROUPS),
    ("private/groups.json", lambda path: edited(path, starts="abc"), OTHER_GROUPS),
    ("private/groups.json", lambda path: edited(path, key="f" * 70), OTHER_GROUPS),
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
    weights = []
    for _ in range(2):
        place.write({**RECIPE, "privacy.insecure_seed": 3, "audit.canaries": None})
        done("train", place.recipe, "--overwrite")
        weights.append((place.run / "export" / "adapter_model.safetensors").read_bytes())
    assert weights[0] == weights[1]
    assert place.json("run.json")["guarantee"]["holds"] is False


def test_two_bands_take_back_one_step(place: Place) -> None:
    place.write({**RECIPE, "privacy.bands": 2, "privacy.secure_noise": True})
    done("train", place.recipe)
    assert place.json("run.json")["guarantee"]["holds"] is True
    done("card", place.run)
    assert "x_t = (z_t \u2212 c_1 x_(t\u22121)) / c_0" in place.card
