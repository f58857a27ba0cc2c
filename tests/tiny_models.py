"""What the tests of the mechanism share: tiny models as they train, units, Plans, and gradients by brute force.

The reference gradients here share no code with dpllm.privacy: each sequence runs alone, unpadded, through a float64 copy
of the model, and the loss is written out again.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import tiny
import torch
from torch import Tensor, nn
from torch.nn import functional

from dpllm import model as dpllm_model
from dpllm.config import RunConfig
from dpllm.data import TokenSequence, Unit
from dpllm.privacy.engine import Engine
from dpllm.privacy.plan import Plan, Schedule
from dpllm.privacy.sampling import physical_batches

VOCABULARY = 64
CPU = torch.device("cpu")
NO_DROPOUT = {"gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}, "opt": {"dropout": 0.0}}
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


def plan(max_grad_norm: float = 1.0, noise_multiplier: float = 1.0, of: Schedule | None = None) -> Plan:
    """A Plan with chosen C and sigma; its epsilon is not computed, because no test of the engine reads it."""
    return Plan(
        schedule=of or schedule(),
        unit="example",
        max_examples_per_unit=None,
        neighbouring_relation="zero_out",
        noise_multiplier=noise_multiplier,
        clipping="flat",
        max_grad_norm=max_grad_norm,
        delta=1e-3,
        epsilon=8.0,
        target_epsilon=8.0,
        accountant={},
        event={},
    )


def trainable(net: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in net.named_parameters() if p.requires_grad}


def build(
    family: str = "llama", adapter: dict[str, Any] = LORA, *, checkpointing: str | None = None, **changes: Any
) -> Any:
    """A tiny model made trainable by the product's own code, with no weight at zero (LoRA's B would hide its A)."""
    config = recipe(adapter=adapter)
    net = tiny.model(family, **{"vocab_size": VOCABULARY, **NO_DROPOUT.get(family, {}), **changes})
    net.requires_grad_(False)
    made: Any = config.adapter
    net = dpllm_model._add_lora(net, made, config) if made.method == "lora" else dpllm_model._unfreeze(net, made)
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for p in trainable(net).values():
            p.add_(0.1 * torch.randn(p.shape, generator=generator))
    if checkpointing:
        net.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": checkpointing == "reentrant"})
        if checkpointing == "reentrant":
            net.enable_input_require_grads()
    return net.train()


_engines: WeakKeyDictionary[nn.Module, Engine] = WeakKeyDictionary()


def make_engine(net: nn.Module, promise: Plan | None = None, **arguments: Any) -> Engine:
    """An engine in the place of the one before on this model; SGD of rate 1, so an update is minus what was released."""
    if net in _engines:
        _engines.pop(net).close()
    promise = promise or plan()
    settings: dict[str, Any] = {"grad_sample_mode": "auto", "noise_entropy": 2**100 + 7, "device": CPU, **arguments}
    optimizer = torch.optim.SGD(list(trainable(net).values()), lr=1.0)
    _engines[net] = Engine(net, optimizer, promise.schedule, promise, **settings)
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


def clipped_sum(engine: Engine, some: Sequence[Unit | None], size: int = 64) -> Tensor:
    batches = physical_batches(range(len(some)), some, size, pad_id=0)
    return engine.clipped_sum(batches)[0].double().cpu()


def norms(engine: Engine, batch: Any) -> Tensor:
    """norm_U as the engine measures it."""
    sums = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in engine.parameters.items()}
    return engine._summer.add(engine.losses, batch, sums, 1.0)[1]


def brute_force(net: nn.Module, some: Sequence[Unit]) -> Tensor:
    """gradient_UP in float64, one sequence at a time; ends an engine on ``net``."""
    if net in _engines:
        _engines.pop(net).close()  # a copy would take the hooks along, but not what they need
    exact = copy.deepcopy(net).double()
    device = next(exact.parameters()).device
    parameters = list(trainable(exact).values())
    rows = []
    for one in some:
        total = torch.zeros(sum(p.numel() for p in parameters), dtype=torch.float64, device=device)
        for sequence in one.sequences:
            ids = torch.tensor([sequence.input_ids], device=device)
            scores = functional.log_softmax(exact(input_ids=ids, use_cache=False).logits[0].double(), dim=-1)
            targets = [t for t, learned in enumerate(sequence.loss_mask) if learned]
            loss = -sum(scores[t - 1, sequence.input_ids[t]] for t in targets) / sequence.denominator
            gradients = torch.autograd.grad(loss, parameters)
            total += torch.cat([gradient.double().flatten() for gradient in gradients])
        rows.append(total)
    return torch.stack(rows).cpu()


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


def replace_token(sequence: TokenSequence, position: int, token: int) -> TokenSequence:
    ids = [*sequence.input_ids]
    ids[position] = token
    return TokenSequence(tuple(ids), sequence.loss_mask, sequence.denominator)


def constant_unit(length: int, token: int) -> Unit:
    """One token again and again, all of it learned."""
    return Unit((TokenSequence((token,) * length, (False,) + (True,) * (length - 1), length - 1),))


def loss_inputs(batch: Any) -> tuple[Tensor, Tensor, Tensor]:
    return batch.input_ids_RT, batch.loss_mask_RT, batch.denominator_R


def batches(some: Sequence[Unit | None], size: int = 64) -> list[Any]:
    return physical_batches(range(len(some)), some, size, pad_id=0)
