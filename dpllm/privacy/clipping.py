"""Per-unit clipped sums: the only door through which private data reach an update.

Comes in: the losses of a physical batch. Goes out: the sum over units of each unit's gradient, clipped. This is the one
file that imports Opacus' gradient code; a faster rule for a layer is one more function in ``GRAD_SAMPLERS``.

Shape suffixes: R sequences of a physical batch, U units, P coordinates of a parameter.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from opacus.grad_sample import GradSampleHooks, GradSampleHooksFastGradientClipping
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from dpllm.errors import Refused
from dpllm.privacy.sampling import PhysicalBatch

# Opacus hooks modules whose inputs need no gradient (the first trainable layer), which torch mentions once.
warnings.filterwarnings("ignore", message="Full backward hook is firing when gradients are computed")

GradSampler = Callable[[nn.Module, list[Tensor], Tensor], dict[nn.Parameter, Tensor]]


class Summer(Protocol):
    """Adds up the contributions of one logical batch, one physical batch at a time."""

    def add(self, loss_R: Tensor, batch: PhysicalBatch, sums: Mapping[str, Tensor]) -> Tensor:
        """Backward pass of one physical batch, added into ``sums``; returns the un-noised norm_U, for diagnostics."""


def linear_rule(layer: nn.Module, activations: list[Tensor], backprops: Tensor) -> dict[nn.Parameter, Tensor]:
    """Per-sequence gradients of nn.Linear in float32, whatever the precision of the forward pass."""
    return _dense(layer, activations[0], backprops, transposed=False)


def conv1d_rule(layer: nn.Module, activations: list[Tensor], backprops: Tensor) -> dict[nn.Parameter, Tensor]:
    """Per-sequence gradients of transformers' Conv1D, a linear layer that stores its weight transposed (GPT-2)."""
    return _dense(layer, activations[0], backprops, transposed=True)


GRAD_SAMPLERS: dict[type[nn.Module], GradSampler] = {nn.Linear: linear_rule, Conv1D: conv1d_rule}


class _Hooks(GradSampleHooks):  # type: ignore[misc]
    """Opacus' hooks with our rules in front of its own; other layers keep Opacus' rule, or functorch."""

    GRAD_SAMPLERS = {**GradSampleHooks.GRAD_SAMPLERS, **GRAD_SAMPLERS}  # noqa: RUF012 - Opacus' contract
    batch_RT: tuple[int, int] = (0, 0)  # shape of the physical batch whose backward pass runs

    def rearrange_grad_samples(self, *, module: nn.Module, backprops: Tensor, **settings: Any) -> Any:
        """Gives layers that read (R * T, d) their rows back (OPT's feed-forward); the self-check sees if that is wrong."""
        rows, tokens = self.batch_RT
        if backprops.dim() == 2 and len(backprops) == rows * tokens:
            captured: list[list[Tensor]] = module.activations  # type: ignore[assignment]
            captured[-1] = [tensor.reshape(rows, tokens, -1) for tensor in captured[-1]]
            backprops = backprops.reshape(rows, tokens, -1)
        return super().rearrange_grad_samples(module=module, backprops=backprops, **settings)


class PerUnitClipper:
    """Materialises every unit's gradient, clips it, and adds it up.

    Guarantee:
        For each unit, the L2 norm of what it adds to ``sums``, over all trainable parameters together, is at most
        ``max_grad_norm`` (1 + 1e-6): the float32 tensors whose norm is measured (in float64) are the tensors that are
        scaled and summed. A unit whose gradient is not finite adds zero. A unit's addition depends on that unit alone.

    References:
        Abadi et al. 2016, Deep Learning with Differential Privacy, algorithm 1; Opacus (Yousefpour et al. 2021).
    """

    def __init__(self, model: nn.Module, parameters: Mapping[str, nn.Parameter], max_grad_norm: float) -> None:
        """Hooks into the model; ``parameters`` are all that train, by name."""
        self._parameters = parameters
        self._max_grad_norm = max_grad_norm
        self._hooks = _Hooks(model, batch_first=True, loss_reduction="sum", strict=False)

    def set_max_grad_norm(self, value: float) -> None:
        """Another C, for the self-check."""
        self._max_grad_norm = value

    def close(self) -> None:
        """Takes the hooks out of the model again."""
        self._hooks.remove_hooks()

    def add(self, loss_R: Tensor, batch: PhysicalBatch, sums: Mapping[str, Tensor]) -> Tensor:
        """See ``Summer``.

        Raises:
            Refused: A trainable parameter received no per-unit gradient in this backward pass.
        """
        self._hooks.batch_RT = (batch.input_ids_RT.shape[0], batch.input_ids_RT.shape[1])
        loss_R.sum().backward()  # type: ignore[no-untyped-call]
        gradients = {name: self._collect(name, parameter, batch) for name, parameter in self._parameters.items()}
        square_U = torch.stack([gradient_UP.double().square().sum(dim=1) for gradient_UP in gradients.values()]).sum(0)
        norm_U = square_U.sqrt()
        finite_U = torch.isfinite(norm_U)
        factor_U = torch.where(finite_U, (self._max_grad_norm / norm_U).clamp(max=1.0), torch.zeros_like(norm_U))
        for name, gradient_UP in gradients.items():
            # where, not a product: 0 * nan is nan, and one bad unit would poison everybody's sum.
            kept_UP = torch.where(finite_U[:, None], gradient_UP, torch.zeros_like(gradient_UP))
            # float64, or the rounding of a sum over thousands of units would exceed one unit's 1e-6.
            sums[name].add_((factor_U @ kept_UP.double()).view_as(sums[name]))
        return norm_U

    def _collect(self, name: str, parameter: nn.Parameter, batch: PhysicalBatch) -> Tensor:
        gradient_R = getattr(parameter, "grad_sample", None)
        parameter.grad_sample = None  # type: ignore[attr-defined]
        parameter.grad = None
        rows = len(batch.unit_R)
        if not isinstance(gradient_R, Tensor) or len(gradient_R) != rows:
            raise Refused(
                f"{name} trains, but this step gave no gradient of it for each of the {rows} sequences, so its update could "
                "not be clipped. Exclude the layer from adapter.target_modules, or train other layers."
            )
        gradient_RP = gradient_R.float().flatten(1)
        if rows == batch.num_units:
            return gradient_RP
        return gradient_RP.new_zeros(batch.num_units, parameter.numel()).index_add_(0, batch.unit_R, gradient_RP)


class OpacusGhostClipper:
    """The stock two-backward ghost clipping of Opacus, kept as a cross-check of ours.

    Guarantee:
        None that is proven: norms are measured in one pass and the sum is formed in another, and float32 Gram sums can
        cancel (a crafted example had a computed norm of 0). A run in this mode says guarantee: false.

    References:
        Li et al. 2021, Large Language Models Can Be Strong Differentially Private Learners, section 4; Opacus 1.6.
    """

    def __init__(self, model: nn.Module, parameters: Mapping[str, nn.Parameter], max_grad_norm: float) -> None:
        """Hooks into the model; ``parameters`` are all that train, by name."""
        self._parameters = parameters
        self._hooks = GradSampleHooksFastGradientClipping(
            model, batch_first=True, loss_reduction="sum", strict=False, max_grad_norm=max_grad_norm
        )

    def set_max_grad_norm(self, value: float) -> None:
        """Another C, for the self-check."""
        self._hooks.max_grad_norm = value

    def close(self) -> None:
        """Takes the hooks out of the model again."""
        self._hooks.remove_hooks()

    def add(self, loss_R: Tensor, batch: PhysicalBatch, sums: Mapping[str, Tensor]) -> Tensor:
        """See ``Summer``.

        Raises:
            Refused: A unit has several sequences, or a trainable parameter took part in no norm.
        """
        if len(batch.unit_R) != batch.num_units:
            raise Refused(
                "grad_sample_mode opacus_ghost knows the norm of a sequence, not of a unit with several. "
                "Set privacy.grad_sample_mode: auto."
            )
        for parameter in self._parameters.values():
            parameter._norm_sample = None  # type: ignore[attr-defined]
        loss_R.sum().backward(retain_graph=True)  # type: ignore[no-untyped-call]
        for name, parameter in self._parameters.items():
            parameter.grad = None
            if parameter._norm_sample is None:  # type: ignore[attr-defined]
                raise Refused(f"{name} trains, but Opacus measured no norm of it. Set privacy.grad_sample_mode: auto.")
        factor_R = self._hooks.get_clipping_coef()
        norm_R: Tensor = self._hooks.per_sample_gradient_norms
        self._hooks.disable_hooks()
        (factor_R.detach() * loss_R).sum().backward()
        self._hooks.enable_hooks()
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                sums[name].add_(parameter.grad.float())
            parameter.grad = None
        return norm_R.detach()


class PlainSum:
    """The sum of gradients without clipping, for runs without differential privacy only.

    Guarantee:
        None.
    """

    def __init__(self, model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> None:
        """``parameters`` are all that train, by name."""
        self._parameters = parameters

    def close(self) -> None:
        """Nothing to take out."""

    def add(self, loss_R: Tensor, batch: PhysicalBatch, sums: Mapping[str, Tensor]) -> Tensor:
        """See ``Summer``; the norms are not known."""
        loss_R.sum().backward()  # type: ignore[no-untyped-call]
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                sums[name].add_(parameter.grad.float())
            parameter.grad = None
        return torch.full((batch.num_units,), float("nan"))


CLIPPERS = {"auto": PerUnitClipper, "per_sample": PerUnitClipper, "opacus_ghost": OpacusGhostClipper}


def _dense(
    layer: nn.Module, input_RTd: Tensor, backprop_RTp: Tensor, *, transposed: bool
) -> dict[nn.Parameter, Tensor]:
    if input_RTd.dim() < 3:
        raise Refused(
            f"a trainable {layer} reads tokens without their rows, shape {tuple(input_RTd.shape)}, so nobody could tell whose "
            "gradient is whose (mixtures of experts do this). Exclude it from adapter.target_modules."
        )
    input_RTd, backprop_RTp = input_RTd.float().flatten(1, -2), backprop_RTp.float().flatten(1, -2)
    gradients: dict[nn.Parameter, Tensor] = {}
    weight, bias = layer.weight, getattr(layer, "bias", None)
    if isinstance(weight, nn.Parameter) and weight.requires_grad:
        left, right = (input_RTd, backprop_RTp) if transposed else (backprop_RTp, input_RTd)
        gradients[weight] = left.transpose(1, 2) @ right
    if isinstance(bias, nn.Parameter) and bias.requires_grad:
        gradients[bias] = backprop_RTp.sum(dim=1)
    return gradients
