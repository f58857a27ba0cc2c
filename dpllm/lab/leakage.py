"""Gradient leakage: which tokens a party that sees one step's gradient could read out of it.

Comes in: a model with LoRA, a Plan, token sequences; or a recipe. Goes out: how well their tokens are found in the raw, the
clipped and the noised gradient of the first adapters, and what no reconstruction can exceed. The sequences are read by the
attack and no text leaves it, but the figures depend on them: computed from private text, they are private.

Shape suffixes: K candidate tokens, L positions, D inputs of a layer, G rows of a gradient, P trainable coordinates.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from scipy import special
from torch import Tensor, nn

from dpllm.errors import ConfigError
from dpllm.lab import span
from dpllm.lab.replay import Watched, plain_gradient
from dpllm.privacy import limits
from dpllm.privacy.noise import key_bits, os_entropy
from dpllm.privacy.plan import Plan
from dpllm.privacy.sampling import PhysicalBatch, collate
from dpllm.recipe.config import CanaryConfig, LoraConfig, RunConfig
from dpllm.text.data import TokenSequence, Unit

if TYPE_CHECKING:
    from rich.table import Table

PRIORS = (1e-6, 1e-4, 1e-2)
CANDIDATES = 2000
"""Tokens of the vocabulary that are ranked beside those of the batch."""
STEP = 1e-2
NUM_TEXTS = 8
"""Artificial sentences in the batch of a recipe's audit."""
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
    """How well the tokens of the batch are told from other tokens of the vocabulary.

    Attributes:
        span_auc: Rank AUC of how much of a token's input lies in the gradient's row space; 0.5 is chance.
        span_recall: Share of the batch's tokens among the b highest, b being their number.
        energy_auc: The same of the length of the gradient times the input, which noise in all directions hides less.
        energy_recall: See ``span_recall``.
    """

    span_auc: float
    span_recall: float
    energy_auc: float
    energy_recall: float


@dataclass(frozen=True)
class Reconstruction:
    """What no reconstruction of a unit can exceed, for an adversary whose prior guess is right with probability ``prior``.

    Attributes:
        prior: kappa.
        one_step: Phi(Phi^-1(kappa) + mu) for one step that the unit is known to be in, mu = 1 / sigma.
        run: Of the whole run, the smallest e^epsilon kappa + delta of the epsilons that the Plan states.
        run_gaussian: Phi(Phi^-1(kappa) + mu) with the Plan's summary ``gdp_mu``; no proof, see ``privacy.limits``.
    """

    prior: float
    one_step: float
    run: float
    run_gaussian: float | None


@dataclass(frozen=True)
class LeakageReport:
    """What one gradient gives away.

    Attributes:
        layers: The adapters whose gradients were read: those that see the first block's normed embeddings.
        tokens: b, distinct tokens that have part in the loss (token and position, where the model adds positions there).
        rank_limit: The largest rank of these gradients together: their rows, or the layer's width. With b above it, their
            span is smaller than that of the inputs, or all tokens lie in it, and the span check must err.
        gradient_rank: Numerical rank of the raw gradient.
        candidates: Tokens that were ranked, those of the batch among them.
        first_step_norm: Norm of the raw gradient of A where B was still zero; None where B had moved already.
        raw: From the gradient as it is.
        clipped: From the clipped sum without noise: clipping is no defence.
        noised: From what the engine releases.
        signal_to_noise: Norm of the clipped sum over the expected norm of the noise.
        reconstruction: See ``Reconstruction``.
        statement: When this adversary matters.
    """

    layers: tuple[str, ...]
    tokens: int
    rank_limit: int
    gradient_rank: int
    candidates: int
    first_step_norm: float | None
    raw: Recovery
    clipped: Recovery
    noised: Recovery
    signal_to_noise: float
    reconstruction: tuple[Reconstruction, ...]
    statement: str = STATEMENT

    def to_json(self) -> dict[str, Any]:
        """The report as a JSON value."""
        values = asdict(self)
        return {**values, "layers": list(self.layers), "reconstruction": list(values["reconstruction"])}


def gradient_leakage(
    net: nn.Module,
    plan: Plan,
    sequences: Sequence[TokenSequence],
    *,
    grad_sample_mode: str = "auto",
    entropy: int | Sequence[int] | None = None,
) -> LeakageReport:
    """Attacks the gradient of one batch of sequences, each of them a unit, alone in its logical batch.

    The span check of DAGER on LoRA: dA = sum over tokens of (B^T delta) x^T, so its rows lie in the span of the inputs x,
    and in the first block x depends on nothing but the token (and its position). The adapters that read the same x are
    taken together. Where B is zero it is first moved as one step of Adam would, by ``STEP`` in every entry; the model is
    put back afterwards.

    Args:
        net: With LoRA adapters on the first block, in training mode, without an engine on it.
        plan: The clipping function, C and sigma.
        sequences: At least one, each with a target.
        grad_sample_mode: How the engine computes.
        entropy: Seeds noise and the choice of candidates, for tests; None: the operating system.

    Raises:
        ConfigError: No adapter reads the first block's normed embeddings, or no sequence has a target.
        Refused: The engine refuses the model.

    References:
        Petrov et al. 2024, DAGER: Exact Gradient Inversion for Large Language Models (the span check). Balle, Cherubin
        and Hayes 2022, Reconstructing Training Data with Informed Adversaries; Hayes et al. 2023, Bounding Training Data
        Reconstruction in DP-SGD (the bounds).
    """
    torch.set_float32_matmul_precision("highest")
    units = [Unit((sequence,)) for sequence in sequences if any(sequence.loss_mask)]
    if not units:
        raise ConfigError("no sequence has a target token, so there is no gradient. Give sequences with loss_mask.")
    trained = {name: p for name, p in net.named_parameters() if p.requires_grad}
    batch = collate(units, pad_id=0).to(next(net.parameters()).device)
    layers = span.first_adapters(net, batch)
    generator = np.random.default_rng(entropy)
    with _restored(trained):
        first_norm = _leave_zero(net, trained, layers, batch)
        raw_P = _flat(plain_gradient(net, list(trained.values()), batch))
        key = os_entropy() if entropy is None else int.from_bytes(generator.bytes(key_bits(False) // 8), "little")
        watched = Watched(net, plan, key, grad_sample_mode=grad_sample_mode, max_length=batch.input_ids_RT.shape[1])
        try:
            sum_P, released_P, _ = watched.step([batch])
        finally:
            watched.engine.close()
        clipped_P = sum_P[: len(released_P)].cpu()
        noised_P = released_P.cpu() * plan.schedule.expected_batch_size
        sigma = plan.adaptive.gradient_noise_multiplier if plan.adaptive else plan.noise_multiplier
        noise_norm = plan.max_grad_norm * sigma * math.sqrt(len(raw_P))
        raw, clipped, noised = (_rows(vector, trained, layers) for vector in (raw_P, clipped_P, noised_P))
        positional = span.positional(net, layers[0], batch)
        members, count = span.tokens_of(units, positional)
        tokens = span.choose_candidates(members, span.vocabulary_of(net), CANDIDATES, generator)
        scores = span.span_scores(
            net, layers[0], tokens, batch.input_ids_RT.shape[1] if positional else 1, (raw, clipped, noised)
        )
    member_K = np.isin(tokens, sorted(members))
    found = [Recovery(*span.ranked(span_K, member_K), *span.ranked(energy_K, member_K)) for span_K, energy_K in scores]
    return LeakageReport(
        layers=tuple(layers),
        tokens=count,
        rank_limit=min(raw.shape),
        gradient_rank=len(span.row_space(raw)),
        candidates=len(tokens),
        first_step_norm=first_norm,
        raw=found[0],
        clipped=found[1],
        noised=found[2],
        signal_to_noise=float(clipped_P.norm()) / noise_norm,
        reconstruction=tuple(reconstruction_bound(plan, prior) for prior in PRIORS),
    )


def audit_leakage(config: RunConfig, plan: Plan | None = None) -> LeakageReport:
    """Attacks one gradient of a recipe's model, on artificial sentences: no private text is read.

    Args:
        config: With LoRA and ``privacy.enabled``.
        plan: The promise of a run; None: the one that the recipe makes.

    Raises:
        ConfigError: The recipe makes no promise or has no LoRA; and see ``gradient_leakage``.
        Refused: The Plan cannot be made, or the engine refuses the model.
    """
    from dpllm.canaries import canaries
    from dpllm.lab import mechanism
    from dpllm.model import loading
    from dpllm.text import data

    if not config.privacy.enabled or not isinstance(config.adapter, LoraConfig):
        raise ConfigError(
            "the attack compares a clipped and noised gradient of LoRA with the raw one, and this recipe has no such "
            "gradient. Audit a recipe with adapter.method: lora and privacy.enabled: true."
        )
    plan = plan or mechanism.recipe_plan(config)
    tokenizer = loading.load_tokenizer(config.model)
    drawn = canaries.plan_canaries(CanaryConfig(groups={1: NUM_TEXTS}, references=100))
    rows = [data.encode(one.example("text"), "text", tokenizer, config.data.max_length, "truncate")
            for one in drawn.canaries]  # fmt: skip
    net = loading.build(config, torch.device("cpu")).train()
    loading.without_dropout(net)
    return gradient_leakage(net, plan, [row[0] for row in rows], grad_sample_mode=config.privacy.grad_sample_mode)


def reconstruction_bound(plan: Plan, prior: float) -> Reconstruction:
    """See ``Reconstruction``; ``prior`` in (0, 1)."""
    group = plan.max_examples_per_unit or 1 if plan.sampling == "example" else 1
    found = plan.limits or limits.attacker_limits_of(plan.event, plan.neighbouring_relation)
    stated = [(plan.delta, plan.epsilon), *((delta, epsilon) for delta, epsilon in plan.curve if epsilon is not None)]
    run = min((math.exp(min(epsilon, 700.0)) * prior + delta for delta, epsilon in stated), default=1.0)
    mu = found.get("gdp_mu")
    return Reconstruction(
        prior,
        _shifted(prior, group / plan.noise_multiplier),
        min(1.0, run),
        None if mu is None else _shifted(prior, mu),
    )


def table(report: LeakageReport) -> Table:
    """A report for the terminal."""
    from rich.table import Table

    title = f"Gradient leakage: {report.tokens} tokens, rank {report.rank_limit} at most"
    result = Table("gradient", "AUC, span", "recall", "AUC, energy", "recall", title=title, caption=report.statement)
    for name in ("raw", "clipped", "noised"):
        seen: Recovery = getattr(report, name)
        result.add_row(
            name,
            f"{seen.span_auc:.3f}",
            f"{seen.span_recall:.3f}",
            f"{seen.energy_auc:.3f}",
            f"{seen.energy_recall:.3f}",
        )
    chance = min(1.0, report.tokens / report.candidates)
    result.add_row("chance", "0.500", f"{chance:.3f}", "0.500", f"{chance:.3f}")
    result.add_section()
    for one in report.reconstruction:
        step = f"at most {one.one_step:.3g} from one noised gradient"
        result.add_row(f"a guess right with {one.prior:g}", step, "", f"{one.run:.3g} from the whole run", "")
    return result


def _flat(gradients: Sequence[Tensor]) -> Tensor:
    return torch.cat([gradient.detach().flatten() for gradient in gradients]).double().cpu()


def _leave_zero(
    net: nn.Module, trained: dict[str, nn.Parameter], layers: list[str], batch: PhysicalBatch
) -> float | None:
    """Where B is zero, the norm of dA there; then B is moved against the sign of its gradient, as Adam's first step."""
    second = {name: p for name, p in trained.items() if ".lora_B." in f".{name}"}
    if any(bool(p.detach().any()) for p in second.values()):
        return None
    gradients = plain_gradient(net, list(trained.values()), batch)
    norm = float(_rows(_flat(gradients), trained, layers).norm())
    with torch.no_grad():
        for (name, parameter), gradient in zip(trained.items(), gradients, strict=True):
            if name in second:
                parameter.sub_(STEP * gradient.sign())
    return norm


def _rows(vector_P: Tensor, trained: dict[str, nn.Parameter], layers: list[str]) -> Tensor:
    """gradient_GD of the layers' weights, one below the other."""
    parts = dict(zip(trained, torch.split(vector_P, [p.numel() for p in trained.values()]), strict=True))
    return torch.cat([parts[f"{name}.weight"].view_as(trained[f"{name}.weight"]) for name in layers])


@contextlib.contextmanager
def _restored(trained: dict[str, nn.Parameter]) -> Iterator[None]:
    before = {name: parameter.detach().clone() for name, parameter in trained.items()}
    try:
        yield
    finally:
        with torch.no_grad():
            for name, parameter in trained.items():
                parameter.copy_(before[name])


def _shifted(prior: float, mu: float) -> float:
    return float(special.ndtr(special.ndtri(prior) + mu))
