"""Per-example losses, each divided by the example's own tokens only; from logits, or without them if the head is frozen.

Comes in: a model and passes. Goes out: the losses of tokens and of rows. ``outputs.loss`` of transformers is a
mean over the tokens of the whole batch, which couples examples: with it, one long neighbour moved the clipped sum by 2.2 C.

Only targets are computed, in packs of a fixed public size, so the shape of a product does not depend on a row. Logits are held
once, in the model's precision; wider copies never exceed a pack.

If the output head is frozen, its ``forward`` is replaced during one call of the model by a function that returns one loss instead
of V logits. It computes a few targets' logits at a time, and immediately the gradient of their losses with respect to the hidden
state, (softmax - one-hot) W, which the backward pass multiplies by the incoming gradient. So a sharded or offloaded weight is
needed in the forward pass only.

Shape suffixes: R rows, T tokens, d hidden size, V vocabulary, N targets, n targets of one pack, M = R T positions.

References:
    Hsu et al. 2024, Liger Kernel (gradients of a fused loss in the forward pass; there of a mean over the batch).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional

from dpllm.errors import Refused
from dpllm.privacy import guards
from dpllm.privacy.packing import Pass, Segment, Targets

CHUNK = {"cuda": 2**26}  # numbers in a chunk of logits; public, and the same for every batch
CHUNK_ELSEWHERE = 2**25  # fewer slow down products on a CPU, more are no faster (measured)
BLOCK = 32  # numbers that an elementwise kernel handles at a time
MOST_TARGETS = {"cpu": 128}  # more in one product are no faster, and the last pack is rarely full
MOST_TARGETS_ELSEWHERE = 1024
WITHOUT_PRODUCTS = 8  # parts of a pack that are computed one by one if logits exist: a part fits the cache
# Softmax values over a large vocabulary underflow float16; scaling by a power of two avoids it without rounding.
FLOAT16_SCALE = 256.0
TOLERANCE, LOW_PRECISION_TOLERANCE = 1e-3, 5e-2  # also those of the self-check
PROBE = 4  # rows and tokens of the batch on which both methods are compared

Autocast = Callable[[], contextlib.AbstractContextManager[Any]]
ExampleLoss = Callable[[Tensor, Pass], Tensor]  # from the losses of a pass's tokens to its examples' losses


def pack_of(vocabulary: int, device: torch.device) -> int:
    """Number of targets whose logits are computed at a time: public, and the same for every pass."""
    fits = CHUNK.get(device.type, CHUNK_ELSEWHERE) // vocabulary
    block = _block(vocabulary, device)
    return block * max(1, min(MOST_TARGETS.get(device.type, MOST_TARGETS_ELSEWHERE), fits) // block)


def _block(vocabulary: int, device: torch.device) -> int:
    """Number of targets with which threads share whole blocks of numbers: partial blocks use other instructions."""
    threads = torch.get_num_threads() if device.type == "cpu" else 1
    return threads * BLOCK // math.gcd(BLOCK, vocabulary)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of losses: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def likelihood(nll_M: Tensor, batch: Pass) -> Tensor:
    """loss_R of a pass: each row's loss divided by the target tokens of its whole example; one zero without rows."""
    nll_R = row_sums(nll_M, batch.rows)
    return nll_R / batch.denominator_R if batch.rows else nll_R


def token_losses(logits_RTV: Tensor, targets: Targets) -> Tensor:
    """nll_M in nats, zero where no target is predicted; infinities and nan in such logits are ignored."""
    _check_shape(logits_RTV, targets)
    nll_M: Tensor = _FromLogits.apply(logits_RTV.flatten(0, 1), targets)  # type: ignore[no-untyped-call]
    return nll_M


def row_sums(nll_M: Tensor, rows: Sequence[Segment]) -> Tensor:
    """nll_R: the sum over each row's own positions, in a shape that depends on the row alone; one zero without rows."""
    if not rows:
        return nll_M[:1] * 0.0
    lengths = [row.stop - row.start for row in rows]
    # Copies start at aligned addresses: kernels would handle an unaligned start separately.
    return torch.stack([piece_L.clone().sum() for piece_L in torch.split(nll_M[: sum(lengths)], lengths)])


def _check_shape(values: Tensor, targets: Targets) -> None:
    """Refuses output that does not have one vector for each position."""
    if values.shape[:-1] != targets.shape:
        raise Refused(
            f"the model returned {tuple(values.shape[:-1])} positions for {targets.shape} tokens, so positions cannot be matched "
            "to tokens. Use a base model without virtual tokens and without packing of its own."
        )


def _packs(targets: Targets, size: int) -> Iterator[tuple[Tensor, Tensor, slice]]:
    """(position_n, target_n, slice of N), ``size`` at a time."""
    for start in range(0, len(targets.position_N), size):
        part = slice(start, start + size)
        yield targets.position_N[part], targets.target_N[part], part


def log_likelihood_(logits_nV: Tensor, target_n: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """nll_n1, top_n1, total_n1; replaces the logits by exp(logits - top), which divided by total is the softmax."""
    top_n1 = logits_nV.amax(dim=1, keepdim=True)
    logits_nV.sub_(top_n1)
    chosen_n1 = logits_nV.gather(1, target_n.unsqueeze(1))
    total_n1 = logits_nV.exp_().sum(dim=1, keepdim=True)
    return total_n1.log() - chosen_n1, top_n1, total_n1


def minus_one_(softmax_nV: Tensor, target_n: Tensor) -> None:
    """Turns the softmax into the gradient of nll with respect to the logits, in place."""
    with guards.distinct():
        softmax_nV[torch.arange(len(target_n), device=target_n.device), target_n] -= 1.0


class _FromLogits(torch.autograd.Function):
    """nll_M from logits_MV; besides the logits, the backward pass needs only a maximum and a sum for each target."""

    @staticmethod
    def forward(ctx: Any, logits_MV: Tensor, targets: Targets) -> Tensor:
        nll_M = logits_MV.new_zeros(len(logits_MV), dtype=wide(logits_MV.dtype))
        top_N1 = nll_M.new_empty(len(targets.position_N), 1)
        total_N1 = torch.empty_like(top_N1)
        for position_n, target_n, part in _packs(targets, _at_once(targets, logits_MV)):
            logits_nV = logits_MV[position_n].to(nll_M.dtype)
            nll_n1, top_N1[part], total_N1[part] = log_likelihood_(logits_nV, target_n)
            nll_M[position_n] = nll_n1.squeeze(1)
        nll_M[-1] = 0.0  # padding of a pack has no target
        ctx.save_for_backward(logits_MV, top_N1, total_N1)
        ctx.targets = targets
        return nll_M

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *incoming: Tensor) -> tuple[Tensor | None, ...]:
        logits_MV, top_N1, total_N1 = ctx.saved_tensors
        gradient_MV = torch.zeros_like(logits_MV)
        for position_n, target_n, part in _packs(ctx.targets, _at_once(ctx.targets, logits_MV)):
            part_nV = logits_MV[position_n].to(top_N1.dtype).sub_(top_N1[part]).exp_().div_(total_N1[part])
            minus_one_(part_nV, target_n)
            gradient_MV[position_n] = part_nV.mul_(incoming[0][position_n].unsqueeze(1)).to(gradient_MV.dtype)
        gradient_MV[-1] = 0
        return gradient_MV, None


def _at_once(targets: Targets, logits_MV: Tensor) -> int:
    """Rows of logits that fit the cache: equal parts of a pack."""
    blocks, remainder = divmod(targets.pack, _block(logits_MV.shape[1], logits_MV.device))
    if remainder:
        return targets.pack
    return targets.pack // max(parts for parts in range(1, WITHOUT_PRODUCTS + 1) if blocks % parts == 0)


class Tokens(NamedTuple):
    """Losses of a batch's tokens."""

    nll_M: Tensor  # negative log-likelihood in nats where a position predicts a target, zero elsewhere
    hit_M: Tensor | None  # whether a position predicts a target and gives it the highest logit; None if not requested


class TokenLosses:
    """Computes the losses of a pass's tokens through the model as it is.

    Guarantee:
        The loss of a token, and its gradient, are those of cross entropy over the model's logits, computed in float32
        (float64 for float64): nothing is approximated or left out. A row is computed from that row alone.
    """

    def __init__(self, model: nn.Module, device: torch.device, autocast: Autocast = contextlib.nullcontext) -> None:
        """Inspects the model in a forward pass of a few tokens that changes nothing; also works on torch's meta device."""
        self._model, self._autocast = model, autocast
        # The layer that returns losses. None if logits are needed: the head trains, has an adapter, is quantised, or the model
        # changes its logits (soft-capping, a scale).
        self.head = self._understood(device)

    def __call__(self, batch: Pass, *, hits: bool = False) -> Tokens:
        """The losses of one pass and, with ``hits``, where the target has the highest logit."""
        head, targets = self.head, batch.targets
        if head is None or _watched(head):
            with self._autocast():
                logits_RTV = self._run(batch.input_ids_1M, batch.position_ids_1M)
            nll_M = token_losses(logits_RTV, targets)
            return Tokens(nll_M, _hits(logits_RTV, targets) if hits else None)
        handed: list[tuple[Tensor, Tensor | None]] = []

        def hand_on(hidden_RTd: Tensor) -> Tensor:
            tokens = fused_losses(head, hidden_RTd, targets, hits=hits)
            # Not a view: FSDP2 hooks into a module's output, and an in-place operation on a view would lose the hook.
            handed.append((tokens.nll_M.view(*targets.shape, 1).clone(), tokens.hit_M))
            return handed[-1][0]

        with self._autocast(), _forward(head, hand_on):
            nll_RT1 = self._run(batch.input_ids_1M, batch.position_ids_1M)
        if len(handed) != 1 or nll_RT1 is not handed[0][0]:
            raise Refused(
                "the model no longer returns its output head's result unchanged, as it did when the engine was made, so its "
                "losses would be wrong. Do not change the model while it trains."
            )
        return Tokens(nll_RT1.flatten(), handed[0][1])

    def _run(self, ids_RT: Tensor, position_RT: Tensor | None = None) -> Tensor:
        places = {} if position_RT is None else {"position_ids": position_RT}
        logits: Tensor = self._model(input_ids=ids_RT, use_cache=False, **places).logits
        return logits

    def _understood(self, device: torch.device) -> nn.Linear | None:
        """The head, if the model returns the head's output tensor itself and both methods agree on a few tokens."""
        head = _plain_head(self._model)
        if head is None:
            return None
        calls: list[tuple[Tensor, int, bool]] = []

        def ordinary(hidden_RTd: Tensor) -> Tensor:
            logits_RTV = nn.Linear.forward(head, hidden_RTd)
            targets = _all_targets(ids_RT)
            calls.append((logits_RTV, logits_RTV._version, _agree(head, hidden_RTd, targets)))
            return logits_RTV

        with torch.inference_mode(False), in_eval_mode(self._model), self._autocast():
            ids_RT = torch.arange(PROBE * PROBE, device=device).view(PROBE, PROBE) % head.out_features
            with _forward(head, ordinary):
                returned = self._run(ids_RT)
        # The same tensor without in-place changes: the model did nothing to the logits.
        untouched = len(calls) == 1 and returned is calls[0][0] and returned._version == calls[0][1]
        return head if untouched and calls[0][2] else None


def fused_losses(head: nn.Linear, hidden_RTd: Tensor, targets: Targets, *, hits: bool = False) -> Tokens:
    """The losses of tokens from the input of a frozen head, without R T V logits.

    Holds d numbers for each target until the backward pass, in the precision of the products, and temporarily the logits of one
    pack of targets.
    """
    _check_shape(hidden_RTd, targets)
    needed = torch.is_grad_enabled() and hidden_RTd.requires_grad
    hidden_Md = hidden_RTd.flatten(0, 1)
    dtype = _product_dtype(hidden_Md)
    hit_M = torch.zeros(len(hidden_Md), dtype=torch.bool, device=hidden_Md.device) if hits else None
    weights = head.weight.detach().to(dtype), None if head.bias is None else head.bias.detach().to(dtype)
    nll_M: Tensor = _FromHidden.apply(hidden_Md, *weights, targets, hit_M, needed)  # type: ignore[no-untyped-call]
    return Tokens(nll_M, hit_M)


def _all_targets(ids_RT: Tensor) -> Targets:
    """All tokens but the first of each row, as targets."""
    rows, tokens = ids_RT.shape
    position_N = torch.arange(rows * tokens, device=ids_RT.device).view(rows, tokens)[:, :-1].flatten()
    return Targets((rows, tokens), len(position_N), position_N, ids_RT.flatten()[position_N + 1], len(position_N))


class _FromHidden(torch.autograd.Function):
    """nll_M from hidden_Md; forms the gradient in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_Md: Tensor,
        weight_Vd: Tensor,
        bias_V: Tensor | None,
        targets: Targets,
        hit_M: Tensor | None,
        needed: bool,
    ) -> Tensor:
        dtype, vocabulary = weight_Vd.dtype, len(weight_Vd)
        scale = FLOAT16_SCALE if dtype == torch.float16 else 1.0
        nll_N = hidden_Md.new_empty(len(targets.position_N), dtype=wide(dtype))
        count, size = len(targets.position_N), targets.pack
        gradient_Nd = weight_Vd.new_empty((count if needed else 0, weight_Vd.shape[1]))
        # One buffer for all chunks: new allocations would cost page faults on a CPU.
        product_nV = weight_Vd.new_empty((min(size, count), vocabulary))
        wide_nV = product_nV if wide(dtype) == dtype else product_nV.new_empty(product_nV.shape, dtype=wide(dtype))
        for position_n, target_n, part in _packs(targets, size):
            low_nV, high_nV = product_nV[: len(position_n)], wide_nV[: len(position_n)]
            torch.mm(hidden_Md[position_n].to(dtype), weight_Vd.T, out=low_nV)
            if bias_V is not None:
                low_nV += bias_V
            if high_nV.dtype != dtype:
                high_nV.copy_(low_nV)
            if hit_M is not None:
                hit_M[position_n] = high_nV.argmax(dim=1) == target_n
            nll_n1, _, total_n1 = log_likelihood_(high_nV, target_n)
            nll_N[part] = nll_n1.squeeze(1)
            if not needed:
                continue
            high_nV.div_(total_n1)
            minus_one_(high_nV, target_n)
            if high_nV.dtype != dtype:
                low_nV.copy_(high_nV.mul_(scale))
            torch.mm(low_nV, weight_Vd, out=gradient_Nd[part])
        nll_M = nll_N.new_zeros(len(hidden_Md))
        nll_M[targets.position_N] = nll_N
        nll_M[-1] = 0.0  # padding of a pack has no target
        if hit_M is not None:
            hit_M[-1] = False
        ctx.save_for_backward(gradient_Nd, targets.position_N)
        ctx.like, ctx.scale = hidden_Md.new_empty(0), scale
        ctx.positions = len(hidden_Md)
        return nll_M

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *incoming: Tensor) -> tuple[Tensor | None, ...]:
        gradient_Nd, position_N = ctx.saved_tensors
        gradient_Md = ctx.like.new_zeros((ctx.positions, gradient_Nd.shape[1]))
        factor_N1 = (incoming[0][position_N] / ctx.scale).unsqueeze(1)
        gradient_Md[position_N] = (gradient_Nd * factor_N1).to(gradient_Md.dtype)
        gradient_Md[-1] = 0
        return gradient_Md, None, None, None, None, None


def _product_dtype(hidden: Tensor) -> torch.dtype:
    """The dtype in which a linear layer multiplies here; autocast does not change float64."""
    kind = hidden.device.type
    if kind == "meta" or hidden.dtype == torch.float64 or not torch.is_autocast_enabled(kind):
        return hidden.dtype
    return torch.get_autocast_dtype(kind)


def _plain_head(model: nn.Module) -> nn.Linear | None:
    """The output head, if it is frozen and an ordinary linear layer with an ordinary forward."""
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    plain = isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward and "forward" not in vars(head)
    return head if plain and not any(p.requires_grad for p in head.parameters()) else None


def _watched(head: nn.Linear) -> bool:
    """Whether hooks of others expect logits; those of sharding do not."""
    return bool(head._forward_hooks or head._forward_pre_hooks) and not isinstance(head, FSDPModule)


def _agree(head: nn.Linear, hidden_RTd: Tensor, targets: Targets) -> bool:
    """Whether losses and gradients of both methods agree, on this device and in this precision."""
    if hidden_RTd.shape[:-1] != targets.shape:
        return False
    if hidden_RTd.is_meta:
        return True
    with torch.enable_grad():
        leaf_RTd = hidden_RTd.detach().clone().requires_grad_()
        logits_RTV = nn.Linear.forward(head, leaf_RTd)
        nll_N = functional.cross_entropy(
            logits_RTV.to(wide(logits_RTV.dtype)).flatten(0, 1)[targets.position_N], targets.target_N, reduction="none"
        )
        (expected_RTd,) = torch.autograd.grad(nll_N.sum(), leaf_RTd)
        found_M = fused_losses(head, leaf_RTd, targets).nll_M
        (gradient_RTd,) = torch.autograd.grad(found_M.sum(), leaf_RTd)
    tolerance = LOW_PRECISION_TOLERANCE if logits_RTV.dtype.itemsize < 4 else TOLERANCE
    pairs = (found_M[targets.position_N], nll_N), (gradient_RTd, expected_RTd)
    return all(bool((value - reference).norm() <= tolerance * reference.norm()) for value, reference in pairs)


def _hits(logits_RTV: Tensor, targets: Targets) -> Tensor:
    logits_MV = logits_RTV.flatten(0, 1)
    hit_M = torch.zeros(len(logits_MV), dtype=torch.bool, device=logits_MV.device)
    for position_n, target_n, _ in _packs(targets, _at_once(targets, logits_MV)):
        hit_M[position_n] = logits_MV[position_n].argmax(dim=1) == target_n
    hit_M[-1] = False
    return hit_M


@contextlib.contextmanager
def _forward(layer: nn.Module, forward: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Replaces ``forward`` within the block; hooks, wrappers and sharding around it stay."""
    layer.forward = forward
    try:
        yield
    finally:
        del layer.forward


@contextlib.contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Disables gradients, dropout and running averages; afterwards every module is in its earlier mode."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        # Not inference_mode: weights that a sharded model first gathers under it could not be used in a backward pass.
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True
