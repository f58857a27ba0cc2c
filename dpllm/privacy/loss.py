"""Per-example loss, each example divided by its own tokens only; from logits, or without them where the head is frozen.

Comes in: a model and physical batches. Goes out: the losses of tokens and of sequences. ``outputs.loss`` of transformers is a
mean over the tokens of the whole batch, which couples examples: with it, one long neighbour moved the clipped sum by 2.2 C.

Only targets are computed on, those of one row at a time, so that no product has a shape that follows another row. Logits of
the model's own precision are held once, and what is wider, or longer than a chunk, never exists.

Where the output head is frozen, its ``forward`` is, for the time of one call of the model, a function that returns nll_RT1 where
R T V logits would stand. It computes a few targets' logits at a time, and at once the gradient of their losses with respect to
the hidden state, (softmax - one-hot) W, which is kept until the backward pass multiplies it by what comes in. So a weight that
is sharded or offloaded is needed in the forward pass only.

Shape suffixes: R sequences, T tokens, d hidden size, V vocabulary, N targets, n targets of one chunk, M = R T positions.

References:
    Hsu et al. 2024, Liger Kernel (gradients of a fused loss in the forward pass; there of a mean over the batch).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional

from dpllm.errors import Refused
from dpllm.privacy.sampling import PhysicalBatch

CHUNK = {"cuda": 2**26}  # numbers of a chunk's logits; public, and the same for every batch
CHUNK_ELSEWHERE = 2**25  # fewer make products slow on a CPU, more make nothing faster (measured)
WITHOUT_PRODUCTS = 8  # the part of it that is computed on at once where logits exist: what fits a cache is faster
# A softmax over a large vocabulary is below what float16 resolves; a power of two moves it there without rounding.
FLOAT16_SCALE = 256.0
TOLERANCE, LOW_PRECISION_TOLERANCE = 1e-3, 5e-2  # of the self-check too
PROBE = 4  # rows and tokens of the batch on which the two ways are compared

Autocast = Callable[[], contextlib.AbstractContextManager[Any]]


class Targets(NamedTuple):
    """What a batch of R rows of T tokens has to predict, and from where."""

    rows: int
    tokens: int
    count_R: list[int]  # how many targets each row has
    position_N: Tensor  # where each is predicted, counted over all rows: one before the target
    target_N: Tensor  # the token to predict

    @classmethod
    def of(cls, input_ids_RT: Tensor, loss_mask_RT: Tensor) -> Targets:
        """Reads them off the masks, which are True where a token is a target; position 0 never is."""
        rows, tokens = input_ids_RT.shape
        if input_ids_RT.is_meta:  # shapes without values: as many as there can be
            position_N = torch.arange(rows * tokens, device=input_ids_RT.device)
            return cls(rows, tokens, [tokens] * rows, position_N, input_ids_RT.flatten())
        position_N = functional.pad(loss_mask_RT[:, 1:], (0, 1)).flatten().nonzero().flatten()
        count_R = loss_mask_RT[:, 1:].sum(dim=1).tolist()
        return cls(rows, tokens, count_R, position_N, input_ids_RT.flatten()[position_N + 1])

    def chunks(self, vocabulary: int, parts: int = 1) -> Iterator[tuple[Tensor, Tensor, slice]]:
        """(position_n, target_n, where among N): the targets of one row, in parts no longer than the vocabulary allows."""
        size = max(1, chunk_tokens(vocabulary, self.position_N.device) // parts)
        first = 0
        for count in self.count_R:
            for start in range(first, first + count, size):
                part = slice(start, min(start + size, first + count))
                yield self.position_N[part], self.target_N[part], part
            first += count

    def check(self, shape: torch.Size) -> None:
        """Refuses what has not one vector for each of R x T positions."""
        if shape[:-1] != (self.rows, self.tokens):
            raise Refused(
                f"the model returned {tuple(shape[:-1])} positions for {(self.rows, self.tokens)} tokens, so positions cannot "
                "be matched to tokens. Use a base model without virtual tokens and without packing."
            )


def chunk_tokens(vocabulary: int, device: torch.device) -> int:
    """Targets whose logits are computed on at once: at least 1."""
    return max(1, CHUNK.get(device.type, CHUNK_ELSEWHERE) // vocabulary)


def wide(dtype: torch.dtype) -> torch.dtype:
    """In which losses are computed: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def sequence_losses(logits_RTV: Tensor, input_ids_RT: Tensor, loss_mask_RT: Tensor, denominator_R: Tensor) -> Tensor:
    """Negative log-likelihood of each sequence's targets over its example's number of targets, whose chunks add up to the mean.

    Returns:
        loss_R in nats, float32, or float64 for float64 logits. Row r depends on row r of the inputs alone (in low
        precision, up to rounding).

    Raises:
        Refused: There is not one vector of logits for each token.
    """
    return example_means(token_losses(logits_RTV, Targets.of(input_ids_RT, loss_mask_RT)), denominator_R)


def token_losses(logits_RTV: Tensor, targets: Targets) -> Tensor:
    """nll_RT in nats, zero where no target is predicted; infinities and nan that stand there play no part."""
    targets.check(logits_RTV.shape)
    nll_M: Tensor = _FromLogits.apply(logits_RTV.flatten(0, 1), targets)  # type: ignore[no-untyped-call]
    return nll_M.view(targets.rows, targets.tokens)


def example_means(nll_RT: Tensor, denominator_R: Tensor) -> Tensor:
    """loss_R: the sum over a row's positions, divided by the number of targets of its own example."""
    return nll_RT.sum(dim=1) / denominator_R


def log_likelihood_(logits_nV: Tensor, target_n: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """nll_n1, top_n1, total_n1; leaves exp(logits - top) in the place of the logits, and softmax is that over total."""
    top_n1 = logits_nV.amax(dim=1, keepdim=True)
    logits_nV.sub_(top_n1)
    chosen_n1 = logits_nV.gather(1, target_n.unsqueeze(1))
    total_n1 = logits_nV.exp_().sum(dim=1, keepdim=True)
    return total_n1.log() - chosen_n1, top_n1, total_n1


def minus_one_(softmax_nV: Tensor, target_n: Tensor) -> None:
    """From the softmax to the gradient of nll with respect to the logits, in place."""
    softmax_nV[torch.arange(len(target_n), device=target_n.device), target_n] -= 1.0


class _FromLogits(torch.autograd.Function):
    """nll_M from logits_MV; of the backward pass, only a maximum and a sum for each target is kept beside the logits."""

    @staticmethod
    def forward(ctx: Any, logits_MV: Tensor, targets: Targets) -> Tensor:
        nll_M = logits_MV.new_zeros(len(logits_MV), dtype=wide(logits_MV.dtype))
        top_N1 = nll_M.new_empty(len(targets.position_N), 1)
        total_N1 = torch.empty_like(top_N1)
        for position_n, target_n, part in targets.chunks(logits_MV.shape[1], WITHOUT_PRODUCTS):
            logits_nV = logits_MV[position_n].to(nll_M.dtype)
            nll_n1, top_N1[part], total_N1[part] = log_likelihood_(logits_nV, target_n)
            nll_M[position_n] = nll_n1.squeeze(1)
        ctx.save_for_backward(logits_MV, top_N1, total_N1)
        ctx.targets = targets
        return nll_M

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *incoming: Tensor) -> tuple[Tensor | None, ...]:
        logits_MV, top_N1, total_N1 = ctx.saved_tensors
        gradient_MV = torch.zeros_like(logits_MV)
        for position_n, target_n, part in ctx.targets.chunks(logits_MV.shape[1], WITHOUT_PRODUCTS):
            part_nV = logits_MV[position_n].to(top_N1.dtype).sub_(top_N1[part]).exp_().div_(total_N1[part])
            minus_one_(part_nV, target_n)
            gradient_MV[position_n] = part_nV.mul_(incoming[0][position_n].unsqueeze(1)).to(gradient_MV.dtype)
        return gradient_MV, None


class Tokens(NamedTuple):
    """What a model says of a batch."""

    nll_RT: Tensor  # negative log-likelihood in nats where a position predicts a target, zero elsewhere
    hit_RT: Tensor | None  # where a position predicts a target and gives it the highest logit; None if not asked for


class TokenLosses:
    """From a physical batch to its tokens' losses, through the model as it is.

    Guarantee:
        The loss of a token, and its gradient, are those of cross entropy over the model's logits, computed in float32
        (float64 for float64): nothing is approximated or left out. Row r is computed from row r of the batch alone, in
        products whose shape follows from row r alone.
    """

    def __init__(self, model: nn.Module, device: torch.device, autocast: Autocast = contextlib.nullcontext) -> None:
        """Looks at the model, in a forward pass of a few tokens that leaves no trace; on torch's meta device too."""
        self._model, self._autocast = model, autocast
        # The layer that hands on losses; None where logits are formed: it trains, carries an adapter, is quantised, or the
        # model does something to its logits (soft-capping, a scale).
        self.head = self._understood(device)

    def __call__(self, batch: PhysicalBatch, *, hits: bool = False) -> Tokens:
        """The losses of one physical batch and, if asked, where the target has the highest logit."""
        ids_RT, targets = batch.input_ids_RT, Targets.of(batch.input_ids_RT, batch.loss_mask_RT)
        head = self.head
        if head is None or _watched(head):
            with self._autocast():
                logits_RTV = self._run(ids_RT)
            nll_RT = token_losses(logits_RTV, targets)
            return Tokens(nll_RT, _hits(logits_RTV, targets) if hits else None)
        handed: list[tuple[Tensor, Tensor | None]] = []

        def hand_on(hidden_RTd: Tensor) -> Tensor:
            tokens = fused_losses(head, hidden_RTd, targets, hits=hits)
            # No view: FSDP2 hooks into what a module returns, and an operation in place on a view would lose the hook.
            handed.append((tokens.nll_RT.unsqueeze(-1).clone(), tokens.hit_RT))
            return handed[-1][0]

        with self._autocast(), _forward(head, hand_on):
            nll_RT1 = self._run(ids_RT)
        if len(handed) != 1 or nll_RT1 is not handed[0][0]:
            raise Refused(
                "the model no longer returns its output head's result unchanged, as it did when the engine was made, so the "
                "losses would be wrong. Do not change the model while it trains."
            )
        return Tokens(nll_RT1.squeeze(-1), handed[0][1])

    def _run(self, ids_RT: Tensor) -> Tensor:
        logits: Tensor = self._model(input_ids=ids_RT, use_cache=False).logits
        return logits

    def _understood(self, device: torch.device) -> nn.Linear | None:
        """The head, if the model returns the very tensor that it gets from it and both ways agree on a few tokens."""
        head = _plain_head(self._model)
        if head is None:
            return None
        seen: list[tuple[Tensor, int, bool]] = []

        def ordinary(hidden_RTd: Tensor) -> Tensor:
            logits_RTV = nn.Linear.forward(head, hidden_RTd)
            targets = Targets.of(ids_RT, torch.ones_like(ids_RT, dtype=torch.bool))
            seen.append((logits_RTV, logits_RTV._version, _agree(head, hidden_RTd, targets)))
            return logits_RTV

        with torch.inference_mode(False), torch.no_grad(), evaluating(self._model), self._autocast():
            ids_RT = torch.arange(PROBE * PROBE, device=device).view(PROBE, PROBE) % head.out_features
            with _forward(head, ordinary):
                returned = self._run(ids_RT)
        # The very tensor, with no change in place: then nothing was done to the logits.
        untouched = len(seen) == 1 and returned is seen[0][0] and returned._version == seen[0][1]
        return head if untouched and seen[0][2] else None


def fused_losses(head: nn.Linear, hidden_RTd: Tensor, targets: Targets, *, hits: bool = False) -> Tokens:
    """The losses of tokens from the input of a frozen head, without R T V logits.

    Held until the backward pass: d numbers for each target, in the precision of the products. Held for a moment: the
    logits of ``chunk_tokens`` targets.
    """
    targets.check(hidden_RTd.shape)
    needed = torch.is_grad_enabled() and hidden_RTd.requires_grad
    hidden_Md = hidden_RTd.flatten(0, 1)
    dtype = _product_dtype(hidden_Md)
    hit_M = torch.zeros(len(hidden_Md), dtype=torch.bool, device=hidden_Md.device) if hits else None
    weights = head.weight.detach().to(dtype), None if head.bias is None else head.bias.detach().to(dtype)
    nll_M: Tensor = _FromHidden.apply(hidden_Md, *weights, targets, hit_M, needed)  # type: ignore[no-untyped-call]
    shape = targets.rows, targets.tokens
    return Tokens(nll_M.view(shape), None if hit_M is None else hit_M.view(shape))


class _FromHidden(torch.autograd.Function):
    """nll_M from hidden_Md, with the gradient formed at once."""

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
        nll_M = hidden_Md.new_zeros(len(hidden_Md), dtype=wide(dtype))
        count = len(targets.position_N)
        gradient_Nd = weight_Vd.new_empty((count if needed else 0, weight_Vd.shape[1]))
        # One buffer for all chunks: allocating each anew would cost page faults on a CPU.
        rows = min(max(targets.count_R, default=0), chunk_tokens(vocabulary, hidden_Md.device))
        product_nV = weight_Vd.new_empty((rows, vocabulary))
        wide_nV = product_nV if wide(dtype) == dtype else product_nV.new_empty(product_nV.shape, dtype=wide(dtype))
        for position_n, target_n, part in targets.chunks(vocabulary):
            low_nV, high_nV = product_nV[: len(position_n)], wide_nV[: len(position_n)]
            torch.mm(hidden_Md[position_n].to(dtype), weight_Vd.T, out=low_nV)
            if bias_V is not None:
                low_nV += bias_V
            if high_nV.dtype != dtype:
                high_nV.copy_(low_nV)
            if hit_M is not None:
                hit_M[position_n] = high_nV.argmax(dim=1) == target_n
            nll_n1, _, total_n1 = log_likelihood_(high_nV, target_n)
            nll_M[position_n] = nll_n1.squeeze(1)
            if not needed:
                continue
            high_nV.div_(total_n1)
            minus_one_(high_nV, target_n)
            if high_nV.dtype != dtype:
                low_nV.copy_(high_nV.mul_(scale))
            torch.mm(low_nV, weight_Vd, out=gradient_Nd[part])
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
        return gradient_Md, None, None, None, None, None


def _product_dtype(hidden: Tensor) -> torch.dtype:
    """In which a linear layer multiplies here: autocast leaves float64 alone."""
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
    """Somebody's hooks expect logits; those of sharding do not care."""
    return bool(head._forward_hooks or head._forward_pre_hooks) and not isinstance(head, FSDPModule)


def _agree(head: nn.Linear, hidden_RTd: Tensor, targets: Targets) -> bool:
    """Losses and gradients of both ways are the same, on this device and in this precision."""
    if hidden_RTd.shape[:-1] != (targets.rows, targets.tokens):
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
        found_RT = fused_losses(head, leaf_RTd, targets).nll_RT
        (gradient_RTd,) = torch.autograd.grad(found_RT.sum(), leaf_RTd)
    tolerance = LOW_PRECISION_TOLERANCE if logits_RTV.dtype.itemsize < 4 else TOLERANCE
    pairs = (found_RT.flatten()[targets.position_N], nll_N), (gradient_RTd, expected_RTd)
    return all(bool((one - other).norm() <= tolerance * other.norm()) for one, other in pairs)


def _hits(logits_RTV: Tensor, targets: Targets) -> Tensor:
    logits_MV = logits_RTV.flatten(0, 1)
    hit_M = torch.zeros(len(logits_MV), dtype=torch.bool, device=logits_MV.device)
    for position_n, target_n, _ in targets.chunks(logits_MV.shape[1]):
        hit_M[position_n] = logits_MV[position_n].argmax(dim=1) == target_n
    return hit_M.view(targets.rows, targets.tokens)


@contextlib.contextmanager
def _forward(layer: nn.Module, forward: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Another forward for the time of the block; hooks, wrappers and sharding around it stay."""
    layer.forward = forward
    try:
        yield
    finally:
        del layer.forward


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode for the time of the block: no dropout, no running averages."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
