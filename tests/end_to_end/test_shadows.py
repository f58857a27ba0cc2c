"""Shadow runs of a whole run: the same mechanism with other coins, trained once, booked nowhere else, and only where allowed."""

from __future__ import annotations

import io
import json
import shutil
import stat
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ledger_stores import adopt
from published import edit, replanned
from rich.console import Console
from running import SENTINEL, Place, contents, done, edit_json, make_place

from dpllm import ledger
from dpllm.auditing import shadows
from dpllm.auditing.attacks import whole_rows
from dpllm.auditing.scores import score_canaries
from dpllm.auditing.table import TokenTable, by_group
from dpllm.canaries import canaries
from dpllm.errors import ConfigError, DpllmError, Refused
from dpllm.files import read_json
from dpllm.model.loading import load_for_scoring
from dpllm.privacy.plan import Plan
from dpllm.run.directory import RunDir, open_run
from dpllm.statement.run_files import read_plan

CANARIES = {"groups": {1: 12, 4: 4}, "references": 100, "digits": 12}
QUICK = {"train.steps": 2, "data.public": True, "audit.canaries": CANARIES}
QUIET = Console(quiet=True)
CPU = torch.device("cpu")


def tokens_of(run: RunDir) -> TokenTable:
    config = run.load_config()
    models = load_for_scoring(config, run.export, CPU)
    plan = canaries.load(run.canaries)
    return score_canaries(models, plan, config.data.format, config.data)


def audit(place: Place, num_shadows: int, console: Console = QUIET) -> dict[str, object]:
    run = open_run(RunDir(place.run))
    scores = shadows.score_shadows(shadows.train_shadows(run, num_shadows, console))
    return shadows.summarise_shadows(tokens_of(run.directory), scores, delta=1e-3, alpha=run.config.audit.alpha)


def book_of(place: Place) -> bytes:
    """Every entry of the place's ledger."""
    book = ledger.open_ledger(place.ledger, create=False)
    assert book is not None
    with book:
        return json.dumps([book.head(), [run.reservation.entry for run in book.runs("notes")]]).encode()


@pytest.fixture(scope="module")
def shadowed(tmp_path_factory: pytest.TempPathFactory, base: Path, data_home: Path) -> tuple[Place, dict[str, object]]:
    """A run on public data, and the report from two shadows of it; read only."""
    place = make_place(tmp_path_factory.mktemp("shadowed"), base, QUICK)
    done("train", place.recipe)
    before = contents(place.run / "export"), book_of(place)
    report = audit(place, 2)
    assert (contents(place.run / "export"), book_of(place)) == before
    return place, report


def folders(place: Place) -> list[RunDir]:
    return [RunDir(place.run / "private" / "shadows" / name) for name in ("00", "01")]


def test_a_shadow_is_the_run_with_other_coins_sample_and_noise(shadowed: tuple[Place, dict[str, object]]) -> None:
    place, _ = shadowed
    target = RunDir(place.run)
    runs = [target, *folders(place)]
    plans = [canaries.load(run.canaries) for run in runs]
    promises = [read_json(run.plan) for run in runs]
    for plan, promise in zip(plans, promises, strict=True):
        assert [(c.canary_id, c.carrier, c.secret, c.group) for c in plan.canaries] == [
            (c.canary_id, c.carrier, c.secret, c.group) for c in plans[0].canaries
        ]
        assert [c.secret for c in plan.references] == [c.secret for c in plans[0].references]
        assert promise["canary_commitment"] == plan.commitment
        for key in ("event", "epsilon", "delta", "dataset_size", "max_grad_norm", "clipping", "unit", "sampling"):
            assert promise[key] == promises[0][key], key
    assert len({tuple(c.inserted for c in plan.canaries) for plan in plans}) == 3
    assert len({plan.salt for plan in plans}) == 3
    assert len({(run.export / "adapter_model.safetensors").read_bytes() for run in runs}) == 3


def test_a_shadow_of_a_final_run_leaves_room_for_the_next(shadowed: tuple[Place, dict[str, object]]) -> None:
    """All shadows share one ledger; a mutant refused the second."""
    run = open_run(RunDir(shadowed[0].run))
    final = replace(run, config=run.config.changed({"privacy.final": True}))
    assert not shadows._recipe(final, folders(shadowed[0])[0]).privacy.final


def test_everything_about_shadows_stays_private(shadowed: tuple[Place, dict[str, object]]) -> None:
    place, report = shadowed
    first, second = folders(place)
    for path in (first.root.parent, first.root, first.private, second.root, second.private):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700, path
    plan, report_text = canaries.load(RunDir(place.run).canaries), json.dumps(report, allow_nan=False)
    texts = [text for canary in (*plan.canaries, *plan.references) for text in (canary.secret, canary.carrier)]
    assert not [text for text in (*texts, SENTINEL) if text in report_text]


def test_scores_are_those_of_each_shadow_and_its_own_coins(shadowed: tuple[Place, dict[str, object]]) -> None:
    place, _ = shadowed
    result = shadows.score_shadows([open_run(shadow) for shadow in folders(place)])
    assert result.log_prob_KM.shape == result.coins_KM.shape == (2, 16)
    for position, shadow in enumerate(folders(place)):
        rows = {row.canary_id: row for row in whole_rows(tokens_of(shadow))}
        plan = canaries.load(shadow.canaries)
        assert result.canary_ids == tuple(canary.canary_id for canary in plan.canaries)
        assert result.coins_KM[position].tolist() == [canary.inserted for canary in plan.canaries]
        assert result.log_prob_KM[position].tolist() == [rows[name].tuned_log_prob for name in result.canary_ids]


def test_the_report_says_what_was_found_and_what_it_assumes(shadowed: tuple[Place, dict[str, object]]) -> None:
    place, report = shadowed
    assert report["shadows"] == 2
    assert set(report["attacks"]) == {"1", "4"}
    groups = by_group(whole_rows(tokens_of(RunDir(place.run))))
    for name in ("ratio", "lira"):
        result = report["attacks"]["1"][name]
        assert result["positives"] == sum(bool(row.inserted) for row in groups[1])
        assert result["positives"] + result["negatives"] == 12
        assert result["tpr_at_1_percent_fpr"] is None  # from twelve candidates
    assert report["many_runs"]["canary_id"] == "c00000"
    assert report["many_runs"]["value"] is None or "one mechanism" in report["many_runs"]["assumes"]


def test_finished_shadows_are_kept_and_unfinished_ones_started_over(
    shadowed: tuple[Place, dict[str, object]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = Place(tmp_path / "copy", shadowed[0].base)
    shutil.copytree(shadowed[0].root, place.root)  # the run's path is no part of what a shadow is
    adopt(place.run / "private" / "shadows" / "ledger.sqlite")
    first, second = folders(place)
    before = contents(first.root)
    edit_json(second.run, status="interrupted")  # as a killed process leaves it
    coins = [canary.inserted for canary in canaries.load(second.canaries).canaries]
    out = io.StringIO()
    audit(place, 2, Console(file=out, width=120))
    assert "Shadow 1 of 2: trained earlier" in out.getvalue()
    assert "Shadow 2 of 2: trained\n" in out.getvalue()
    assert contents(first.root) == before
    assert read_json(second.run)["status"] == "completed"
    new_plan = canaries.load(second.canaries)
    assert new_plan.commitment == read_json(second.plan)["canary_commitment"]
    assert [canary.inserted for canary in new_plan.canaries] != coins  # equal once in 65,536 times
    edit_json(second.run, status="interrupted")
    monkeypatch.setattr(shadows, "train", lambda config, console: SimpleNamespace(status="interrupted"))
    with pytest.raises(DpllmError, match="shadow 2 of 2 was interrupted"):
        audit(place, 2)


@pytest.mark.parametrize("why", ["recipe", "canaries", "weights", "damaged"])
def test_a_shadow_of_something_else_is_not_taken_for_one(
    shadowed: tuple[Place, dict[str, object]], tmp_path: Path, why: str
) -> None:
    place, _ = shadowed
    run = RunDir(place.run)
    config, plan = run.load_config(), canaries.load(run.canaries)
    original = folders(place)[0]
    recipe = shadows._recipe(open_run(run), original)
    assert shadows._finished(original, recipe, plan)
    copy = RunDir(tmp_path / "copy")
    shutil.copytree(original.root, copy.root)
    if why == "recipe":
        recipe = recipe.model_copy(update={"train": recipe.train.model_copy(update={"learning_rate": 0.5})})
    elif why == "canaries":
        plan = canaries.plan_canaries(config.audit.canaries)
    elif why == "weights":
        (copy.export / "adapter_model.safetensors").write_bytes(b"others")
    else:
        copy.run.write_text("{")
    assert not shadows._finished(copy, recipe, plan)


def test_private_data_have_no_shadows(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    place.write({**QUICK, "data.public": False})
    done("train", place.recipe)
    monkeypatch.setattr(shadows, "train", lambda *_, **__: pytest.fail("a shadow was about to be trained"))
    with pytest.raises(Refused, match="Audit without --shadows") as refusal:
        audit(place, 2)
    assert refusal.value.exit_code == 3
    assert not (place.run / "private" / "shadows").exists()
    done("ledger", "except", "notes", "--by", "Ada", "--reason", "a test", "--ledger", place.ledger)
    with pytest.raises(Refused, match="no exception of the ledger permits"):
        audit(place, 2)


def test_a_run_that_no_shadow_can_be_like_is_refused_and_public_data_with_a_budget(place: Place) -> None:
    place.write(QUICK)
    done("train", place.recipe)
    run = RunDir(place.run)
    record = run.run.read_text("utf-8")
    for changed in ({"status": "interrupted"}, {"resumes": ["1 charged steps were lost"]}):
        edit_json(run.run, **changed)
        with pytest.raises(ConfigError, match="without --shadows"):
            shadows.may_train(open_run(run))
        run.run.write_text(record, encoding="utf-8")
    edit(place.train, "red boat", "raft")
    shutil.rmtree(run.private / "cache", ignore_errors=True)
    with pytest.raises(ConfigError, match="another mechanism"):
        shadows.may_train(open_run(run))
    edit(place.train, "raft", "red boat")
    shutil.rmtree(run.private / "cache", ignore_errors=True)
    shadows.may_train(open_run(run))
    options = ("--ledger", place.ledger, "--by", "Ada", "--reason", "a test")
    budget = ("--epsilon", 20, "--delta", 1e-3, "--data", place.train)
    for change in (("init", "notes", *budget), ("except", "notes")):
        done("ledger", *change, *options)
        with pytest.raises(Refused, match="has a privacy budget"):
            shadows.may_train(open_run(run))


def test_runs_of_another_mechanism_are_not_compared(shadowed: tuple[Place, dict[str, object]], tmp_path: Path) -> None:
    place, _ = shadowed
    plan, shadow = read_plan(RunDir(place.run)), folders(place)[0]
    shadows._same_mechanism(plan, read_plan(shadow), shadow)
    other = plan.model_copy(update={"max_grad_norm": 2 * plan.max_grad_norm})
    with pytest.raises(ConfigError, match="another max_grad_norm"):
        shadows._same_mechanism(plan, other, RunDir(tmp_path))


def test_shadows_of_banded_noise_may_be_trained_on_another_machine(
    shadowed: tuple[Place, dict[str, object]], tmp_path: Path
) -> None:
    """Whose processor finds the same coefficients but for their last bits, and whose auto need not find as many."""
    place, _ = shadowed
    opened = open_run(RunDir(place.run))
    assert opened.plan is not None
    before: dict[str, Any] = {"plan": opened.plan.to_json(), "steps": {}}

    def planned(*coefficients: float) -> Plan:
        return Plan.checked(replanned(before, coefficients=list(coefficients))["plan"])

    plan = planned(0.8, 0.5, 0.2)
    shadows._same_mechanism(plan, planned(0.8 + 1.2e-7, 0.5 - 1e-7, 0.2), opened.directory)
    for other in ((0.8, 0.501, 0.2), (0.8, 0.5), ()):
        with pytest.raises(ConfigError, match="another coefficients"):
            shadows._same_mechanism(plan, planned(*other), opened.directory)
    noisy = replace(opened, config=opened.config.changed({"privacy.noise": "banded"}))
    assert shadows._recipe(noisy, opened.directory).privacy.bands == 1
    vars(noisy)["plan"] = plan  # as read from plan.json
    assert shadows._recipe(noisy, opened.directory).privacy.bands == 3
    assert shadows._recipe(opened, opened.directory).privacy.bands == "auto"


def test_a_seeded_run_has_shadows_with_noise_of_their_own(shadowed: tuple[Place, dict[str, object]]) -> None:
    place, _ = shadowed
    run = RunDir(place.run)
    config = run.load_config()
    seeded = replace(open_run(run), config=config.changed({"privacy.insecure_seed": 3}))
    recipe = shadows._recipe(seeded, folders(place)[0])
    assert recipe.privacy.insecure_seed is None
    assert recipe.privacy.noise_multiplier == read_json(run.plan)["noise_multiplier"]
    assert recipe.privacy.ledger != config.privacy.ledger


@pytest.mark.full
def test_shadows_find_what_the_ratio_does_not(tmp_path: Path, base: Path) -> None:
    """A pretrained model that has seen each secret 8 times, for a few epochs, without privacy."""
    changes = {
        "model.name_or_path": "builtin:tiny",
        "adapter.r": 16,
        "privacy.enabled": False,
        "audit.canaries": {"groups": {8: 60}, "references": 100},
        "train": {"steps": 60, "batch_size": 64, "learning_rate": 5e-3},
    }
    place = make_place(tmp_path / "memorised", base, {**QUICK, **changes})
    done("train", place.recipe)
    results = {name: one["auc"] for name, one in audit(place, 4)["attacks"]["8"].items()}
    assert results["lira"] > 0.8, results
    assert results["lira"] > results["ratio"], results
