"""What one step's gradient gives away: all tokens where nothing protects them, none that noise does not leave."""

from __future__ import annotations

import io
import json
import math
from dataclasses import asdict, replace
from typing import Any

import pytest
import tiny
import tiny_models as tm
import torch
from rich.console import Console
from scipy import stats

from dpllm.errors import ConfigError
from dpllm.lab import leakage
from dpllm.lab.leakage import LeakageReport, gradient_leakage, plain_gradient, reconstruction_bound
from dpllm.model import adapters
from dpllm.privacy.clipping import FUNCTIONS
from dpllm.privacy.noise import GaussianNoise
from dpllm.privacy.plan import Plan
from dpllm.privacy.sampling import collate
from dpllm.recipe.derived import plan_of
from dpllm.text.data import TokenSequence, Unit

WIDTH, VOCABULARY = 64, 500
LENGTHS = (9, 7, 8)


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def plan() -> Plan:
    recipe = tm.recipe(privacy={"noise_multiplier": 0.5, "epsilon": 1e4}, train={"batch_size": 10, "steps": 20})
    return plan_of(recipe, 1000)


def net(family: str = "llama", r: int = 16, **adapter: Any) -> Any:
    made = tiny.model(
        family, **{"vocab_size": VOCABULARY, "hidden_size": WIDTH, "head_dim": WIDTH // 2}, **tm.NO_DROPOUT.get(family, {})
    )  # fmt: skip
    recipe = tm.recipe(adapter={"method": "lora", "r": r, "alpha": 2 * r, **adapter})
    return adapters.attach(made.requires_grad_(False), recipe).train()


def sequences(lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> list[TokenSequence]:
    return [tm.unit((length,), 100 * seed + row, VOCABULARY).sequences[0] for row, length in enumerate(lengths)]


def leak(family: str, plan: Plan, seed: int, r: int = 16, lengths: tuple[int, ...] = LENGTHS) -> LeakageReport:
    return gradient_leakage(net(family, r), plan, sequences(lengths, seed), entropy=[seed, r, len(family)])


@pytest.mark.parametrize(("family", "r"), [("llama", 16), ("qwen2", 16), ("gemma2", 16), ("gpt2", 32), ("opt", 16)])
def test_the_raw_gradient_gives_all_tokens_away_and_the_noised_one_none(family, r, plan, seed):
    report = leak(family, plan, seed, r)
    assert report.tokens <= report.rank_limit
    assert report.gradient_rank == report.tokens
    assert report.raw.span_recall == report.clipped.span_recall == 1.0
    assert report.raw.span_auc == report.clipped.span_auc == 1.0
    assert report.noised.span_recall < 0.35
    # 21 tokens against 479: the rank AUC's standard deviation under chance is 0.065.
    assert abs(report.noised.span_auc - 0.5) < 6 * 0.065


def test_noise_is_what_protects(plan, monkeypatch, seed):
    monkeypatch.setattr(GaussianNoise, "draw", lambda self, size: torch.zeros(size))
    report = leak("llama", plan, seed)
    assert report.noised.span_recall == 1.0


def test_more_tokens_than_rank_hide_some(plan, seed):
    report = leak("llama", plan, seed, r=2, lengths=(30, 30))
    assert report.rank_limit == report.gradient_rank == 6 < report.tokens
    assert 0.5 < report.raw.span_auc < 1.0
    assert report.raw.span_recall < 0.8


def test_at_the_first_step_the_gradient_of_a_is_zero_and_b_is_moved_before_the_attack(seed):
    fresh, batch = net(), collate([Unit((sequence,)) for sequence in sequences(seed=seed)], pad_id=0)

    def norms() -> list[float]:
        return [float(g.norm()) for name, g in plain_gradient(fresh, batch).items() if "lora_A" in name]

    assert max(norms()) == 0.0
    leakage._leave_zero(fresh, batch)
    assert min(norms()) > 0.0


def test_nothing_of_the_model_moves_but_b(plan, seed):
    fresh = net()
    before = {name: p.detach().clone() for name, p in fresh.named_parameters()}
    gradient_leakage(fresh, plan, sequences(seed=seed), entropy=seed)
    for name, parameter in fresh.named_parameters():
        if "lora_B" in name:
            assert float(parameter.detach().abs().max()) <= leakage.STEP
        else:
            assert torch.equal(parameter, before[name])
        assert parameter.grad is None
        assert parameter.requires_grad == ("lora_" in name)
    assert fresh.training
    tm.make_engine(fresh, plan)  # it carries no hooks


def test_the_noise_is_the_engines(plan, monkeypatch, seed):
    """Ten times less noise is seen as ten times less, and clipping that does nothing as a longer sum."""
    report = leak("llama", plan, seed)
    monkeypatch.setitem(FUNCTIONS, "flat", lambda norm, bound: torch.ones_like(norm))
    unclipped = leak("llama", replace(plan, max_grad_norm=1e-3), seed)
    assert report.signal_to_noise < 0.1
    assert unclipped.signal_to_noise > 10 * report.signal_to_noise


def test_adapters_that_read_the_same_are_taken_together(plan, seed):
    report = leak("llama", plan, seed, r=4)
    assert [name.split(".")[-3] for name in report.layers] == ["q_proj", "k_proj", "v_proj"]
    assert report.rank_limit == 12


def test_prompt_tokens_leak_and_the_last_token_does_not(plan):
    ids = (10, 20, 30, 40, 50)
    one = [TokenSequence(ids, (False, False, False, True, True), 2)]
    assert leakage._tokens_of(one, positional=False) == ({10, 20, 30, 40}, 4)
    twice = [TokenSequence((10, 10, 30), (False, True, True), 2)]
    assert leakage._tokens_of(twice, positional=False) == ({10}, 1)
    assert leakage._tokens_of(twice, positional=True) == ({10}, 2)


def test_a_deeper_adapter_or_none_is_refused(plan, seed):
    deep = net(target_modules=".*layers.1.*q_proj")
    with pytest.raises(ConfigError, match="attention has mixed"):
        gradient_leakage(deep, plan, sequences(seed=seed))
    for adapter in (tm.FROZEN, {**tm.LORA, "lora_a": "frozen"}):
        with pytest.raises(ConfigError, match="no LoRA adapter"):
            gradient_leakage(tm.build("llama", adapter), plan, [tm.unit((5,), 1).sequences[0]])


def test_reconstruction_bounds_are_those_of_the_literature(plan):
    one = replace(plan, noise_multiplier=1 / 0.925)
    bound = reconstruction_bound(one, 1e-4)
    assert bound.one_step == pytest.approx(stats.norm.cdf(stats.norm.ppf(1e-4) + 0.925))
    assert bound.one_step == pytest.approx(0.0026, abs=1e-4)  # 0.26 %
    stated = replace(plan, epsilon=math.log(3), delta=1e-3, curve=((1e-2, math.log(2)), (1e-9, None)))
    assert reconstruction_bound(stated, 0.1).run == pytest.approx(0.1 * 2 + 1e-2)
    assert reconstruction_bound(stated, 1e-4).run == pytest.approx(3e-4 + 1e-3)
    assert reconstruction_bound(replace(stated, epsilon=math.inf, curve=()), 0.5).run == 1.0
    rows = replace(plan, sampling="example", max_examples_per_unit=3)
    assert reconstruction_bound(rows, 1e-4).one_step > reconstruction_bound(plan, 1e-4).one_step


def test_the_report_is_json_and_a_table_and_says_when_it_matters(plan, seed):
    report = leak("llama", plan, seed)
    values = json.loads(json.dumps(asdict(report), allow_nan=False))
    assert values["raw"]["span_recall"] == 1.0
    assert len(values["reconstruction"]) == 3
    assert "It does not matter for an adapter that is trained in one place and released" in values["statement"]
    assert "the gradient of A is zero" in values["statement"]
    console = Console(width=120, file=io.StringIO(), record=True)
    console.print(leakage.table(report))
    assert "noised" in console.export_text()
