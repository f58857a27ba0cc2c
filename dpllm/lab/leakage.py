"""Gradient leakage: which tokens a party that sees one step's gradient could read out of it.

Comes in: a recipe; or a model with LoRA, a Plan and token sequences. Goes out: how well their tokens are found in the raw,
the clipped and the noised gradient of the first adapters, and what no reconstruction can exceed. No text leaves it, but the
figures depend on the sequences: computed from private text, they are private.

Shape suffixes: R rows of a batch, K candidate tokens, L positions, D inputs of a layer, G rows of a gradient, P trainable
coordinates.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.table import Table
from scipy import special
from torch import Tensor, nn

from dpllm.auditing.statistics import placements
from dpllm.canaries import canaries
from dpllm.errors import ConfigError
from dpllm.model import loading
from dpllm.privacy.engine import StepEngine
from dpllm.privacy.loss import sequence_losses
from dpllm.privacy.noise import GaussianNoise
from dpllm.privacy.plan import Plan
from dpllm.privacy.rules import Form, Mode
from dpllm.privacy.sampling import PhysicalBatch, collate
from dpllm.privacy.stream import KEY_BITS
from dpllm.recipe.audit import CanaryConfig
from dpllm.recipe.config import LoraConfig, RunConfig
from dpllm.run.promise import plan_before_any_run
from dpllm.text import data
from dpllm.text.data import TokenSequence, Unit

CPU = torch.device("cpu")
PRIORS = (1e-6, 1e-4, 1e-2)
CANDIDATES = 2000  # tokens of the vocabulary that are ranked beside those of the batch
STEP = 1e-2
NUM_TEXTS = 8  # artificial sentences in the batch of a recipe's audit
RANK_TOLERANCE = 1e-5  # of the largest singular value: what float32 leaves of a zero
SAME = 1e-4  # relative difference of two inputs that are the same
CHUNK = 2**24  # numbers of candidate inputs held at once
STATEMENT = (
    "This adversary sees the gradient of a step: a server in federated training, or anyone with whom gradients are shared. "
    "It does not matter for an adapter that is trained in one place and released: nobody sees gradients there, and the "
    "released weights are covered by the stated epsilon. Where gradients are shared, the noise must be in them before they "
    "leave. At the first step of LoRA the gradient of A is zero, since B is zero, so that nothing can be read from it; the "
    "gradient of B is not. Stronger attacks than this one exist: that it fails on a noised gradient shows little, and the "
    "bounds on reconstruction hold for all of them."
)


@dataclass(frozen=True)
class Recovery:
    """How well the tokens of the batch are told from other tokens by how much of their input lies in a gradient's row space."""

    span_auc: float  # 0.5 is chance
    span_recall: float  # share of the batch's b tokens among the b highest


@dataclass(frozen=True)
class Reconstruction:
    """What no reconstruction of a unit can exceed, for an adversary whose prior guess is right with probability ``prior``."""

    prior: float  # kappa
    one_step: float  # Phi(Phi^-1(kappa) + mu) for one step that the unit is known to be in, mu = 1 / sigma
    run: float  # of the whole run, the smallest e^epsilon kappa + delta of the epsilons that the Plan states


@dataclass(frozen=True)
class LeakageReport:
    """What one gradient gives away: as it is, clipped without noise (which is no defence), and as the engine releases it."""

    layers: tuple[str, ...]  # adapters whose gradients were read: those that see the first block's normed embeddings
    # b, distinct ones that have part in the loss (with their position, where the model adds positions there).
    tokens: int
    # The largest rank of these gradients together: their rows, or the layer's width. With b above it, their span is smaller
    # than that of the inputs, or all tokens lie in it, and the span check must err.
    rank_limit: int
    gradient_rank: int  # numerical, of the raw gradient
    candidates: int  # tokens that were ranked, those of the batch among them
    raw: Recovery
    clipped: Recovery
    noised: Recovery
    signal_to_noise: float  # norm of the clipped sum over the expected norm of the noise
    reconstruction: tuple[Reconstruction, ...]
    statement: str = STATEMENT


def audit_leakage(config: RunConfig, plan: Plan | None = None) -> LeakageReport:
    """Attacks one gradient of a recipe's model, on artificial sentences, under a run's Plan or the one that the recipe makes.

    Raises:
        ConfigError: The recipe makes no promise or has no LoRA; and see ``gradient_leakage``.
        Refused: The Plan cannot be made, or the engine refuses the model.
    """
    if not config.privacy.enabled or not isinstance(config.adapter, LoraConfig):
        raise ConfigError(
            "the attack compares a clipped and noised LoRA gradient with the raw one, which this recipe does not have. Audit a "
            "recipe with adapter.method: lora and privacy.enabled: true."
        )
    plan = plan or plan_before_any_run(config)
    tokenizer = loading.load_tokenizer(config.model)
    drawn = canaries.plan_canaries(CanaryConfig(groups={1: NUM_TEXTS}, references=100))
    how = config.data.model_copy(update={"long_examples": "truncate"})
    sequences = [data.encode(one.example("text"), "text", tokenizer, how)[0] for one in drawn.canaries]
    net = loading.build(config, CPU).train()
    loading.without_dropout(net)
    return gradient_leakage(net, plan, sequences, grad_sample_mode=config.privacy.grad_sample_mode)


def gradient_leakage(
    net: nn.Module,
    plan: Plan,
    sequences: Sequence[TokenSequence],
    *,
    grad_sample_mode: Mode = "auto",
    entropy: int | Sequence[int] | None = None,
) -> LeakageReport:
    """Attacks the gradient of one batch of sequences, each of them a unit, alone in its logical batch.

    The span check of DAGER on LoRA: dA = sum over tokens of (B^T delta) x^T, so its rows lie in the span of the inputs x,
    and in the first block x depends on nothing but the token (and its position). The adapters that read the same x are
    taken together. Where B is zero it is first moved as one step of Adam would, by ``STEP`` in every entry.

    Args:
        net: In training mode on the CPU, without an engine on it.
        plan: The clipping function, C and sigma.
        sequences: Each with a target.
        grad_sample_mode: How the engine computes.
        entropy: Seeds noise and the choice of candidates, for tests; None: the operating system.

    Raises:
        ConfigError: No adapter reads the first block's normed embeddings.
        Refused: The engine refuses the model.

    References:
        Petrov et al. 2024, DAGER: Exact Gradient Inversion for Large Language Models (the span check). Balle, Cherubin
        and Hayes 2022, Reconstructing Training Data with Informed Adversaries; Hayes et al. 2023, Bounding Training Data
        Reconstruction in DP-SGD (the bounds).
    """
    torch.set_float32_matmul_precision("highest")
    generator, batch = np.random.default_rng(entropy), collate([Unit((one,)) for one in sequences], pad_id=0)
    layers = _first_adapters(net, batch)
    _leave_zero(net, batch)
    gradient = plain_gradient(net, batch)
    noise = GaussianNoise(int.from_bytes(generator.bytes(KEY_BITS // 8), "little"), CPU)
    clipped_P, released_P = _step(net, plan, batch, Form(grad_sample_mode, 512), noise)
    raw_GD = _rows(gradient, layers)
    clipped_GD, noised_GD = (_rows(_split(vector_P, gradient), layers) for vector_P in (clipped_P, released_P))
    tokens, candidates, found = _find_tokens(net, layers[0], sequences, (raw_GD, clipped_GD, noised_GD), generator)
    sigma = plan.noise_multiplier
    return LeakageReport(
        tuple(layers),
        tokens=tokens,
        rank_limit=min(raw_GD.shape),
        gradient_rank=len(_row_space(raw_GD)),
        candidates=candidates,
        raw=found[0],
        clipped=found[1],
        noised=found[2],
        signal_to_noise=float(clipped_P.norm()) / (plan.max_grad_norm * sigma * math.sqrt(len(released_P))),
        reconstruction=tuple(reconstruction_bound(plan, prior) for prior in PRIORS),
    )


def plain_gradient(net: nn.Module, batch: PhysicalBatch) -> dict[str, Tensor]:
    """The gradient of the summed losses of a batch by each parameter that trains, by plain autograd."""
    trained = {name: p for name, p in net.named_parameters() if p.requires_grad}
    logits = net(input_ids=batch.input_ids_RT, use_cache=False).logits
    loss_R = sequence_losses(logits, batch.input_ids_RT, batch.loss_mask_RT, batch.denominator_R)
    found = torch.autograd.grad(loss_R.sum(), list(trained.values()), allow_unused=True)
    return {name: torch.zeros_like(p) if g is None else g for (name, p), g in zip(trained.items(), found, strict=True)}


def _step(net: nn.Module, plan: Plan, batch: PhysicalBatch, form: Form, noise: GaussianNoise) -> tuple[Tensor, Tensor]:
    """The engine's clipped sum, and what a step hands to the optimizer: the noised sum over the divisor. The weights stay."""
    optimizer, released = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.0), list[Tensor]()
    with contextlib.closing(StepEngine(net, optimizer, plan.schedule, plan, form=form, noise=noise)) as engine:
        summed_P, trained = engine.clipped_sum([batch])[0].double(), engine.parameters.values()
        optimizer.register_step_pre_hook(
            lambda *_: released.extend(p.grad.flatten() for p in trained if p.grad is not None)
        )
        engine.step([batch])
    return summed_P, torch.cat(released).double()


def reconstruction_bound(plan: Plan, prior: float) -> Reconstruction:
    """See ``Reconstruction``; ``prior`` in (0, 1)."""
    group = plan.max_examples_per_unit or 1 if plan.sampling == "example" else 1
    one_step = float(special.ndtr(special.ndtri(prior) + group / plan.noise_multiplier))
    stated = [(plan.delta, plan.epsilon), *((delta, epsilon) for delta, epsilon in plan.curve if epsilon is not None)]
    run = min(math.exp(min(epsilon, 700.0)) * prior + delta for delta, epsilon in stated)
    return Reconstruction(prior, one_step, min(1.0, run))


def table(report: LeakageReport) -> Table:
    """A report for the terminal."""
    title = f"Gradient leakage: {report.tokens} tokens, rank {report.rank_limit} at most"
    result = Table("gradient", "AUC of the span check", "recall", title=title, caption=report.statement)
    for name, seen in (("raw", report.raw), ("clipped", report.clipped), ("noised", report.noised)):
        result.add_row(name, f"{seen.span_auc:.3f}", f"{seen.span_recall:.3f}")
    result.add_row("chance", "0.500", f"{min(1.0, report.tokens / report.candidates):.3f}")
    result.add_section()
    for one in report.reconstruction:
        step = f"at most {one.one_step:.3g} from one noised gradient"
        result.add_row(f"a guess right with {one.prior:g}", step, f"{one.run:.3g} from the whole run")
    return result


# What the first adapters read.


def _first_adapters(net: nn.Module, batch: PhysicalBatch) -> list[str]:
    """Names of the A matrices that read what the first adapter reads, if that depends on single tokens."""
    adapters: dict[str, nn.Module] = {
        name: module
        for name, module in net.named_modules()
        if isinstance(module, nn.Linear) and ".lora_A." in f".{name}" and module.weight.requires_grad
    }
    if not adapters:
        raise ConfigError(
            "the model has no LoRA adapter whose first factor trains, so the span check has no gradient to read. Use "
            "adapter.method: lora and adapter.lora_a: trained."
        )
    seen = _inputs(net, adapters, batch.input_ids_RT)
    first = next(iter(seen))
    other_ids = batch.input_ids_RT.clone()
    other_ids[:, 0] = (other_ids[:, 0] == 0).long()  # token 1 for 0, and 0 for any other
    if not _same(seen[first][:, 1:], _input(net, first, other_ids)[:, 1:]):
        raise ConfigError(
            f"{first} reads tokens that attention has mixed, so the span check of the first block does not apply. Put adapters "
            "on the first block's attention: adapter.target_modules: auto."
        )
    return [name for name, input in seen.items() if input.shape == seen[first].shape and _same(input, seen[first])]


class _SeenAll(Exception):
    """The rest of a forward pass is not needed."""


def _inputs(net: nn.Module, layers: dict[str, nn.Module], ids: Tensor) -> dict[str, Tensor]:
    """What each layer reads, in the order of the calls, without dropout."""
    seen: dict[str, Tensor] = {}

    def look(name: str, module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        seen.setdefault(name, arguments[0].detach().float())
        if len(seen) == len(layers):
            raise _SeenAll

    handles = [layer.register_forward_pre_hook(partial(look, name)) for name, layer in layers.items()]
    training = net.training
    net.eval()
    try:
        with torch.no_grad(), contextlib.suppress(_SeenAll):
            net(input_ids=ids, use_cache=False)
    finally:
        net.train(training)
        for handle in handles:
            handle.remove()
    return seen


def _input(net: nn.Module, layer: str, ids: Tensor) -> Tensor:
    return _inputs(net, {layer: net.get_submodule(layer)}, ids)[layer]


def _same(one: Tensor, other: Tensor) -> bool:
    return float((one - other).norm()) <= SAME * max(float(one.norm()), 1e-30)


# Their gradients, and what they tell of tokens.


def _leave_zero(net: nn.Module, batch: PhysicalBatch) -> None:
    """Where B is zero, so is the gradient of A: B is moved against the sign of its gradient, as by Adam's first step."""
    second = {name: p for name, p in net.named_parameters() if p.requires_grad and ".lora_B." in f".{name}"}
    if not any(bool(p.detach().any()) for p in second.values()):
        gradient = plain_gradient(net, batch)
        with torch.no_grad():
            for name, parameter in second.items():
                parameter.sub_(STEP * gradient[name].sign())


def _rows(gradient: Mapping[str, Tensor], layers: list[str]) -> Tensor:
    """gradient_GD of the layers' weights, one below the other."""
    return torch.cat([gradient[f"{name}.weight"] for name in layers]).double()


def _split(vector_P: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    parts = torch.split(vector_P, [one.numel() for one in like.values()])
    return {name: part.view_as(like[name]) for name, part in zip(like, parts, strict=True)}


def _find_tokens(
    net: nn.Module,
    layer: str,
    sequences: Sequence[TokenSequence],
    gradients: Sequence[Tensor],
    generator: np.random.Generator,
) -> tuple[int, int, list[Recovery]]:
    """b, the number of candidates, and how well each gradient tells the batch's tokens from the others."""
    one, other = _input(net, layer, torch.tensor([sequences[0].input_ids[:1] * 2]))[0]
    positional = not _same(one, other)  # learned positions are added to the embedding
    members, count = _tokens_of(sequences, positional)
    embedding: Any = net.get_input_embeddings
    rest = np.setdiff1d(np.arange(embedding().weight.shape[0]), sorted(members))
    chosen = generator.choice(rest, min(CANDIDATES, len(rest)), replace=False)
    tokens_K = np.sort(np.concatenate([np.array(sorted(members)), chosen]))
    length = max(len(sequence.input_ids) for sequence in sequences) if positional else 1
    member_K, found = np.isin(tokens_K, sorted(members)), _span_scores(net, layer, tokens_K, length, gradients)
    return count, len(tokens_K), [_ranked(span_K, member_K) for span_K in found]


def _tokens_of(sequences: Sequence[TokenSequence], positional: bool) -> tuple[set[int], int]:
    """Tokens before the last target of their sequence, which alone have part in a loss; and b."""
    inputs = set()
    for sequence in sequences:
        last = max(position for position, target in enumerate(sequence.loss_mask) if target)
        inputs |= {(token, at if positional else 0) for at, token in enumerate(sequence.input_ids[:last])}
    return {token for token, _ in inputs}, len(inputs)


def _row_space(rows_GD: Tensor) -> Tensor:
    """An orthonormal basis of the span of the rows, by rows."""
    _, values, basis = torch.linalg.svd(rows_GD, full_matrices=False)
    kept: Tensor = basis[values > RANK_TOLERANCE * values.max()]
    return kept


def _span_scores(
    net: nn.Module, layer: str, tokens_K: NDArray[np.int64], length: int, gradients: Sequence[Tensor]
) -> list[NDArray[np.float64]]:
    """span_K for each gradient: how much of an input of length one lies in its row space; the best over positions."""
    bases = [_row_space(gradient_GD) for gradient_GD in gradients]
    found: list[list[Tensor]] = [[] for _ in bases]
    for chunk in torch.split(torch.tensor(tokens_K), max(1, CHUNK // (length * gradients[0].shape[1]))):
        input_KLD = _input(net, layer, chunk[:, None].expand(-1, length)).double()
        input_KLD = input_KLD / input_KLD.norm(dim=-1, keepdim=True).clamp(min=1e-30)
        for basis, scores in zip(bases, found, strict=True):
            scores.append((input_KLD @ basis.T).square().sum(dim=-1).amax(dim=1))
    return [torch.cat(scores).numpy() for scores in found]


def _ranked(score_K: NDArray[np.float64], member_K: NDArray[np.bool_]) -> Recovery:
    """Rank AUC with ties counted half, and the share of members among as many highest scores (ties at random)."""
    beaten_P, _ = placements(score_K[member_K], score_K[~member_K])
    order = np.lexsort((np.random.default_rng(0).permutation(len(score_K)), -score_K))
    return Recovery(float(beaten_P.mean()), float(member_K[order[: len(beaten_P)]].mean()))
