"""Per-unit clipped sums: the only way by which private data reach an update.

Comes in: a function from a pass to its losses. Goes out: the sum over units of each unit's gradient, clipped by one of
``FUNCTIONS``; each of these has a text for the card in ``card.card`` and a line in ``tests/checks.by_hand``. ``Taps`` extend
Opacus' hooks so that one backward pass reports what every layer rule needs, exactly once for each call.

Shape suffixes: R rows of a pass, U units, L trainable parameters, G layers that own them, P coordinates.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from opacus.grad_sample import GradSampleHooks
from torch import Tensor, nn

from dpllm.errors import Refused
from dpllm.privacy.attention import RowAttention
from dpllm.privacy.gradients import FORMED, PassGradients
from dpllm.privacy.packing import Pass, Segment
from dpllm.privacy.rules import Rule, rule_of

# Opacus' hooks are on modules whose inputs need no gradient (the first trainable layer); torch warns of it once.
warnings.filterwarnings("ignore", message="Full backward hook is firing when gradients are computed")

Losses = Callable[[Pass], Tensor]
WHOLE = Segment(0, sys.maxsize, 0)  # all tokens of a pass
Receive = Callable[[nn.Module, str, Rule, Tensor, Tensor], None]
AUTOMATIC_GAMMA = 0.01


def flat(norm_U: Tensor, max_grad_norm: float) -> Tensor:
    """Factor = min(1, C / norm): gradients longer than C are shortened to C (Abadi et al. 2016, algorithm 1).

    Guarantee:
        factor * norm <= C.
    """
    return (max_grad_norm / norm_U).clamp(max=1.0)


def automatic(norm_U: Tensor, max_grad_norm: float) -> Tensor:
    """Factor = C / (norm + gamma), gamma = 0.01: nearly every gradient gets length C, so there is no threshold to tune.

    C then scales the update as the learning rate does (with Adam, hardly at all).

    Guarantee:
        factor * norm = C norm / (norm + gamma) <= C, for any gamma > 0.

    References:
        Bu et al. 2023, Automatic Clipping: Differentially Private Deep Learning Made Easier and Stronger, equation 4.1.
    """
    return max_grad_norm / (norm_U + AUTOMATIC_GAMMA)


FUNCTIONS: dict[str, Callable[[Tensor, float], Tensor]] = {"flat": flat, "automatic": automatic}


def layers_of(parameters: Iterable[str]) -> list[str]:
    """The modules that own the named parameters, each once, in order."""
    return list(dict.fromkeys(name.rpartition(".")[0] for name in parameters))


class PerUnitClipper:
    """Forms every unit's gradient in one backward pass, clips it and adds it up.

    Meanwhile no trainable parameter requires a gradient: autograd computes none, so nothing unclipped can reach a parameter, and
    the cost of ordinary weight gradients is saved.

    Guarantee:
        For each unit, the L2 norm of its gradient times its factor, over all trainable parameters together, is at most
        ``max_grad_norm`` (1 + 1e-6), for every clipping function, in every precision of the model; then each coordinate is
        rounded to the lattice, which moves it by at most one ``spacing``. A gradient is formed in float32, measured in float64,
        and added as it was measured. A unit whose gradient is not finite adds zero.

        A unit's contribution depends on that unit alone, to the last bit: it is computed in shapes that depend on the unit and on
        public numbers, and sums of multiples of the spacing are exact. ``selfcheck`` tests that the model's own kernels give a
        row the same bits at any position and beside any other rows.

    References:
        Abadi et al. 2016, algorithm 1; Bu et al. 2023, Differentially Private Optimization on Large Model at Small Cost
        (one backward pass); Opacus (Yousefpour et al. 2021), whose hooks are extended.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        *,
        most_units: int,
        held_numbers: int,
        clipping: str = "flat",
    ) -> None:
        """Hooks into the model, whose trainable ``parameters`` are given; ``clipping`` is a key of ``FUNCTIONS``."""
        self._parameters, self._function = parameters, FUNCTIONS[clipping]
        layers = layers_of(parameters)
        layer_L = [layers.index(name.rpartition(".")[0]) for name in parameters]
        self._layers, self._layer_L = len(layers), torch.tensor(layer_L, device=next(iter(parameters.values())).device)
        self._long: Tensor | None = None  # see clipped_by_layer
        self._gradients = PassGradients(parameters, most_units, held_numbers)
        self._unfinished_P: Tensor | None = None  # the gradient so far of a unit that continues in the next pass
        self._tokens: int | None = None  # in the pass; None for an example by itself
        self._units: list[Segment] = []
        self._attention = RowAttention(model)
        self._taps = Taps(model, self._receive)

    def close(self) -> None:
        """Removes the hooks from the model."""
        self._taps.cleanup()

    def start(self) -> None:
        """Starts a logical batch: forgets the state of earlier ones."""
        self._unfinished_P, self._long = None, None

    def clipped_by_layer(self) -> tuple[int, ...]:
        """For each of G layers, how many units of the logical batch had a gradient longer than C / sqrt(G) there.

        Un-noised.
        """
        return tuple(self._long.tolist()) if self._long is not None else (0,) * self._layers

    def add(
        self, losses: Losses, batch: Pass, sum_P: Tensor, max_grad_norm: float, spacing: float, loss_scale: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Runs a forward and backward pass, and adds the clipped gradients to ``sum_P``.

        Args:
            losses: From a pass to loss_R.
            batch: The pass.
            sum_P: The running sum in units of ``spacing``, float64, in the order of ``parameters``.
            max_grad_norm: C.
            spacing: Spacing of the lattice to which each unit's clipped gradient is rounded, a power of two.
            loss_scale: Factor of the losses in the backward pass; results do not contain it.

        Returns:
            loss_R, detached, and the un-noised norm_U of the units that this pass completes, for diagnostics.

        Raises:
            Refused: A trainable parameter received no per-unit gradient in this backward pass, a rule does not fit its layer, or
                a pass that should continue a unit holds others.
        """
        if self._unfinished_P is not None and batch.num_units != 1:
            raise Refused(
                "an unfinished unit was followed by a pass of other units, so it could not be clipped as a whole. Run the "
                "passes in the order of passes_of."
            )
        unfinished_P, self._unfinished_P = self._unfinished_P, None
        loss_R = self._backward(losses, batch, loss_scale)
        gradients, gradient_P = self._gradients, None
        if unfinished_P is not None or batch.goes_on:
            gradient_P = gradients.whole(0)
            if unfinished_P is not None:
                gradient_P += unfinished_P  # in float32, before the norm is taken
        if batch.goes_on or not batch.num_units:
            gradients.close()
            self._unfinished_P = gradient_P
            return loss_R.detach()[: len(batch.rows)], loss_R.new_zeros(0, dtype=torch.float64)
        square_LU = gradients.unit_norms() if gradient_P is None else self._square_of(gradient_P)
        norm_U = gradients.added_up(square_LU).sqrt() / loss_scale
        self._count_long(square_LU, max_grad_norm * loss_scale)
        counted_U = torch.isfinite(norm_U)  # any other gets factor 0 and is excluded from the sum
        factor_U = self._function(norm_U, max_grad_norm).where(counted_U, 0.0) / (loss_scale * spacing)
        if gradient_P is None:
            gradients.add_to(sum_P, factor_U, counted_U)
        elif bool(counted_U[0]):
            for part_P, into_P in zip(torch.split(gradient_P, FORMED), torch.split(sum_P, FORMED), strict=True):
                into_P += part_P.double().mul_(factor_U[0]).round_()
        gradients.close()
        return loss_R.detach(), norm_U

    def _backward(self, losses: Losses, batch: Pass, loss_scale: float) -> Tensor:
        """Returns loss_R, and collects the layers' contributions in ``_gradients``."""
        rows, tokens = batch.input_ids_1M.shape
        self._tokens, self._units = (tokens, batch.units) if batch.position_ids_1M is not None else (None, [WHOLE])
        self._gradients.open(self._units[: batch.num_units])
        with without_weight_gradients(self._parameters.values()), self._taps.open(rows), self._attention.of(batch):
            loss_R = losses(batch)
            if loss_R.requires_grad:
                (loss_R.sum() * loss_scale).backward()  # type: ignore[no-untyped-call]
        if batch.num_units:
            self._check_complete()
        return loss_R

    def _square_of(self, gradient_P: Tensor) -> Tensor:
        """square_L1 of one unit's gradient."""
        parts = torch.split(gradient_P, [parameter.numel() for parameter in self._parameters.values()])
        norm_L = [torch.linalg.vector_norm(part, dtype=torch.float64) for part in parts]
        return torch.stack(norm_L).square_().unsqueeze(1)

    def _count_long(self, square_LU: Tensor, max_grad_norm: float) -> None:
        square_GU = square_LU.new_zeros(self._layers, square_LU.shape[1]).index_add_(0, self._layer_L, square_LU)
        long = (~(square_GU <= max_grad_norm**2 / len(square_GU))).sum(dim=1)
        self._long = long if self._long is None else self._long + long

    def _receive(self, layer: nn.Module, name: str, rule: Rule, input: Tensor, backprop: Tensor) -> None:
        input, backprop = (self._by_token(values, name) for values in (input, backprop))
        try:
            for parameter, part in rule(layer, input, backprop, self._gradients.trains, self._units):
                self._gradients.add(parameter, part)
        except (Refused, torch.OutOfMemoryError):
            raise
        except Exception as error:
            # Without the error's own text, which may quote a token.
            raise Refused(
                f"{name} ({type(layer).__name__}) trains, but the rule for such layers does not fit it "
                f"({type(error).__name__}), so its gradients could not be clipped. Train other layers."
            ) from error

    def _by_token(self, values: Tensor, name: str) -> Tensor:
        """(1, M, ...): attention has heads before tokens, and OPT no dimension of rows. An example by itself has any shape."""
        tokens = self._tokens
        if tokens is None:
            return values if values.dim() > 2 else values.unsqueeze(0)
        if values.shape[:2] == (1, tokens):
            return values
        if values.dim() == 2 and values.shape[0] == tokens:
            return values.unsqueeze(0)
        for place in range(2, values.dim()):
            if values.shape[0] == 1 and values.shape[place] == tokens:
                return values.movedim(place, 1)
        raise Refused(
            f"{name} trains and receives tokens in another shape, {tuple(values.shape)} for {tokens} tokens, so its gradients "
            "cannot be assigned to units (mixtures of experts do this). Exclude it from adapter.target_modules."
        )

    def _check_complete(self) -> None:
        if missing := self._gradients.missing():
            raise Refused(
                f"{missing[0]} trains, but no layer call gave a per-example gradient for it in this step, so its update could "
                "not be clipped. Exclude the layer from adapter.target_modules, or train other layers."
            )
        refuse_foreign_gradients(self._parameters)


def refuse_foreign_gradients(parameters: Mapping[str, nn.Parameter]) -> None:
    """Refuses gradients from any backward pass but the engine's, which are not clipped (``outputs.loss``)."""
    for name, parameter in parameters.items():
        if parameter.grad is not None:
            raise Refused(
                f"{name} holds a gradient that this engine did not compute: gradients of another backward pass, such as "
                "outputs.loss.backward(), are not clipped. Leave it to the engine, and type optimizer.zero_grad()."
            )


@contextlib.contextmanager
def without_weight_gradients(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Within the block, none of the parameters requires a gradient."""
    parameters = list(parameters)
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)


class _Tap(torch.autograd.Function):
    """The identity; its backward pass reports (input of the layer, gradient of its output)."""

    @staticmethod
    def forward(
        ctx: Any, output: Tensor, input: Tensor, anchor: Tensor, report: Callable[[Tensor, Tensor], None]
    ) -> Tensor:
        # `anchor` requires a gradient, so there is a graph even if no parameter and no input requires one.
        ctx.save_for_backward(input)
        ctx.report = report
        return output.detach()  # not a view: some models change a layer's output in place (Falcon)

    @staticmethod
    def backward(ctx: Any, *backprops: Tensor) -> tuple[Tensor | None, ...]:
        (input,) = ctx.saved_tensors
        ctx.report(input, backprops[0])
        return backprops[0], None, None, None


class Taps(GradSampleHooks):  # type: ignore[misc]
    """Hooks on every layer that owns a trainable parameter; inactive outside ``open``."""

    # Opacus stores activations on the module. That counts calls, breaks under non-reentrant checkpointing (the recomputation
    # fires the forward hooks again) and holds what checkpointing should free. A tap is a node of the autograd graph instead. It
    # saves the input as any operation does, so both kinds of checkpointing free and recompute it; a layer called twice has two
    # taps, and a tap whose output no loss depends on never runs.

    def __init__(self, model: nn.Module, receive: Receive) -> None:
        """Hooks into the model; Refused if a trainable layer has no rule or the model already has hooks."""
        if hasattr(model, "autograd_grad_sample_hooks"):
            raise Refused(
                "the model already has per-sample gradient hooks, so every gradient would be counted twice. Close the other "
                "engine, or remove its hooks, first."
            )
        self._receive = receive
        self._rows = 0
        self._anchors: dict[torch.device, Tensor] = {}
        super().__init__(model, batch_first=True, loss_reduction="sum", strict=False)
        self.disable_hooks()

    @contextlib.contextmanager
    def open(self, rows: int) -> Iterator[None]:
        """Within the block, reports forward passes of ``rows`` rows and their backward passes."""
        self._rows = rows
        self.enable_hooks()
        try:
            yield
        finally:
            self.disable_hooks()

    def add_hooks(self, **settings: Any) -> None:
        """Adds one forward hook to each layer that owns a trainable parameter."""
        owners = [(name, module) for name, module in self._module.named_modules() if _owns(module)]
        rules = [(name, module, rule_of(module, name)) for name, module in owners]  # refuses before any hook is added
        self.autograd_grad_sample_hooks: list[Any] = []
        self._module.autograd_grad_sample_hooks = self.autograd_grad_sample_hooks
        for name, module, rule in rules:
            hook = partial(self.capture_activations_hook, name, rule)
            self.autograd_grad_sample_hooks.append(module.register_forward_hook(hook, with_kwargs=True))

    def capture_activations_hook(
        self, name: str, rule: Rule, module: nn.Module, arguments: Any, named: dict[str, Any], output: Any
    ) -> Any:
        """Puts a tap after the layer."""
        if not self.hooks_enabled or not torch.is_grad_enabled():
            return None
        inputs = [value for value in (*arguments, *named.values()) if isinstance(value, Tensor)]
        if len(inputs) != 1 or not isinstance(output, Tensor):
            raise Refused(
                f"{name} ({type(module).__name__}) trains, takes {len(inputs)} tensors and returns a "
                f"{type(output).__name__}, but only layers with one tensor in and one out can be clipped. Train other layers."
            )
        input = inputs[0].detach()
        if isinstance(module, nn.Embedding) and len(output) == 1 != self._rows:
            # GPT-2 looks up positions once for both rows of a pair: expanded, each row has its gradient.
            input, output = input.expand(self._rows, *input.shape[1:]), output.expand(self._rows, *output.shape[1:])
        if (anchor := self._anchors.get(output.device)) is None:
            anchor = self._anchors[output.device] = torch.zeros((), device=output.device, requires_grad=True)
        return _Tap.apply(output, input, anchor, partial(self._receive, module, name, rule))  # type: ignore[no-untyped-call]


def _owns(module: nn.Module) -> bool:
    """Whether the module has a trainable parameter itself, or in containers of raw parameters (peft's LoRA on embeddings)."""
    if isinstance(module, (nn.ParameterDict, nn.ParameterList)):
        return False
    containers = [child for child in module.children() if isinstance(child, (nn.ParameterDict, nn.ParameterList))]
    return any(
        parameter.requires_grad for part in (module, *containers) for parameter in part.parameters(recurse=False)
    )
