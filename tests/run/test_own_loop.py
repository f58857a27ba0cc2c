"""A loop of one's own has the guarantee of a recipe, or is refused before anything is spent."""

import contextlib
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
import transformers
from torch import nn

import dpllm
from dpllm.errors import BudgetExceeded, ConfigError, Refused
from dpllm.ledger import Budget
from dpllm.ledger.budgets import set_budget
from dpllm.privacy.engine import StepEngine
from dpllm.privacy.noise import BandedNoise
from dpllm.privacy.sampling import PoissonSampler
from dpllm.run.own_loop import hooks

N, LENGTH, STEPS = 12, 16, 3


def units() -> list[dpllm.Unit]:
    lengths = [6 + number % 5 for number in range(N)]
    return [
        row(tuple(3 + (number + place) % 20 for place in range(length)), (False, *[True] * (length - 1)), length - 1)
        for number, length in enumerate(lengths)
    ]


def last_block_trains(path: Path, **changes: Any) -> nn.Module:
    base = transformers.AutoModelForCausalLM.from_pretrained(tiny.save_model(path, "gpt2", **changes))
    for name, parameter in base.named_parameters():
        parameter.requires_grad = ".h.1." in name
    return base


@pytest.fixture
def model(tmp_path: Path) -> nn.Module:
    return last_block_trains(tmp_path / "base")


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[dpllm.Ledger]:
    with dpllm.Ledger(tmp_path / "ledger.sqlite") as ledger:
        yield ledger


def row(ids: tuple[int, ...], mask: tuple[bool, ...] = (False, True), denominator: int = 1) -> dpllm.Unit:
    return dpllm.Unit((dpllm.TokenSequence(ids, mask, denominator),))


def planned(**changes: Any) -> Any:
    return dpllm.promise(N, **{"epsilon": 20, "batch_size": 4, "steps": STEPS, "max_grad_norm": 0.1, **changes})


def engine(model: nn.Module, ledger: dpllm.Ledger, kind: Any = torch.optim.SGD, **changes: Any) -> dpllm.Engine:
    trains = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trains, lr=0.1) if kind is torch.optim.SGD else kind(trains)
    settings = {"ledger": ledger, "dataset": "letters", "max_length": LENGTH, **changes}
    return dpllm.Engine(model, optimizer, settings.pop("plan", planned()), settings.pop("units", units()), **settings)


def test_every_step_is_charged_and_the_whole_run_reserved_before(model: nn.Module, ledger: dpllm.Ledger) -> None:
    before = [p.detach().clone() for p in model.parameters()]
    with engine(model, ledger) as made:
        with pytest.raises(Refused):
            made._optimizer.step()
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


class Lazy(Sequence[dpllm.Unit]):
    """Makes each unit anew, so that no two are one object for long."""

    def __getitem__(self, place: Any) -> Any:
        return units()[place]

    def __len__(self) -> int:
        return N


def test_units_may_be_made_when_they_are_asked_for(model: nn.Module, ledger: dpllm.Ledger) -> None:
    with engine(model, ledger, units=Lazy()) as made:
        made.step()


def test_a_loop_that_ends_early_keeps_its_reservation(model: nn.Module, ledger: dpllm.Ledger) -> None:
    with engine(model, ledger) as made:
        made.step()
    assert (ledger.run(made.entry).state, ledger.run(made.entry).steps) == ("interrupted", 1)
    assert ledger.spent("letters", made.plan.delta) == pytest.approx(made.plan.epsilon, abs=1e-6)


def test_what_cannot_hold_is_refused_before_anything_is_spent(model: nn.Module, ledger: dpllm.Ledger) -> None:
    for wrong, message in (
        (units()[1:], "but the Plan is for"),
        ([units()[0]] * N, "twice"),
        ([None, *units()[1:]], "not a dpllm.Unit"),
        ([row((400, 3)), *units()[1:]], "nothing to train on"),
        ([row((4, 3), mask=(True, True)), *units()[1:]], "nothing to train on"),
        ([row((4, 3), denominator=-1), *units()[1:]], "nothing to train on"),
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
    set_budget(ledger, "letters", Budget(0.5, 1e-3, "example", "zero_out"))
    with pytest.raises(BudgetExceeded):
        engine(model, ledger)
    assert not ledger.account("letters").runs
    assert ledger.refusals() == {("letters", "over_budget"): 1}
    with engine(model, ledger, dataset="others") as made:  # the model is its owner's again
        made.step()
    with pytest.raises(Refused, match="float32"):
        engine(model.bfloat16(), ledger)


def test_rows_count_no_more_positions_than_the_model_has(tmp_path: Path, ledger: dpllm.Ledger) -> None:
    """A step would fail once it was charged: padding counts to max_length, and the self-check follows the model."""
    short = last_block_trains(tmp_path / "short", max_position_embeddings=24)
    with engine(short, ledger, max_length=128) as one:
        for _ in range(STEPS):
            one.step()
    long = [*units()[1:], row(tuple(range(3, 40)), (False, *[True] * 36), 36)]
    with pytest.raises(ConfigError, match="longer than max_length"):
        engine(short, ledger, max_length=128, units=long)


OTHER_PLANS = {"noise_multiplier": 0.01, "sampling_rate": 1.0, "delta": 0.5, "target_epsilon": 1.0}


@pytest.mark.parametrize(
    ("key", "value"), [*OTHER_PLANS.items(), ("sampling", "example"), ("coefficients", (0.9, 0.1))]
)
def test_a_plan_that_promise_did_not_make_is_refused(
    model: nn.Module, ledger: dpllm.Ledger, key: str, value: Any
) -> None:
    """What is charged must be what runs."""
    with pytest.raises(Refused, match="was not made by dpllm"):
        engine(model, ledger, plan=planned().model_copy(update={key: value}))
    assert not ledger.account("letters").runs


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


def first(model: nn.Module, *, trains: bool) -> nn.Parameter:
    return next(p for p in model.parameters() if p.requires_grad is trains)


def written(model: nn.Module, *, trains: bool) -> None:
    with torch.no_grad():
        first(model, trains=trains).mul_(1.5)


def coupled(module: nn.Module, arguments: Any, output: Any) -> None:
    """What a hook could do to the rows of others."""


CHANGES: dict[str, Any] = {
    "a trained weight": lambda model: written(model, trains=True),
    "a frozen weight": lambda model: written(model, trains=False),
    "data replaced": lambda model: setattr(p := first(model, trains=False), "data", p.data.clone()),
    "a hook": lambda model: model.transformer.h[0].register_forward_hook(coupled),
    "a hook before": lambda model: model.register_forward_pre_hook(lambda *_: None),
    "another forward": lambda model: setattr(model.transformer.h[0], "forward", lambda *more, **named: more),
    "another class": lambda model: setattr(model.transformer.ln_f, "__class__", type("Own", (nn.LayerNorm,), {})),
    "what trains": lambda model: first(model, trains=False).requires_grad_(True),
    "a gradient": lambda model: setattr(p := first(model, trains=True), "grad", torch.ones_like(p)),
    "another layer": lambda model: setattr(model.transformer, "ln_f", nn.LayerNorm(16)),
    "a compiled layer": lambda model: model.transformer.h[0].compile(backend="eager"),
}


WORDS = {"what trains": "the trainable parameters changed", "a gradient": "holds a gradient"}


@pytest.mark.parametrize("taken", [0, 1])
@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_the_model_between_steps_is_refused_before_a_draw(
    model: nn.Module, ledger: dpllm.Ledger, change: str, taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine(model, ledger) as made:
        for _ in range(taken):
            made.step()
        CHANGES[change](model)
        monkeypatch.setattr(PoissonSampler, "draw", lambda sampler: pytest.fail("drawn"))
        for _ in range(2):
            with pytest.raises(Refused, match=WORDS.get(change, "was changed since the last step")):
                made.step()
        assert ledger.run(made.entry).steps == taken


def test_a_hook_that_is_called_elsewhere_is_another_one() -> None:
    layer = nn.Linear(2, 2)
    layer.register_forward_hook(coupled)
    seen = hooks(layer, "_forward_")
    layer._forward_pre_hooks.update(layer._forward_hooks)
    layer._forward_hooks.clear()
    assert hooks(layer, "_forward_") != seen


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_step_without_gradients_is_not_charged(model: nn.Module, ledger: dpllm.Ledger, mode: Any) -> None:
    with engine(model, ledger) as made:
        with mode(), pytest.raises(Refused, match="gradients are disabled"):
            made.step()
        assert ledger.run(made.entry).steps == 0
        made.step()


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, torch.optim.SparseAdam])
def test_an_optimizer_that_cannot_step_is_refused_before_anything_is_spent(
    model: nn.Module, ledger: dpllm.Ledger, kind: Any
) -> None:
    with pytest.raises(Refused, match="sparse gradients"):
        engine(model, ledger, kind)
    assert not ledger.account("letters").runs


def test_units_are_the_engines_own_and_one_row_of_two_units_is_named(model: nn.Module, ledger: dpllm.Ledger) -> None:
    ids = torch.tensor([4, 5])
    given = dpllm.Unit((dpllm.TokenSequence(ids, torch.tensor([False, True]), 1),))  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match=r"units\[0\] and units\[1\] hold the same row"):
        made = engine(model, ledger, units=[given, row((4, 5)), *units()[2:]])
    with made:
        ids.fill_(7)
        assert made._units[0] == row((4, 5))
        made.step()
    tokens, mask, rows = [4, 5], [False, True], []
    rows.append(dpllm.TokenSequence(tokens, mask, 1))  # type: ignore[arg-type]
    grown = dpllm.Unit(rows)  # type: ignore[arg-type]
    with engine(model, ledger, units=[grown, *units()[1:]]) as made:
        tokens.append(6)
        mask.append(True)
        rows.append(rows[0])
        assert made._units[0] == row((4, 5))


def test_looking_at_the_model_between_steps_changes_nothing(model: nn.Module, ledger: dpllm.Ledger) -> None:
    with engine(model, ledger) as made:
        scheduler = torch.optim.lr_scheduler.LambdaLR(made._optimizer, lambda step: 1 / (1 + step))
        for _ in range(STEPS):
            made.step()
            scheduler.step()
            with torch.no_grad():
                model.eval()(torch.tensor([[3, 4, 5]]))
            model.train()
            model.state_dict()


def cut_short(*_: Any) -> None:
    """Stands in for a part of the step that fails once the step is charged."""
    raise Refused("interrupted")


def test_a_step_that_fails_counts_and_the_next_goes_on(model: nn.Module, ledger: dpllm.Ledger) -> None:
    with engine(model, ledger) as made:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(StepEngine, "clipped_sum", cut_short)
            with pytest.raises(Refused, match="interrupted"):
                made.step()
        assert ledger.run(made.entry).steps == 1
        made.step()
        assert ledger.run(made.entry).steps == 2


@pytest.mark.parametrize("written", [True, False])
def test_after_an_interrupt_while_a_step_is_charged_the_next_goes_on(
    model: nn.Module, ledger: dpllm.Ledger, written: bool
) -> None:
    """A mutant charges the same step again, which the ledger refuses."""
    charge = ledger.charge

    def interrupted(entry: str, step: int) -> None:
        if written:
            charge(entry, step)
        raise KeyboardInterrupt

    with engine(model, ledger) as made:
        made.step()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ledger, "charge", interrupted)
            with pytest.raises(KeyboardInterrupt):
                made.step()
        made.step()
        assert ledger.run(made.entry).steps == 2 + written


@pytest.mark.parametrize("where", ["in the draw", "in the step"])
def test_banded_noise_takes_turns_and_takes_nothing_back_from_before_a_step_that_failed(
    model: nn.Module, ledger: dpllm.Ledger, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """The failed step had its turn but no row of noise: two turns of a unit would be nearer in noise than b rows."""
    plan = planned(steps=7, bands=3)
    assert (plan.bands, plan.event.type, plan.event.probability) == (3, "cyclic_poisson", 1.0)
    drawn: list[set[int]] = []
    held: list[int] = []
    draw, add = PoissonSampler.draw, BandedNoise.add_to

    def watched(sampler: PoissonSampler) -> list[int]:
        drawn.append(set(result := draw(sampler)))
        if where == "in the draw" and len(drawn) == 4:
            raise Refused("interrupted")
        return result

    monkeypatch.setattr(PoissonSampler, "draw", watched)
    monkeypatch.setattr(BandedNoise, "add_to", lambda self, *more: held.append(len(self._past)) or add(self, *more))
    clipped_sum = StepEngine.clipped_sum
    with engine(model, ledger, plan=plan) as made:
        for step in range(7):
            fails = step == 3 and where == "in the step"
            monkeypatch.setattr(StepEngine, "clipped_sum", cut_short if fails else clipped_sum)
            with pytest.raises(Refused, match="interrupted") if step == 3 else contextlib.nullcontext():
                made.step()
            assert ledger.run(made.entry).steps == step + 1
        assert ledger.run(made.entry).event == plan.event
    assert held == [0, 1, 2, 0, 1, 2]
    assert drawn[0] | drawn[1] | drawn[2] == set(range(N))  # at rate 1, everybody in their turn, and once
    assert sum(map(len, drawn[:3])) == N
    assert drawn[:3] == drawn[3:6]
    assert drawn[6] == drawn[0]
    assert ledger.spent("letters", plan.delta) == pytest.approx(plan.epsilon, abs=1e-6)


def test_groups_of_two_loops_are_drawn_apart(model: nn.Module, ledger: dpllm.Ledger) -> None:
    plan, group_NE = planned(bands=3), []
    for _ in range(4):
        with engine(model, ledger, plan=plan) as made:
            group_NE.append(tuple(made._sampler._group_N))
    assert len(set(group_NE)) > 1


@pytest.mark.parametrize(("bands", "kind"), [(0, ConfigError), ("many", ConfigError), (4, Refused)])
def test_bands_that_cannot_be_are_one_line(bands: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind, match="bands") as refusal:
        planned(bands=bands)
    assert len(str(refusal.value).splitlines()) == 1


def test_auto_finds_the_bands_that_a_recipe_would_and_its_plan_runs(model: nn.Module, ledger: dpllm.Ledger) -> None:
    assert dpllm.promise(1200, epsilon=8, batch_size=60, steps=30, bands="auto").bands > 1
    with engine(model, ledger, plan=planned(bands="auto")) as made:
        made.step()


@pytest.mark.parametrize(
    ("num_units", "given"), [(12, {"epsilon": -1.0}), (12, {"steps": 0}), (12, {"batch_size": 0}), (12.5, {}), (0, {})]
)
def test_a_promise_of_impossible_numbers_is_one_line(num_units: Any, given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as refusal:
        dpllm.promise(num_units, **{"epsilon": 8.0, "batch_size": 4, "steps": 3, **given})
    assert len(str(refusal.value).splitlines()) == 1


def test_integers_of_numpy_are_integers() -> None:
    sizes = {"batch_size": np.int64(4), "steps": np.int32(3), "bands": np.int64(3)}
    assert dpllm.promise(np.int64(N), epsilon=20, max_grad_norm=0.1, **sizes) == planned(steps=3, bands=3)


@pytest.mark.parametrize("tokens", ["auto", math.nan, math.inf, 100.5, True, 64.0, 0, 2**20 + 1])
def test_tokens_of_a_pass_are_a_whole_number(model: nn.Module, ledger: dpllm.Ledger, tokens: Any) -> None:
    with engine(model, ledger, tokens_per_pass=np.int64(512)):
        pass
    with pytest.raises(ConfigError, match=r"^tokens_per_pass is .*Set an integer >= 1 and <= 1048576\.$"):
        engine(model, ledger, tokens_per_pass=tokens)


def test_arguments_of_another_kind_are_one_line(model: nn.Module, ledger: dpllm.Ledger) -> None:
    wrong = [lambda: dpllm.train("file.yaml"), lambda: dpllm.plan(3), lambda: dpllm.load_recipe(["data"])]
    for call in (*wrong, lambda: engine(model, None), lambda: engine(model, ledger, plan="file.yaml")):
        with pytest.raises(ConfigError) as refusal:
            call()
        assert len(str(refusal.value).splitlines()) == 1
