"""Taps: Opacus' hooks, extended so that one backward pass hands over what every rule needs, exactly once a call.

Comes in: a model. Goes out: for each call of a layer that trains, its input and the gradient of its output, at the moment
the backward pass reaches it.

Opacus keeps activations on the module, which counts calls, breaks under non-reentrant checkpointing (the recomputation
fires the forward hooks again) and keeps what checkpointing wants to free. A tap is a node of the autograd graph instead:
it saves the input as any operation does, so that checkpointing of both kinds frees and recomputes it, a layer called twice
has two of them, and one whose output no loss depends on is never asked.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from opacus.grad_sample import GradSampleHooks
from torch import Tensor, nn

from dpllm.errors import Refused
from dpllm.privacy.rules import Rule, rule_of

# Opacus' stock hooks sit on modules whose inputs need no gradient (the first trainable layer); torch mentions it once.
warnings.filterwarnings("ignore", message="Full backward hook is firing when gradients are computed")

Receive = Callable[[nn.Module, str, Rule, Tensor, Tensor], None]


class _Tap(torch.autograd.Function):
    """The identity; its backward pass reports (input of the layer, gradient of its output)."""

    @staticmethod
    def forward(
        ctx: Any, output: Tensor, input: Tensor, anchor: Tensor, report: Callable[[Tensor, Tensor], None]
    ) -> Tensor:
        # `anchor` needs a gradient, so that there is a graph though no parameter and perhaps no input needs one.
        ctx.save_for_backward(input)
        ctx.report = report
        return output.detach()  # no view: some models change a layer's output in place (Falcon)

    @staticmethod
    def backward(ctx: Any, *backprops: Tensor) -> tuple[Tensor | None, ...]:
        (input,) = ctx.saved_tensors
        ctx.report(input, backprops[0])
        return backprops[0], None, None, None


class Taps(GradSampleHooks):  # type: ignore[misc]
    """Hooks on every layer that owns a trainable parameter; silent but inside ``open``."""

    def __init__(self, model: nn.Module, receive: Receive) -> None:
        """Hooks into the model.

        Raises:
            Refused: A layer that trains has no rule, or the model is hooked already: every gradient would count twice.
        """
        if hasattr(model, "autograd_grad_sample_hooks"):
            raise Refused(
                "the model carries per-sample gradient hooks already, so that every gradient would be counted twice. Close "
                "the other engine, or remove its hooks, first."
            )
        self._receive = receive
        self._rows = 0
        self._anchors: dict[torch.device, Tensor] = {}
        super().__init__(model, batch_first=True, loss_reduction="sum", strict=False)
        self.disable_hooks()

    @contextlib.contextmanager
    def open(self, rows: int) -> Iterator[None]:
        """Reports what happens inside, in forward passes of ``rows`` rows and in their backward passes."""
        self._rows = rows
        self.enable_hooks()
        try:
            yield
        finally:
            self.disable_hooks()

    def add_hooks(self, **settings: Any) -> None:
        """One forward hook for each layer that owns a trainable parameter."""
        owners = [(name, module) for name, module in self._module.named_modules() if _owns(module)]
        rules = [(name, module, rule_of(module, name)) for name, module in owners]  # refuses before anything is hooked
        self.autograd_grad_sample_hooks: list[Any] = []
        self._module.autograd_grad_sample_hooks = self.autograd_grad_sample_hooks
        for name, module, rule in rules:
            hook = partial(self.capture_activations_hook, name, rule)
            self.autograd_grad_sample_hooks.append(module.register_forward_hook(hook, with_kwargs=True))

    def capture_activations_hook(
        self, name: str, rule: Rule, module: nn.Module, arguments: Any, named: dict[str, Any], output: Any
    ) -> Any:
        """Puts a tap behind the layer."""
        if not self.hooks_enabled or not torch.is_grad_enabled():
            return None
        inputs = [value for value in (*arguments, *named.values()) if isinstance(value, Tensor)]
        if len(inputs) != 1 or not isinstance(output, Tensor):
            raise Refused(
                f"{name} ({type(module).__name__}) trains and is called with {len(inputs)} tensors and returns a "
                f"{type(output).__name__}; one tensor in and one out are understood, so its gradients could not be clipped. "
                "Train other layers."
            )
        input = inputs[0].detach()
        if isinstance(module, nn.Embedding) and len(output) == 1 != self._rows:
            # Positions, looked up once for all rows (GPT-2): looked up for each, every row has its own gradient.
            input, output = input.expand(self._rows, *input.shape[1:]), output.expand(self._rows, *output.shape[1:])
        anchor = self._anchors.setdefault(output.device, torch.zeros((), device=output.device, requires_grad=True))
        return _Tap.apply(output, input, anchor, partial(self._receive, module, name, rule))  # type: ignore[no-untyped-call]


def _owns(module: nn.Module) -> bool:
    """A parameter of its own trains, or of the containers that peft's LoRA on embeddings keeps raw parameters in."""
    if isinstance(module, (nn.ParameterDict, nn.ParameterList)):
        return False
    containers = [child for child in module.children() if isinstance(child, (nn.ParameterDict, nn.ParameterList))]
    return any(
        parameter.requires_grad for part in (module, *containers) for parameter in part.parameters(recurse=False)
    )
