"""A loop of one's own has the guarantee of a recipe, or is refused before anything is spent."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import transformers
from torch import nn

import dpllm
from dpllm.errors import BudgetExceeded, ConfigError, Refused
from dpllm.ledger import Budget
from dpllm.ledger.budgets import set_budget
from dpllm.privacy.noise import BandedNoise
from dpllm.privacy.sampling import PoissonSampler

N, LENGTH, STEPS = 12, 16, 3


def units() -> list[dpllm.Unit]:
    made = []
    for number in range(N):
        ids = tuple(3 + (number + place) % 20 for place in range(6 + number % 5))
        made.append(dpllm.Unit((dpllm.TokenSequence(ids, (False, *[True] * (len(ids) - 1)), len(ids) - 1),)))
    return made


@pytest.fixture
def model(tmp_path: Path) -> nn.Module:
    base = transformers.AutoModelForCausalLM.from_pretrained(tiny.save_model(tmp_path / "base", "gpt2"))
    for name, parameter in base.named_parameters():
        parameter.requires_grad = ".h.1." in name
    return base


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[dpllm.Ledger]:
    with dpllm.Ledger(tmp_path / "ledger.sqlite") as book:
        yield book


def row(ids: tuple[int, ...], mask: tuple[bool, ...] = (False, True), denominator: int = 1) -> dpllm.Unit:
    return dpllm.Unit((dpllm.TokenSequence(ids, mask, denominator),))


def engine(model: nn.Module, ledger: dpllm.Ledger, **changes: Any) -> dpllm.Engine:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    plan = changes.pop("plan", None) or dpllm.promise(N, epsilon=20, batch_size=4, steps=STEPS, max_grad_norm=0.1)
    given = {"ledger": ledger, "dataset": "letters", "max_length": LENGTH, **changes}
    return dpllm.Engine(model, optimizer, plan, given.pop("units", units()), **given)


def test_every_step_is_charged_and_the_whole_run_reserved_before(model: nn.Module, ledger: dpllm.Ledger) -> None:
    before = [p.detach().clone() for p in model.parameters()]
    with engine(model, ledger) as made:
        assert ledger.run(made.entry).steps == 0
        assert ledger.spent("letters", made.plan.delta) == pytest.approx(made.plan.epsilon, abs=1e-6)
        for step in range(STEPS):
            made.step()
            assert ledger.run(made.entry).steps == step + 1
        with pytest.raises(Refused):
            made.step()
    assert ledger.run(made.entry).state == "completed"
    assert made.dropout_off["dropout" if "dropout" in made.dropout_off else "attn_pdrop"] > 0
    moved = [not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True)]
    assert moved == [p.requires_grad for p in model.parameters()]


def test_a_loop_that_ends_early_keeps_its_reservation(model: nn.Module, ledger: dpllm.Ledger) -> None:
    with engine(model, ledger) as made:
        made.step()
    assert (ledger.run(made.entry).state, ledger.run(made.entry).steps) == ("interrupted", 1)
    assert ledger.spent("letters", made.plan.delta) == pytest.approx(made.plan.epsilon, abs=1e-6)


def test_an_own_step_of_the_optimizer_is_refused(model: nn.Module, ledger: dpllm.Ledger) -> None:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    plan = dpllm.promise(N, epsilon=20, batch_size=4, steps=STEPS)
    made = dpllm.Engine(model, optimizer, plan, units(), ledger=ledger, dataset="letters", max_length=LENGTH)
    with made, pytest.raises(Refused):
        optimizer.step()


def test_what_cannot_hold_is_refused_before_anything_is_spent(model: nn.Module, ledger: dpllm.Ledger) -> None:
    for wrong, message in (
        (units()[1:], "another rate"),
        ([units()[0]] * N, "twice"),
        ([None, *units()[1:]], "not a dpllm.Unit"),
        ([row((400, 3)), *units()[1:]], "nothing could be trained"),
        ([row((4, 3), mask=(True, True)), *units()[1:]], "nothing could be trained"),
        ([row((4, 3), denominator=-1), *units()[1:]], "nothing could be trained"),
    ):
        with pytest.raises(ConfigError, match=message):
            engine(model, ledger, units=wrong)
    with pytest.raises(ConfigError, match="longer than max_length"):
        engine(model, ledger, max_length=8)
    with pytest.raises(Refused, match="float32"), torch.autocast("cpu", dtype=torch.bfloat16):
        engine(model, ledger)
    model.transformer.h[1].add_module("norm", nn.BatchNorm1d(3))
    with pytest.raises(Refused, match="batch norm"):
        engine(model, ledger)
    del model.transformer.h[1].norm
    set_budget(ledger, "letters", Budget(0.5, 1e-3, "example", "zero_out", "planned", None))
    with pytest.raises(BudgetExceeded):
        engine(model, ledger)
    assert not ledger.account("letters").runs
    with pytest.raises(Refused, match="float32"):
        engine(model.bfloat16(), ledger)


@pytest.mark.parametrize(
    "changed",
    [
        lambda plan: replace(plan, noise_multiplier=0.01),
        lambda plan: replace(plan, schedule=replace(plan.schedule, sampling_rate=1.0)),
        lambda plan: replace(plan, delta=0.5),
        lambda plan: replace(plan, sampling="example"),
        lambda plan: replace(plan, target_epsilon=1.0),
        lambda plan: replace(plan, coefficients=(0.9, 0.1)),
    ],
)
def test_a_plan_that_promise_did_not_make_is_refused(model: nn.Module, ledger: dpllm.Ledger, changed: Any) -> None:
    """What is charged must be what runs."""
    plan = dpllm.promise(N, epsilon=20, batch_size=4, steps=STEPS, max_grad_norm=0.1)
    with pytest.raises(Refused, match="is not as dpllm"):
        engine(model, ledger, plan=changed(plan))
    assert not ledger.account("letters").runs


def test_a_refused_engine_leaves_the_model_to_its_owner(model: nn.Module, ledger: dpllm.Ledger) -> None:
    set_budget(ledger, "letters", Budget(0.5, 1e-3, "example", "zero_out", "planned", None))
    with pytest.raises(BudgetExceeded):
        engine(model, ledger)
    assert ledger.refusals() == {("letters", "over_budget"): 1}
    with engine(model, ledger, dataset="others") as made:
        made.step()


def test_what_changes_after_the_checks_is_refused_before_the_charge(model: nn.Module, ledger: dpllm.Ledger) -> None:
    mine = units()
    with engine(model, ledger, units=mine) as made:
        mine[0] = row(tuple([3] * 40), mask=(False, *[True] * 39))  # the engine has its own list
        with pytest.raises(Refused, match="float32"), torch.autocast("cpu", dtype=torch.bfloat16):
            made.step()
        next(module for module in model.modules() if isinstance(module, nn.Dropout)).p = 0.5
        with pytest.raises(Refused, match="dropout was switched on again"):
            made.step()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("dpllm.model.processes.several", lambda: True)
            with pytest.raises(Refused, match="one process"):
                made.step()
        assert ledger.run(made.entry).steps == 0
        made.step()
    with pytest.raises(Refused, match="closed"):
        made.step()
    made.__exit__(None, None, None)
    assert ledger.run(made.entry).steps == 1


def test_a_step_that_fails_counts_and_the_next_goes_on(model: nn.Module, ledger: dpllm.Ledger) -> None:
    with engine(model, ledger) as made:
        trained = next(p for p in model.parameters() if p.requires_grad)
        trained.grad = torch.ones_like(trained)
        with pytest.raises(Refused):
            made.step()
        trained.grad = None
        made.step()
        assert ledger.run(made.entry).steps == 2


@pytest.mark.parametrize("where", ["in the draw", "in the step"])
def test_banded_noise_takes_turns_and_takes_nothing_back_from_before_a_step_that_failed(
    model: nn.Module, ledger: dpllm.Ledger, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """The failed step had its turn but no row of noise: two turns of a unit would be nearer in noise than b rows."""
    plan = dpllm.promise(N, epsilon=20, batch_size=4, steps=7, max_grad_norm=0.1, bands=3)
    assert (plan.bands, plan.event["type"], plan.event["probability"]) == (3, "cyclic_poisson", 1.0)
    drawn: list[set[int]] = []
    held: list[int] = []
    draw, add = PoissonSampler.draw, BandedNoise.add_to

    def watched(sampler: PoissonSampler) -> list[int]:
        drawn.append(set(found := draw(sampler)))
        if where == "in the draw" and len(drawn) == 4:
            raise Refused("interrupted")
        return found

    monkeypatch.setattr(PoissonSampler, "draw", watched)
    monkeypatch.setattr(BandedNoise, "add_to", lambda self, *more: held.append(len(self._past)) or add(self, *more))
    trained = next(p for p in model.parameters() if p.requires_grad)
    with engine(model, ledger, plan=plan) as made:
        for step in range(7):
            trained.grad = torch.ones_like(trained) if step == 3 and where == "in the step" else None
            with pytest.raises(Refused) if step == 3 else contextlib.nullcontext():
                made.step()
        assert ledger.run(made.entry).event == plan.event
    assert held == [0, 1, 2, 0, 1, 2]
    assert drawn[0] | drawn[1] | drawn[2] == set(range(N))  # at rate 1, everybody in their turn, and once
    assert sum(map(len, drawn[:3])) == N
    assert drawn[:3] == drawn[3:6]
    assert drawn[6] == drawn[0]
    assert ledger.spent("letters", plan.delta) == pytest.approx(plan.epsilon, abs=1e-6)


def test_groups_of_two_loops_are_drawn_apart(model: nn.Module, ledger: dpllm.Ledger) -> None:
    plan = dpllm.promise(N, epsilon=20, batch_size=4, steps=3, max_grad_norm=0.1, bands=3)
    group_NE = []
    for _ in range(4):
        with engine(model, ledger, plan=plan) as made:
            group_NE.append(tuple(made._sampler._group_N))
    assert len(set(group_NE)) > 1


@pytest.mark.parametrize(("bands", "kind"), [(0, ConfigError), ("many", ConfigError), (4, Refused)])
def test_bands_that_cannot_be_are_one_line(bands: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind, match="bands") as refusal:
        dpllm.promise(N, epsilon=20, batch_size=4, steps=3, bands=bands)
    assert len(str(refusal.value).splitlines()) == 1


def test_auto_finds_the_bands_that_a_recipe_would_and_its_plan_runs(model: nn.Module, ledger: dpllm.Ledger) -> None:
    assert dpllm.promise(1200, epsilon=8, batch_size=60, steps=30, bands="auto").bands > 1
    plan = dpllm.promise(N, epsilon=20, batch_size=4, steps=3, max_grad_norm=0.1, bands="auto")
    with engine(model, ledger, plan=plan) as made:
        made.step()


@pytest.mark.parametrize(
    ("num_units", "given"), [(12, {"epsilon": -1.0}), (12, {"steps": 0}), (12, {"batch_size": 0}), (12.5, {}), (0, {})]
)
def test_a_promise_of_impossible_numbers_is_one_line(num_units: Any, given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as refusal:
        dpllm.promise(num_units, **{"epsilon": 8.0, "batch_size": 4, "steps": 3, **given})
    assert len(str(refusal.value).splitlines()) == 1
