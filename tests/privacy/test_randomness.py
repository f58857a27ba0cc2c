"""What one unit adds depends on that unit alone, also through random numbers that a forward pass draws."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checks
import numpy as np
import pytest
import tiny
import tiny_models as tm
import torch
from accelerate import PartialState
from rich.console import Console
from tiny_models import FROZEN, LORA, Toy
from torch import Tensor, nn
from torch.nn import functional

from dpllm.errors import Refused
from dpllm.model import loading
from dpllm.run import checkpoint
from dpllm.run.build import Prepared
from dpllm.run.loop import prepare
from dpllm.run.promise import Start

C = 1e-3
DROPOUT: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.1)),
    "opt": ("opt", {"layerdrop": 0.3, "attention_dropout": 0.2}),
    "gpt_neox": ("gpt_neox", {"hidden_dropout": 0.1, "attention_dropout": 0.1}),
    "falcon": ("falcon", {"hidden_dropout": 0.1, "attention_dropout": 0.1}),  # read from its configuration as it runs
    "falcon, one branch": ("falcon", {"hidden_dropout": 0.1, "new_decoder_architecture": True}),
    "llama": ("llama", {"attention_dropout": 0.1}),
    "phi3": ("phi3", {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attention_dropout": 0.1}),
}


def prepared(folder: Path, family: str, out: io.StringIO | None = None, **changes: Any) -> Prepared:
    """A run up to its first step, as ``dpllm train`` prepares it."""
    sections = {name: changes.pop(name, {}) for name in ("model", "data", "privacy")}
    adapter = changes.pop("adapter", LORA)
    base = tiny.save_model(folder / "base", family, **changes)
    rows = tiny.write_rows(folder / "rows.jsonl", [{"text": tiny.sentence(number)} for number in range(6)])
    ledger = {"ledger": str(folder / "ledger.sqlite"), "dataset": "notes", "max_grad_norm": C}
    config = tm.recipe(
        model={"name_or_path": str(base), **sections["model"]},
        adapter=adapter,
        data={"train": str(rows), "max_length": 32, **sections["data"]},
        privacy={"noise_multiplier": 1.0, "epsilon": 50.0, **ledger, **sections["privacy"]},
        train={"batch_size": 3, "steps": 2, "tokens_per_pass": 128},
        output_dir=str(folder / "run"),
    )
    made = prepare(config, Start(), PartialState(), Console(file=out or io.StringIO(), width=200))
    made.reservation.close()
    return made


def moved(engine: Any, units: Any, seed: int) -> float:
    """By how many C the sum moves when a unit leaves, at most, for an attacker who knows the seed of the recipe."""

    def summed(some: Any) -> Tensor:
        torch.manual_seed(seed)
        return tm.clipped_sum(engine, some)

    some: list[Any] = [*units]
    whole_P = summed(some)
    assert float(whole_P.norm()) > C
    return max(float((whole_P - summed(checks.without(some, index))).norm()) for index in range(len(some))) / C


# --- dropout of the base -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DROPOUT)
def test_a_unit_moves_the_sum_by_c_though_the_base_has_dropout(name: str) -> None:
    family, changes = DROPOUT[name]
    net = tm.build(family, LORA, **changes)
    assert loading.without_dropout(net)
    assert moved(tm.make_engine(net, tm.plan(C)), tm.units(tm.RAGGED), 0) <= checks.BOUND


def test_so_it_does_in_a_run_that_computes_layers_again(tmp_path: Path) -> None:
    p = prepared(
        tmp_path, "gpt2", model={"gradient_checkpointing": True}
    )  # with dropout of .1 in three places, as it comes
    assert moved(p.engine, p.units, p.config.train.seed) <= checks.BOUND


def test_the_run_says_what_it_switched_off_and_exports_the_base_as_it_was(tmp_path: Path) -> None:
    out = io.StringIO()
    rates = {"hidden_dropout": 0.1, "attention_dropout": 0.2}
    p = prepared(tmp_path, "falcon", out, adapter=FROZEN, **rates)
    assert p.dropout_off == {"attention_dropout": 0.2, "hidden_dropout": 0.1}
    assert "dropout is off" in out.getvalue()
    assert out.getvalue().count("attention_dropout 0.2, hidden_dropout 0.1") == 1
    checkpoint.export(p.model, p.tokenizer, p.run)
    written = json.loads((p.run.export / "config.json").read_text())
    assert written == {**json.loads((tmp_path / "base" / "config.json").read_text()), "dtype": written["dtype"]}
    assert {name: written[name] for name in rates} == rates


def test_a_base_without_dropout_has_nothing_to_say(tmp_path: Path) -> None:
    assert prepared(tmp_path, "llama", out := io.StringIO()).dropout_off == {}
    assert "dropout" not in out.getvalue()


def test_without_privacy_dropout_stays(tmp_path: Path) -> None:
    out = io.StringIO()
    public: Any = {"data": {"public": True}, "privacy": {"enabled": False}}
    p = prepared(tmp_path, "gpt2", out, adapter={**LORA, "dropout": 0.3}, **public)
    assert p.dropout_off is None
    assert "dropout" not in out.getvalue()
    assert {module.p for module in p.model.modules() if isinstance(module, nn.Dropout)} == {0.1, 0.3}


def test_dropout_is_off_in_every_kind_of_module_and_under_every_name() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn_pdrop, self.layerdrop, self.hidden_dropout, self.keep = 0.1, 0.2, 0.3, 0.9
            self.dropout_first, self.num_dropped = True, 4
            self.one, self.two, self.three = nn.Dropout(0.4), nn.Dropout2d(0.5), nn.AlphaDropout(0.6)

    layer = Layer()
    expected = {"attn_pdrop": 0.1, "layerdrop": 0.2, "hidden_dropout": 0.3, "one": 0.4, "two": 0.5, "three": 0.6}
    assert loading.without_dropout(layer) == expected
    assert loading.without_dropout(layer) == {}
    assert (layer.keep, layer.dropout_first, layer.num_dropped) == (0.9, True, 4)
    assert (layer.attn_pdrop, layer.two.p) == (0.0, 0.0)


# --- whatever else draws -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "changes", "named", "checkpointing"),
    [
        ("mixtral", {"router_jitter_noise": 0.1}, r"layers\.0\.mlp draws", True),
        ("phimoe", {}, r"layers\.0\.mlp\.router draws", False),  # samples its experts, also without jitter
    ],
)
def test_a_router_that_jitters_is_refused(family, changes, named, checkpointing, tmp_path):
    attention = {**LORA, "target_modules": ["q_proj", "v_proj"]}
    with pytest.raises(Refused, match=named):
        prepared(tmp_path, family, adapter=attention, model={"gradient_checkpointing": checkpointing}, **changes)


class OnTheWayBack(torch.autograd.Function):
    """Noise on a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, generator: Any) -> Tensor:
        ctx.generator = generator
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * (1 + torch.rand(gradients[0].shape, generator=ctx.generator)), None


def state_put_back(x_RTd: Tensor) -> Tensor:
    with torch.random.fork_rng():
        return x_RTd + torch.rand_like(x_RTd)


class Inner(nn.Module):
    """Something random between the layers of a toy, in training mode only."""

    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, x_RTd: Tensor) -> Tensor:
        return self.draw(x_RTd) if self.training else x_RTd


class Around(nn.Module):
    """A module whose own code is quiet, around one that is not."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.quiet, self.inner = nn.Identity(), inner

    def forward(self, *, x_RTd: Tensor) -> Tensor:
        return self.quiet(self.inner(self.quiet(x_RTd)))


class Random(Toy):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.around = Around(inner)

    def hidden(self, x_RTd: Tensor) -> Tensor:
        return self.around(x_RTd=self.layer(x_RTd))


OWN = torch.Generator().manual_seed(1)
BY_NAME, OF_ALL = "around.inner draws", "Random draws"
DRAWS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "dropout whose rate is written down nowhere": (lambda x: functional.dropout(x, 0.1), BY_NAME),
    # Hardly ever skips anything, so that no two passes differ.
    "stochastic depth": (lambda x: x if torch.rand(()) > 1e-6 else torch.zeros_like(x), BY_NAME),
    "Python's generator": (lambda x: x * random.uniform(0.9, 1.1), BY_NAME),
    "numpy's generator": (lambda x: x * float(np.random.uniform(0.9, 1.1)), BY_NAME),
    "a generator of its own": (lambda x: x + 1e-2 * torch.rand(x.shape, generator=OWN), OF_ALL),
    "the global state put back": (state_put_back, OF_ALL),
    "on the way back": (lambda x: OnTheWayBack.apply(x, None), "a backward pass of Random draws"),
    "on the way back, a generator of its own": (
        lambda x: OnTheWayBack.apply(x, OWN), "the backward pass of layer.weight draws",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DRAWS)
def test_a_module_that_draws_is_refused_by_name(name: str) -> None:
    draw, words = DRAWS[name]
    checks.self_check_refuses(Random(Inner(draw)), words)


def test_a_quiet_model_passes() -> None:
    assert tm.make_engine(Random(nn.Identity())).self_check(tm.VOCABULARY).error <= checks.EXACT


@pytest.mark.parametrize(
    ("family", "checkpointing"), [("llama", None), ("llama", "reentrant"), ("gpt2", "non-reentrant")]
)
def test_dropout_of_an_adapter_is_found_under_checkpointing(family: str, checkpointing: str | None) -> None:
    """As a caller of the engine's own may bring it along; a recipe with it is refused before."""
    net = tm.build(family, {**LORA, "dropout": 0.3}, checkpointing=checkpointing)
    checks.self_check_refuses(net, "lora_dropout.default draws")
