"""Counts what a forward and backward pass holds, on tensors that have shapes and no content.

Comes in: operations, as torch dispatches them on its meta device. Goes out: counts. Must not see weights or data.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Tally(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What is held of what was computed inside.

    Attributes:
        live: Bytes of tensors made inside that are still held.
        peak: The largest ``live`` so far.
    """

    def __init__(self) -> None:
        """All counts start at zero."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.live, self.peak = 0, 0
        self._held: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs one operation and counts it."""
        if func.overloadpacket is torch.ops.aten._local_scalar_dense:
            return 1  # transformers asks whether a mask is all ones, and it is
        out = func(*args, **(kwargs or {}))
        inputs = [*_tensors(args), *_tensors((kwargs or {}).values())]
        known = {leaf.untyped_storage()._cdata for leaf in inputs}
        for leaf in _tensors((out,)):
            storage = leaf.untyped_storage()
            if storage._cdata not in known and storage._cdata not in self._held:
                self._hold(storage)
        return out

    def _hold(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()

        def release() -> None:
            self._held.pop(key, None)
            self.live -= size

        self._held[key] = weakref.finalize(storage, release)
        self._held[key].atexit = False
        self.live += size
        self.peak = max(self.peak, self.live)


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """Those among an operation's arguments or results, which stand alone or in lists; torch's pytree takes ten times as long."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


class _Attention(torch.autograd.Function):
    """Attention that keeps what a fused kernel keeps: queries, keys, values and the output, no table of T^2 weights."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        out = query.new_empty((*query.shape[:-1], value.shape[-1]))
        ctx.save_for_backward(query, key, value, out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        query, key, value, _ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


@contextmanager
def tally() -> Iterator[Tally]:
    """Counts everything inside, attention as a fused kernel holds it.

    scaled_dot_product_attention is replaced meanwhile: on the meta device it falls back to a table of T^2 weights. A mode of
    torch.overrides would be tidier, and is not active when a checkpointed block is computed again.
    """
    counted = Tally()

    def attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Any:
        return _Attention.apply(query, key, value)  # type: ignore[no-untyped-call]

    functional: Any = torch.nn.functional
    fused = functional.scaled_dot_product_attention
    functional.scaled_dot_product_attention = attention
    try:
        with counted:
            yield counted
    finally:
        functional.scaled_dot_product_attention = fused
