"""What the tests of the mechanism share: tiny models as they train, units, Plans, and gradients by brute force.

The reference gradients here share no code with dpllm.privacy: each sequence runs alone, unpadded, through a float64 copy
of the model, and the loss is written out again.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import tiny
import torch
from torch import Tensor, nn
from torch.nn import functional

from dpllm.model import adapters
from dpllm.privacy.attention import attends_by_interface
from dpllm.privacy.engine import StepEngine
from dpllm.privacy.noise import GaussianNoise
from dpllm.privacy.packing import Pass, passes_of
from dpllm.privacy.plan import Plan
from dpllm.privacy.schedule import Packing, Schedule, TokenSequence, Unit
from dpllm.privacy.selfcheck import has_experts
from dpllm.recipe.config import RunConfig

MAX_LENGTH, VOCABULARY = 128, 64
TOKENS = 96  # of a pass, which holds a few of the units here
ALONE = 0  # in the place of so many tokens: each example by itself
CPU = torch.device("cpu")
NO_DROPOUT = {
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "opt": {"dropout": 0.0},
    "ctrl": {"embd_pdrop": 0.0, "resid_pdrop": 0.0},
}
RAGGED = ((9, 4), (17,), (5,), (12,), (3, 7, 2))  # the lengths of each unit's sequences
FROZEN = {"method": "frozen", "last_blocks": 1, "final_norm": True}
LORA = {"method": "lora", "r": 2, "alpha": 4}


def recipe(**sections: Any) -> RunConfig:
    """A complete recipe; each section given is merged into a small default one."""
    raw: dict[str, Any] = {
        "model": {"name_or_path": "somewhere/tiny"},
        "data": {"train": "somewhere/rows"},
        "train": {"batch_size": 10, "steps": 5},
        "output_dir": "run",
    }
    for name, section in sections.items():
        raw[name] = {**raw.get(name, {}), **section} if isinstance(section, dict) else section
    return RunConfig.model_validate(raw)


def schedule(size: int = 100, batch: int = 10, steps: int = 5) -> Schedule:
    return Schedule(size, 0, batch, batch / size, steps)


def plan(
    max_grad_norm: float = 1.0,
    noise_multiplier: float = 1.0,
    of: Schedule | None = None,
    *,
    clipping: str = "flat",
) -> Plan:
    """A Plan with chosen C and sigma; nothing that an accountant says is in it, because no test of the engine reads it."""
    of = of or schedule()
    return Plan.model_construct(
        unit="example",
        max_examples_per_unit=None,
        sampling="unit",
        neighbouring_relation="zero_out",
        dataset_size=of.dataset_size,
        canary_slots=of.canary_slots,
        expected_batch_size=of.expected_batch_size,
        num_steps=of.num_steps,
        noise_multiplier=noise_multiplier,
        coefficients=(),
        clipping=clipping,
        max_grad_norm=max_grad_norm,
        delta=1e-3,
        target_epsilon=8.0,
    )


def trainable(net: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in net.named_parameters() if p.requires_grad}


def build(
    family: str = "llama", adapter: dict[str, Any] | str = LORA, *, checkpointing: str | None = None, **changes: Any
) -> Any:
    """A tiny model made trainable by the product's own code, with no weight at zero (LoRA's B would hide its A).

    ``adapter`` as a string is an expression for the names of the parameters that train instead, "" for all of them.
    """
    net = tiny.model(family, **{"vocab_size": VOCABULARY, **NO_DROPOUT.get(family, {}), **changes})
    net.requires_grad_(False)
    if isinstance(adapter, str):
        for name, p in net.named_parameters():
            p.requires_grad_(re.search(adapter, name) is not None)
    else:
        net = adapters.attach(net, recipe(adapter=adapter))
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for p in trainable(net).values():
            p.add_(0.1 * torch.randn(p.shape, generator=generator))
    if checkpointing:
        net.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": checkpointing == "reentrant"})
        if checkpointing == "reentrant":
            net.enable_input_require_grads()
    return net.train()


def packing(tokens: int = TOKENS, *, mode: str = "held", longest: int = 32) -> Packing:
    """Passes of so many tokens, or ALONE; ``mode``: gradients are "held" until the factors are known, or formed "twice"."""
    held = 10**9 if mode == "held" else 0
    return Packing(tokens or 32, 8, held, targets=16, max_length=longest, alone=tokens == ALONE)


def engine_of(
    net: nn.Module, optimizer: torch.optim.Optimizer, of: Schedule, promise: Plan | None, **arguments: Any
) -> StepEngine:
    """An engine; arguments beside its own: mode, tokens, longest, noise_entropy, device."""
    values: dict[str, Any] = {"noise_entropy": 2**100 + 7, "device": CPU, "tokens": TOKENS, **arguments}
    noise = GaussianNoise(values.pop("noise_entropy"), values.pop("device"))
    tokens = values.pop("tokens")
    if has_experts(net) or not attends_by_interface(net):
        tokens = ALONE
    shape = {key: values.pop(key) for key in ("mode", "longest") if key in values}
    return StepEngine(net, optimizer, of, promise, packing(tokens, **shape), noise=noise, **values)


_engines: WeakKeyDictionary[nn.Module, StepEngine] = WeakKeyDictionary()


def make_engine(net: nn.Module, promise: Plan | None = None, **arguments: Any) -> StepEngine:
    """An engine in the place of the one before on this model; SGD of rate 1, so an update is minus what was released."""
    if net in _engines:
        _engines.pop(net).close()
    promise = promise or plan()
    optimizer = torch.optim.SGD(list(trainable(net).values()), lr=1.0)
    _engines[net] = engine_of(net, optimizer, promise.schedule, promise, **arguments)
    return _engines[net]


def unit(lengths: Sequence[int], seed: int, vocabulary: int = VOCABULARY) -> Unit:
    """Random tokens; the first third of each sequence is a prompt, which is not learned."""
    generator = torch.Generator().manual_seed(seed)
    sequences = []
    for length in lengths:
        ids = torch.randint(3, vocabulary - 1, (length,), generator=generator).tolist()
        mask = (False, *(position >= length // 3 for position in range(1, length)))
        sequences.append(TokenSequence(tuple(ids), mask, sum(mask)))
    return Unit(tuple(sequences))


def units(lengths: Iterable[Sequence[int]], seed: int = 0) -> list[Unit]:
    return [unit(of_one, 1000 * seed + number) for number, of_one in enumerate(lengths)]


def batches(units: Sequence[Unit | None], of: StepEngine | int = TOKENS) -> list[Pass]:
    """A logical batch of these units in an engine's passes, or in those of so many tokens."""
    return passes_of(range(len(units)), units, packing(of) if isinstance(of, int) else of.packing, 0)


def clipped_sum(engine: StepEngine, units: Sequence[Unit | None], of: int | None = None) -> Tensor:
    return engine.clipped_sum(batches(units, engine if of is None else of))[0].double().cpu()


def norms(engine: StepEngine, passed: Pass) -> Tensor:
    """norm_U as the engine measures it."""
    sum_P = torch.zeros(engine.size, dtype=torch.float64)
    return engine._clipper.add(engine.losses, passed, sum_P, 1.0, 2.0**-30)[1]


def engine_norm(engine: StepEngine, unit: Unit, tokens: int) -> float:
    """A unit's norm as the engine measures it, in one pass or several."""
    sum_P, norm_U = torch.zeros(engine.size, dtype=torch.float64, device=engine._device), torch.zeros(0)
    for piece in batches([unit], tokens):
        _, norm_U = engine._clipper.add(engine.losses, piece.to(engine._device), sum_P, 1.0, 2.0**-30)
    return float(norm_U)


def released(engine: StepEngine, some_batches: Sequence[Pass]) -> Tensor:
    """What one step hands to the optimizer, times B, in float64; the weights stay as they were."""
    seen: list[Tensor] = []
    for group in engine._optimizer.param_groups:
        group["lr"] = 0.0

    def look(*_: Any) -> None:
        seen.append(torch.cat([p.grad.flatten() for p in engine.parameters.values() if p.grad is not None]))

    handle = engine._optimizer.register_step_pre_hook(look)
    engine.step(some_batches)
    handle.remove()
    return seen[0].double() * engine._schedule.expected_batch_size


def brute_force(net: nn.Module, units: Sequence[Unit]) -> Tensor:
    """gradient_UP in float64, one sequence at a time, unpadded; ends an engine on ``net``."""
    gradient_RP = _one_by_one(net, [row for unit in units for row in unit.sequences])
    owners = torch.tensor([index for index, unit in enumerate(units) for _ in unit.sequences])
    return gradient_RP.new_zeros(len(units), gradient_RP.shape[1]).index_add_(0, owners, gradient_RP)


def _one_by_one(net: nn.Module, rows: Iterable[TokenSequence]) -> Tensor:
    if net in _engines:
        _engines.pop(net).close()  # a copy would take the hooks along, but not what they need
    exact = copy.deepcopy(net).double()
    if hasattr(exact, "set_experts_implementation"):
        exact.set_experts_implementation("eager")  # grouped products know no float64
    device, parameters, gradients_RP = next(exact.parameters()).device, list(trainable(exact).values()), []
    for row in rows:
        ids = torch.tensor([row.input_ids], device=device)
        logits = exact(input_ids=ids, use_cache=False).logits[0]
        scores = functional.log_softmax(logits.double(), dim=-1)
        targets = [place for place, learned in enumerate(row.loss_mask) if learned]
        loss = -sum(scores[t - 1, ids[0, t]] for t in targets) / row.denominator
        gradients = torch.autograd.grad(loss, parameters)
        gradients_RP.append(torch.cat([gradient.double().flatten() for gradient in gradients]))
    return torch.stack(gradients_RP).cpu()


class Toy(nn.Module):
    """A language model in one page, to break in chosen ways: embedding, a trainable layer, a frozen head."""

    def __init__(self, hidden: int = 8, vocabulary: int = VOCABULARY, *, bias: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(vocabulary, hidden)
        self.layer = nn.Linear(hidden, hidden, bias=bias)
        self.head = nn.Linear(hidden, vocabulary, bias=False)
        self.embed.requires_grad_(False)
        self.head.requires_grad_(False)

    def hidden(self, x_RTd: Tensor) -> Tensor:
        return self.layer(x_RTd)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, use_cache: bool = False) -> Any:
        return SimpleNamespace(logits=self.head(self.hidden(self.embed(input_ids))))


class Made(Toy):
    """A toy whose hidden states ``make`` makes of the toy and of the embedded tokens."""

    def __init__(self, make: Callable[[Any, Tensor], Tensor], **arguments: Any) -> None:
        super().__init__(**arguments)
        self.hidden = partial(make, self)  # type: ignore[method-assign]


class Packed(Made):
    """Has no attention, so that a pass of many rows can run it."""

    _supports_attention_backend = True

    def forward(self, input_ids: Tensor, position_ids: Any = None, use_cache: bool = False) -> Any:
        return super().forward(input_ids)


class Cancelling(Toy):
    """Of two tokens that alternate, activations s u + v and s u + w, backprops +b and -b: terms s times their sum."""

    def __init__(self, scale: float, hidden: int = 4) -> None:
        super().__init__(hidden)
        self.signs = nn.Parameter(torch.tensor([1.0, -1.0]).repeat(MAX_LENGTH // 2), requires_grad=False)
        with torch.no_grad():
            direction = torch.randn(hidden, generator=torch.Generator().manual_seed(7))
            noise = torch.randn(VOCABULARY, hidden, generator=torch.Generator().manual_seed(8))
            self.embed.weight.copy_(scale * direction + noise)
            self.layer.weight.zero_()
            self.head.weight[10] = self.head.weight[9]

    def hidden(self, x_RTd: Tensor) -> Tensor:
        return self.layer(x_RTd) * self.signs[: x_RTd.shape[1], None]


def replace_token(sequence: TokenSequence, position: int, token: int) -> TokenSequence:
    ids = [*sequence.input_ids]
    ids[position] = token
    return TokenSequence(tuple(ids), sequence.loss_mask, sequence.denominator)


def constant_unit(length: int, token: int) -> Unit:
    """One token again and again, all of it learned."""
    return Unit((TokenSequence((token,) * length, (False,) + (True,) * (length - 1), length - 1),))


def alternating_unit(length: int) -> Unit:
    """Tokens 9 and 10 in turn, all of them learned: what ``Cancelling`` needs."""
    ids = tuple(9 + position % 2 for position in range(length))
    return Unit((TokenSequence(ids, (False,) + (True,) * (length - 1), length - 1),))
