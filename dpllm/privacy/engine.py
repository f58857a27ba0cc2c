"""One step: losses -> backward -> clipped sum -> all-reduce -> noise -> update.

Comes in: the model with its trainable parameters, the Plan (or only the Schedule, without differential privacy), passes. Goes
out: an updated model. Nothing else may touch the gradients.

Shape suffixes: R rows, U units, P trainable coordinates.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from accelerate.optimizer import AcceleratedOptimizer
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from dpllm.errors import NotBatchInvariant, Refused
from dpllm.privacy import guards
from dpllm.privacy.attention import RowAttention
from dpllm.privacy.clipping import PerUnitClipper, refuse_foreign_gradients
from dpllm.privacy.gradient_canaries import GradientCanaries
from dpllm.privacy.loss import LOW_PRECISION_TOLERANCE, TOLERANCE, Autocast, ExampleLoss, TokenLosses, likelihood
from dpllm.privacy.noise import BandedNoise, GaussianNoise, noise_scale, spacing_of
from dpllm.privacy.packing import Pass
from dpllm.privacy.plan import Plan
from dpllm.privacy.reference import Subject
from dpllm.privacy.schedule import Packing, Schedule
from dpllm.privacy.selfcheck import Checked, self_check
from dpllm.progress import heard_by, tell

FP16_LOSS_SCALE = 1024.0  # constant, so that no step depends on an overflow
STEP = "This step"  # the name for ``progress.tell``
EXACT = 2.0**52  # float64 adds up to this many multiples of the spacing exactly, with one bit to spare


@dataclass(frozen=True)
class Diagnostics:
    """Un-noised figures of one step: private, never released."""

    loss_sum: float  # of this rank's units
    units: int
    clipped: int  # how many of their gradients were longer than max_grad_norm
    norm_sum: float = math.nan  # of their gradients; nan without clipping
    clipped_by_layer: tuple[int, ...] = ()  # see PerUnitClipper

    @property
    def loss(self) -> float:
        """Mean loss of the units; nan for none."""
        return self.loss_sum / self.units if self.units else math.nan

    @property
    def norm(self) -> float:
        """Mean norm of their gradients, before clipping; nan for none."""
        return self.norm_sum / self.units if self.units else math.nan


class StepEngine:
    """Owns the backward pass and the update.

    Guarantee:
        With a Plan: every trainable coordinate is updated from (sum of clipped unit gradients + N(0, s^2)) / B of this step and
        from nothing else that was computed from the data, even for an empty batch. s is sigma times the most that one unit can
        move the sum on its lattice (``noise_scale``), so the release is a post-processing of the Gaussian mechanism
        (``GaussianNoise``; with the Plan's ``coefficients``, ``BandedNoise``). B is the Plan's public expected batch size, never
        the realised one. On several ranks, rank 0 adds the noise once, to its own sum; the all-reduce is exact, so the total has
        the same bits for any number of ranks. Without a Plan: none.

    References:
        Abadi et al. 2016, algorithm 1.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        schedule: Schedule,
        plan: Plan | None,
        packing: Packing,
        *,
        noise: GaussianNoise,
        autocast: Autocast = contextlib.nullcontext,
        loss_scale: float = 1.0,
    ) -> None:
        """Hooks into the model.

        Args:
            model: On its device, in training mode; trainable parameters have requires_grad and are float32.
            optimizer: Over exactly the trainable parameters.
            schedule: Gives the divisor B.
            plan: None for a run without differential privacy.
            packing: Public shape of the passes; ``repack`` changes it.
            noise: Keyed by secret bits, on the gradients' device.
            autocast: Makes the context of the forward pass.
            loss_scale: Constant power of two for fp16.

        Raises:
            Refused: The optimizer misses a trainable parameter or holds another; one is not float32; a trainable layer has no
                rule; model or optimizer is wrapped by accelerate's or torch's data parallelism; or the noise is too small for the
                batch, or too large for the number of coordinates, to be added exactly.
        """
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        _check_arguments(model, optimizer, self.parameters)
        self._model, self._optimizer, self._schedule, self._plan = model, optimizer, schedule, plan
        self._scale, self._device, self.packing = loss_scale, noise.device, packing
        self._noise = BandedNoise(noise, plan.coefficients) if plan and plan.coefficients else noise
        self._adapters = [layer for layer in model.modules() if isinstance(layer, BaseTunerLayer)]
        for layer in self._adapters:
            layer._cast_input_dtype = partial(_cast_outside_autocast, layer)
        self._token_losses, self._attention = TokenLosses(model, self._device, autocast), RowAttention(model)
        self.generator = noise.generator  # the noise's generator
        self.canaries: GradientCanaries | None = None  # added to the sum; only on the rank that adds noise
        self.projections: Tensor | None = None  # (M,): the last step's noisy release along them, over C
        self.example_loss: ExampleLoss = likelihood
        self._stepping = False
        self.size = sum(parameter.numel() for parameter in self.parameters.values())  # P
        self._noise_scale = noise_scale(plan.noise_multiplier, plan.max_grad_norm, self.size) if plan else 0.0
        self._spacing = spacing_of(self._noise_scale) if plan else 1.0
        if plan is not None:
            self._check_exact(plan)
        self._clipper = self._make_clipper()
        self._guard = optimizer.register_step_pre_hook(self._only_released) if plan else None

    @property
    def max_grad_norm(self) -> float:
        """C, for which the noise is calibrated; infinite without a Plan."""
        return self._plan.max_grad_norm if self._plan else float("inf")

    def _check_exact(self, plan: Plan) -> None:
        """Refuses noise that could not be added exactly to the sum."""
        batch = self._schedule.expected_batch_size
        largest = 2 * batch + 400  # a Poisson draw exceeds it with probability below 1e-40
        if largest * plan.max_grad_norm > EXACT * self._spacing:
            raise Refused(
                f"a noise multiplier of {plan.noise_multiplier:g} is too small for batches of {batch} units: the noise could "
                "not be added to their sum exactly. Raise the noise, or lower train.batch_size."
            )

    def _make_clipper(self) -> PerUnitClipper | None:
        return self._clipper_of(self._plan.clipping) if self._plan else None

    def _clipper_of(self, clipping: str) -> PerUnitClipper:
        units, held = self.packing.most_units, self.packing.held_numbers
        return PerUnitClipper(self._model, self.parameters, most_units=units, held_numbers=held, clipping=clipping)

    def repack(self, packing: Packing) -> None:
        """Changes the shape of passes."""
        self.packing = packing
        if self._clipper is not None:
            self._clipper.close()
            self._clipper = self._make_clipper()

    def losses(self, batch: Pass) -> Tensor:
        """The loss of each example of a pass, through the model as it trains."""
        return self.example_loss(self._token_losses(batch).nll_M, batch)

    def clipped_sum(self, batches: Sequence[Pass], canaries: Sequence[int] = ()) -> tuple[Tensor, Diagnostics]:
        """This rank's flat clipped sum over its part of a logical batch and the drawn gradient canaries, before noise; private.

        Returns:
            sum_P, which with clipping is float64 in multiples of the lattice's spacing, and diagnostics.
        """
        clipper = self._clipper
        dtype = torch.float32 if clipper is None else torch.float64
        flat_P = torch.zeros(self.size, dtype=dtype, device=self._device)
        losses: list[Tensor] = []
        norms: list[Tensor] = []
        units, bound, spacing = 0, self.max_grad_norm, self._spacing
        if clipper is not None:
            clipper.start()
        if batches and batches[-1].goes_on:
            raise Refused(
                "the logical batch ends in the middle of a unit, which would stay unclipped. Run all of its batches."
            )
        for done, batch in enumerate(batches):
            tell(STEP, done, len(batches), note=f"{units} units")
            on_device = batch.to(self._device)
            with guards.deterministic():
                if clipper is None:
                    loss_R, norm_U = self._plain_sum(on_device, flat_P)
                else:
                    loss_R, norm_U = clipper.add(self.losses, on_device, flat_P, bound, spacing, self._scale)
            losses.append(loss_R)  # read after the last pass, since each read waits for the device
            norms.append(norm_U)
            units += len(norm_U)
        if self.canaries is not None:
            self.canaries.add_to(flat_P, canaries, self.max_grad_norm, spacing)
        flat_P *= spacing  # integers until here
        loss_U, norm_U = (torch.cat([flat_P.new_zeros(0), *parts]).double() for parts in (losses, norms))
        return flat_P, Diagnostics(
            loss_sum=float(loss_U.sum()),
            units=units,
            clipped=int((~(norm_U <= bound)).sum()) if clipper else 0,  # nan counts as clipped: its factor is zero
            norm_sum=float(norm_U.sum()),
            clipped_by_layer=clipper.clipped_by_layer() if clipper else (),
        )

    def _plain_sum(self, batch: Pass, sum_P: Tensor) -> tuple[Tensor, Tensor]:
        """Adds gradients without clipping, only for runs without differential privacy; returns nan for the norms."""
        with self._attention.of(batch):
            loss_R = self.losses(batch)
            (loss_R.sum() * self._scale).backward()  # type: ignore[no-untyped-call]
        for parameter, part_P in self._parts(sum_P):
            if parameter.grad is not None:
                part_P.add_(parameter.grad.flatten(), alpha=1 / self._scale)
            parameter.grad = None
        return loss_R.detach(), loss_R.new_full((batch.num_units - batch.goes_on,), float("nan"))

    def rehearse(self, batches: Sequence[Pass]) -> None:
        """Uses as much memory as a step over these synthetic batches, and changes nothing.

        Afterwards parameters, optimizer, noise and the global random state are unchanged, even after an error.

        Raises:
            torch.OutOfMemoryError: The batches do not fit.
            Refused: As in ``step``, where it concerns the clipped sum.
        """
        momentum = bool(self._optimizer.defaults.get("momentum"))
        numbers = 2 if isinstance(self._optimizer, torch.optim.Adam) else int(momentum)
        state = 0 if self._optimizer.state else numbers * self.size
        if self._plan and _rank() in (None, 0):
            state += 2 * self.size * (self._plan.bands - 1)  # earlier noise in float64
        devices = [self._device] if self._device.type == "cuda" else []
        try:
            with torch.random.fork_rng(devices=devices), heard_by(None):
                # Ones, because systems allocate zeros lazily.
                held = torch.ones(state, device=self._device)
                flat_P, _ = self.clipped_sum(batches)
                released_P = flat_P.float()
                update = torch.ones(2 * self.size, device=self._device)  # AdamW's temporary tensors
                del held, flat_P, released_P, update
        except BaseException:
            recover(self._model)
            self.repack(self.packing)  # the clipper may hold gradients of an unfinished pass
            raise
        finally:
            for parameter in self.parameters.values():
                parameter.grad = None

    def check(self) -> None:
        """The checks of ``step`` before it reads a batch, since model and settings may have changed."""
        if self._plan is not None:
            _check_arguments(self._model, self._optimizer, self.parameters)
            refuse_foreign_gradients(self.parameters)
            guards.check_float32()

    def step(self, batches: Sequence[Pass], canaries: Sequence[int] = ()) -> Diagnostics:
        """Takes one logical step: clipped sum, noise, update; ``canaries`` are those that the sampler drew.

        Raises:
            Refused: A trainable parameter has no clipped sum in this step or holds a foreign gradient; the trainable parameters
                of model or optimizer changed since the engine was made; or TF32 is on.
        """
        self.check()
        flat_P, diagnostics = self.clipped_sum(batches, canaries)
        self._apply(self._release(flat_P))
        return diagnostics

    def _release(self, flat_P: Tensor) -> Tensor:
        """Adds the noise once, sums the ranks exactly, and divides by the public batch size (post-processing)."""
        rank = _rank()
        # Before the all-reduce, each rank holds only its own units' sum, so no process ever has the whole sum without noise.
        if self._plan is not None and rank in (None, 0):
            self._noise.add_to(flat_P, self._noise_scale)
        if rank is not None:
            distributed.all_reduce(flat_P)
        if self.canaries is not None:
            self.projections = self.canaries.project(flat_P) / self.max_grad_norm
        released_P = flat_P.float()
        released_P /= self._schedule.expected_batch_size
        return released_P

    def forget_noise(self) -> None:
        """Stops cancelling earlier noise, as a resumed run does; for use after a step that was drawn but failed."""
        if isinstance(self._noise, BandedNoise):
            self._noise.forget()

    def _apply(self, released_P: Tensor) -> None:
        for parameter, part_P in self._parts(released_P):
            parameter.grad = part_P.view_as(parameter)
        self._stepping = True
        try:
            self._optimizer.step()
        finally:
            self._stepping = False
            for parameter in self.parameters.values():
                parameter.grad = None

    def _parts(self, flat_P: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
        parameters = list(self.parameters.values())
        return zip(parameters, torch.split(flat_P, [p.numel() for p in parameters]), strict=True)

    def _only_released(self, *_: Any) -> None:
        if not self._stepping:
            raise Refused(
                "optimizer.step() was called outside the engine, with gradients that were neither clipped nor noised. Call "
                "engine.step()."
            )

    def lattice(self) -> dict[str, float]:
        """The card's figures of the noise: the number of trainable coordinates, and its standard deviation over C."""
        return {"coordinates": self.size, "noise_over_max_grad_norm": self._noise_scale / self.max_grad_norm}

    def close(self) -> None:
        """Removes the hooks from model and optimizer, so that they can be saved and used."""
        if self._clipper is not None:
            self._clipper.close()
        if self._guard is not None:
            self._guard.remove()
        for layer in self._adapters:
            vars(layer).pop("_cast_input_dtype", None)

    def self_check(
        self, vocab_size: int, low_precision: bool = False, pad_id: int = 0, batch_invariance: bool = True
    ) -> Checked:
        """Compares the engine with brute-force autograd, in passes as they will run: see ``selfcheck.self_check``.

        With ``low_precision`` (below float32), the tolerance is 5e-2 per row of an example instead of 1e-3. Without a Plan there
        is no check. ``batch_invariance``: also test that a unit's bits depend on neither position nor other units.

        Raises:
            NotBatchInvariant: The engine stays open, and can be checked again after ``repack``.
            Refused: The check failed; the engine is closed.
        """
        if self._clipper is None:
            return Checked(0.0)
        self._clipper.close()  # no hooks meanwhile
        try:
            with guards.deterministic():
                subject = Subject(
                    model=self._model,
                    parameters=self.parameters,
                    losses=lambda batch: self.losses(batch) * self._scale,
                    make_clipper=lambda: self._clipper_of("flat"),
                    device=self._device,
                    vocab_size=vocab_size,
                    packing=self.packing,
                    pad_id=pad_id,
                    tolerance=LOW_PRECISION_TOLERANCE * self.packing.rows_each if low_precision else TOLERANCE,
                    batch_invariance=batch_invariance,
                )
                checked = self_check(subject)
        except NotBatchInvariant:
            self._clipper = self._make_clipper()
            raise
        self._clipper = self._make_clipper()
        return checked


def _cast_outside_autocast(layer: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Casts an adapter's input; not under autocast, which casts it again: a float32 copy of twice the size would be kept."""
    if torch.is_autocast_enabled(x.device.type):
        return x
    cast: Tensor = type(layer)._cast_input_dtype(layer, x, dtype)
    return cast


def _rank() -> int | None:
    """Rank of this process; None if it is the only one. Rank 0 adds the noise."""
    several = distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
    return distributed.get_rank() if several else None


def _check_arguments(model: nn.Module, optimizer: torch.optim.Optimizer, parameters: dict[str, nn.Parameter]) -> None:
    if isinstance(optimizer, AcceleratedOptimizer) or isinstance(model, DistributedDataParallel):
        raise Refused(
            "the model or the optimizer is wrapped by accelerator.prepare or DistributedDataParallel, which skips steps and "
            "averages gradients after the noise. Pass both unwrapped; the engine reduces over ranks itself."
        )
    if {id(p) for p in parameters.values()} != {id(p) for p in model.parameters() if p.requires_grad}:
        raise Refused(
            "the trainable parameters changed since the engine was made, so an update would escape clipping. Make a new engine "
            "after changing requires_grad."
        )
    in_optimizer = {id(p) for group in optimizer.param_groups for p in group["params"]}
    if in_optimizer != {id(p) for p in parameters.values()}:
        missing = next((name for name, p in parameters.items() if id(p) not in in_optimizer), None)
        wrong = "it holds one that is not trainable, whose update would escape the noise"
        if missing:
            wrong = f"{missing} is missing, so its noised gradient would be dropped"
        raise Refused(
            f"the optimizer does not hold exactly the trainable parameters: {wrong}. Build it from those with requires_grad."
        )
    if low := [name for name, p in parameters.items() if p.dtype != torch.float32]:
        raise Refused(f"{low[0]} trains in {parameters[low[0]].dtype}; noise needs float32. Cast it with .float().")


def recover(model: nn.Module) -> None:
    """Makes a sharded model usable for another pass after an exception on all ranks.

    After an exception on one rank only, nothing helps: the others wait for it.
    """
    if isinstance(model, FSDPModule) and hasattr(model, "reset_iter_state"):  # new in torch 2.13
        model.reset_iter_state()
