"""One step: losses -> backward -> clipped sum -> all-reduce -> noise -> update; and the check that it is exact.

Comes in: the model, what trains, the Plan (or only the Schedule, for a run without differential privacy), physical
batches. Goes out: an updated model. Nothing else may touch the gradients. This module must not know data sources, the
ledger or the recipe's other sections.

Shape suffixes: R sequences, U units, P trainable coordinates.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional

from dpllm.data import TokenSequence, Unit
from dpllm.errors import Refused
from dpllm.privacy.clipping import CLIPPERS, PlainSum
from dpllm.privacy.loss import sequence_losses
from dpllm.privacy.noise import GaussianNoise
from dpllm.privacy.plan import Plan, Schedule
from dpllm.privacy.sampling import PhysicalBatch, collate

FP16_LOSS_SCALE = 1024.0  # constant, so that no step depends on an overflow
SELF_CHECK_TOLERANCE = 1e-3
LOW_PRECISION_TOLERANCE = 5e-2


@dataclass(frozen=True)
class Diagnostics:
    """Un-noised facts about one step: private, never released.

    Attributes:
        loss: Mean loss of the units that this rank drew; nan for none.
        units: How many units this rank drew.
        clipped: How many of them were longer than max_grad_norm.
    """

    loss: float
    units: int
    clipped: int


class Engine:
    """Owns the backward pass and the update.

    Guarantee:
        With a Plan: every trainable coordinate is updated from (sum of clipped unit gradients + N(0, (sigma C)^2)) / B
        of this step and from nothing else that was computed from the data; also for an empty batch. The divisor B is the
        Plan's public expected batch size, never the realised one. On several ranks the sums are added, rank 0 adds the
        noise once, and every rank receives the same vector.

        Without a Plan: none.

    References:
        Abadi et al. 2016, algorithm 1.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        schedule: Schedule,
        plan: Plan | None,
        *,
        grad_sample_mode: str,
        noise_entropy: int,
        device: torch.device,
        autocast: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
        loss_scale: float = 1.0,
    ) -> None:
        """Hooks into the model.

        Args:
            model: On its device, in training mode; what trains has requires_grad and is float32.
            optimizer: Over exactly what trains.
            schedule: Gives the divisor.
            plan: Gives C and sigma; None for a run without differential privacy.
            grad_sample_mode: How clipped sums are computed.
            noise_entropy: 128 secret bits.
            device: Where gradients live.
            autocast: Makes the context of the forward pass.
            loss_scale: Constant power of two for fp16.

        Raises:
            Refused: The optimizer misses a trainable parameter or holds another, or one is not float32.
        """
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        in_optimizer = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if in_optimizer != {id(p) for p in self.parameters.values()}:
            raise Refused(
                "the optimizer does not hold exactly the trainable parameters, so that an update would escape the noise or "
                "a noised gradient be dropped. Build the optimizer from the parameters with requires_grad."
            )
        if low := [name for name, p in self.parameters.items() if p.dtype != torch.float32]:
            raise Refused(
                f"{low[0]} trains in {self.parameters[low[0]].dtype}; noise needs float32. Cast it with .float()."
            )
        self._model, self._optimizer, self._schedule, self._plan = model, optimizer, schedule, plan
        self._autocast, self._scale, self._device = autocast, loss_scale, device
        self._noise = GaussianNoise(noise_entropy, device)
        self._mode = grad_sample_mode
        self._norm_bound = plan.max_grad_norm if plan else float("inf")
        self._summer = self._make_summer(self._norm_bound)

    def _make_summer(self, norm_bound: float) -> Any:
        if self._plan is None:
            return PlainSum(self._model, self.parameters)
        # Gradients carry the loss scale until the sum is formed, so the bound carries it too.
        return CLIPPERS[self._mode](self._model, self.parameters, norm_bound * self._scale)

    def losses(self, batch: PhysicalBatch) -> Tensor:
        """loss_R of one physical batch, through the model as it trains."""
        with self._autocast():
            logits = self._model(
                input_ids=batch.input_ids_RT, attention_mask=batch.attention_mask_RT, use_cache=False
            ).logits
        return sequence_losses(logits, batch.input_ids_RT, batch.loss_mask_RT, batch.denominator_R)

    def _zeros(self) -> dict[str, Tensor]:
        # float64 until the noise is in: rounding a sum to float32 before it could move it by more than C * 1e-6.
        dtype = torch.float32 if self._plan is None else torch.float64
        return {name: torch.zeros_like(p, dtype=dtype) for name, p in self.parameters.items()}

    def clipped_sum(self, batches: Sequence[PhysicalBatch]) -> tuple[Tensor, Diagnostics]:
        """This rank's flat clipped sum over a logical batch, before noise: private.

        Returns:
            sum_P, in float64 if it was clipped, and diagnostics.
        """
        sums = self._zeros()
        loss, units, clipped = 0.0, 0, 0
        for batch in batches:
            on_device = batch.to(self._device)
            loss_R = self.losses(on_device)
            norm_U = self._summer.add(loss_R * self._scale, on_device, sums)
            loss += float(loss_R.detach().sum())
            units += batch.num_units
            clipped += int((norm_U > self._norm_bound * self._scale).sum())
        flat_P = torch.cat([total.flatten() for total in sums.values()]) / self._scale
        return flat_P, Diagnostics(loss / units if units else float("nan"), units, clipped)

    def step(self, batches: Sequence[PhysicalBatch]) -> Diagnostics:
        """One logical step: clipped sum, noise, update."""
        flat_P, diagnostics = self.clipped_sum(batches)
        self._apply(self._release(flat_P))
        return diagnostics

    def _release(self, flat_P: Tensor) -> Tensor:
        """Adds ranks together, adds noise once, divides by the public batch size."""
        ranks = distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
        if ranks:
            distributed.all_reduce(flat_P)
        if self._plan is not None and (not ranks or distributed.get_rank() == 0):
            deviation = self._plan.noise_multiplier * self._plan.max_grad_norm
            flat_P = flat_P + deviation * self._noise.draw(flat_P.numel())
        flat_P = flat_P.float()
        if ranks:
            distributed.broadcast(flat_P, src=0)
        return flat_P / self._schedule.expected_batch_size

    def _apply(self, released_P: Tensor) -> None:
        start = 0
        for parameter in self.parameters.values():
            parameter.grad = released_P[start : start + parameter.numel()].view_as(parameter)
            start += parameter.numel()
        self._optimizer.step()
        for parameter in self.parameters.values():
            parameter.grad = None

    def close(self) -> None:
        """Takes the hooks out of the model, so that it can be saved and used."""
        self._summer.close()

    def self_check(self, vocab_size: int, max_length: int, *, low_precision: bool = False) -> float:
        """Compares the engine with brute-force autograd over the same forward graph, on synthetic rows.

        Ragged rows of random tokens, never private ones, run through the real model; weights that start at zero (LoRA's
        B) are filled for the time of the check, because behind them every gradient would be zero and any engine right.

        Args:
            vocab_size: Tokens are drawn below this.
            max_length: Longest row allowed.
            low_precision: The forward pass is not float32; the tolerance is then 5e-2.

        Returns:
            The largest relative error seen.

        Raises:
            Refused: Norms or clipped sums differ by more than the tolerance, or rows influence each other's loss; names
                the layer.
        """
        if self._plan is None:
            return 0.0
        tolerance = LOW_PRECISION_TOLERANCE if low_precision else SELF_CHECK_TOLERANCE
        units = _synthetic_units(vocab_size, max_length, several=self._mode != "opacus_ghost")
        batch = collate(units, pad_id=0).to(self._device)
        with _filled(self.parameters.values()):
            self._check_coupling(units, batch, tolerance, max_length)
            return self._check_sum(batch, tolerance)

    def _check_coupling(self, units: Sequence[Unit], batch: PhysicalBatch, tolerance: float, max_length: int) -> None:
        training = [module for module in self._model.modules() if module.training]
        buffers = {name: buffer.clone() for name, buffer in self._model.named_buffers()}
        with torch.no_grad():
            self.losses(batch)  # in training mode, where running averages would move
            self._model.eval()
            alone = [collate([unit], pad_id=0).to(self._device) for unit in units]
            alone_R = torch.cat([self.losses(one) for one in alone])
            together_R = self.losses(batch)
            padded_R = self.losses(_padded(alone[-1], self._longest(max_length)))  # as a long neighbour would pad it
        for module in training:
            module.training = True
        for name, buffer in self._model.named_buffers():
            if not torch.equal(buffer, buffers[name]):
                raise Refused(
                    f"the buffer {name} changes in a forward pass, so that one row would change the gradients of others, "
                    "unclipped. Running averages and dynamic or long-context RoPE do this: use another base model, or a "
                    "data.max_length within the context that the base model was pretrained on."
                )
        alone_R, together_R = torch.cat([alone_R, alone_R[-len(padded_R) :]]), torch.cat([together_R, padded_R])
        error = float(((together_R - alone_R).abs() / alone_R.abs().clamp(min=1e-3)).max())
        if not error <= tolerance:
            raise Refused(
                f"the loss of a row changes by {error:.1e} (relative) with the rows beside it, so clipping could not bound "
                "what one unit does. Batch norm, capacity-limited experts and padding-free attention do this: use another "
                "base model or attention."
            )

    def _longest(self, max_length: int) -> int:
        config: Any = getattr(self._model, "config", None)
        if config is None or getattr(config, "rope_parameters", None):
            return max_length
        # A table of positions ends; rows beyond it fail by themselves.
        return min(max_length, getattr(config, "max_position_embeddings", None) or max_length)

    def _check_sum(self, batch: PhysicalBatch, tolerance: float) -> float:
        # C between the norms, so that some units are clipped and others are not. Found on one graph, used on the same.
        self._summer.close()
        probe = self._make_summer(1.0)
        try:
            loss_R = self.losses(batch)
            hooks = probe._hooks
            hooks.disable_hooks()
            brute_UP = []
            for unit in range(batch.num_units):
                for parameter in self.parameters.values():
                    parameter.grad = None
                loss_R[batch.unit_R == unit].sum().backward(retain_graph=True)  # type: ignore[no-untyped-call]
                grads = [(torch.zeros_like(p) if p.grad is None else p.grad) for p in self.parameters.values()]
                brute_UP.append(torch.cat([g.double().flatten() for g in grads]))
                for parameter in self.parameters.values():
                    parameter.grad = None
            gradient_UP = torch.stack(brute_UP)
            norm_U = gradient_UP.norm(dim=1)
            bound = float(norm_U.median()) * 1.01
            probe.set_max_grad_norm(bound * self._scale)
            expected_P = (bound / norm_U).clamp(max=1.0) @ gradient_UP
            sums = self._zeros()
            hooks.enable_hooks()
            seen_U = probe.add(loss_R * self._scale, batch, sums) / self._scale
        finally:
            probe.close()
            self._summer = self._make_summer(self._norm_bound)
        worst = float(((seen_U.double() - norm_U).abs() / norm_U).max())
        if not worst <= tolerance:
            self._blame(sums, expected_P, tolerance)
            raise Refused(f"self-check: per-unit gradient norms are off by {worst:.1e} (relative).{_ADVICE}")
        return max(worst, self._blame(sums, expected_P, tolerance))

    def _blame(self, sums: dict[str, Tensor], expected_P: Tensor, tolerance: float) -> float:
        """Largest relative error of a parameter's clipped sum; raises naming the worst."""
        start, errors = 0, {}
        floor = 1e-3 * float(expected_P.norm())  # some gradients (a key bias) are zero but for rounding
        for name, total in sums.items():
            part = expected_P[start : start + total.numel()]
            start += total.numel()
            difference = float((total.double().flatten() / self._scale - part).norm())
            errors[name] = difference / max(float(part.norm()), floor)
        name = max(errors, key=lambda key: errors[key] if errors[key] == errors[key] else float("inf"))
        if not errors[name] <= tolerance:
            raise Refused(f"self-check: the clipped sum of {name} is off by {errors[name]:.1e} (relative).{_ADVICE}")
        return errors[name]


_ADVICE = (
    " Its gradient does not come from one ordinary call of its layer (a tied weight, a fused kernel, a layer called with "
    "another layout), so that clipping would not bound it. Do not train this layer: change adapter.target_modules or "
    "adapter.last_blocks."
)


def _synthetic_units(vocab_size: int, max_length: int, *, several: bool) -> list[Unit]:
    generator = torch.Generator().manual_seed(20161024)
    units = []
    for lengths in [(11, 6), (17,), (4,), (9,)] if several else [(11,), (17,), (4,), (9,)]:
        sequences = []
        for wanted in lengths:
            length = max(2, min(wanted, max_length))
            ids = torch.randint(0, vocab_size, (length,), generator=generator).tolist()
            mask = (False, *(position >= length // 3 for position in range(1, length)))
            sequences.append(TokenSequence(tuple(ids), mask, sum(mask)))
        units.append(Unit(tuple(sequences)))
    return units


def _padded(batch: PhysicalBatch, length: int) -> PhysicalBatch:
    extra = (0, max(0, length - batch.input_ids_RT.shape[1]))
    return replace(
        batch,
        input_ids_RT=functional.pad(batch.input_ids_RT, extra),
        attention_mask_RT=functional.pad(batch.attention_mask_RT, extra),
        loss_mask_RT=functional.pad(batch.loss_mask_RT, extra),
    )


@contextlib.contextmanager
def _filled(parameters: Any) -> Iterator[None]:
    """Small random values in every parameter that is zero, for the time of the block."""
    zeros = [p for p in parameters if not bool(p.detach().any())]
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in zeros:
            p.copy_(0.02 * torch.randn(p.shape, generator=generator).to(p.device))
    try:
        yield
    finally:
        with torch.no_grad():
            for p in zeros:
                p.zero_()
