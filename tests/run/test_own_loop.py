"""A loop of one's own has the guarantee of a recipe, or is refused before anything is spent."""

from __future__ import annotations

from collections.abc import Iterator
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
    with pytest.raises(ConfigError, match="another rate"):
        engine(model, ledger, units=units()[1:])
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
