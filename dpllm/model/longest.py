"""What a model decides for all rows of a forward pass: by the longest of them, or by the passes before.

Comes in: a model as transformers builds it, a number of tokens. Goes out: how many rows may share a pass, and a model that
remembers no earlier pass. Must not see data.

Where its type is longrope or dynamic, a rotary embedding takes its frequencies by the largest position of what is read together,
so that a short row beside a long one is read as if it were long. Read alone, a row decides for itself.
"""

from __future__ import annotations

from typing import Any

from torch import nn

# Types of rotary embeddings that look at no length. Any other, also one that comes later, is taken to look at it.
_STEADY = {"default", "linear", "yarn", "llama3", "proportional", "axial"}
_SCALES = {"llama_4_scaling_beta", "long_mscale"}  # of attention, by position
_ENDS = ("original_max_position_embeddings", "max_position_embeddings")
# After how many tokens attention is masked or scaled in another way.
_WINDOWS = {"sliding_window", "sliding_window_size", "window_size", "attention_window", "attention_window_size"}
_WINDOWS |= {"local_attention", "attention_chunk_size", "floor_scale"}


def rows_at_once(model: nn.Module, rows: int, tokens: int, *, windows: bool = False) -> int:
    """How many of ``rows`` may be read together: 1 where the longest, of up to so many tokens, would decide about the others.

    The model remembers no pass from here on, see ``without_memory``.

    Args:
        model: Its configuration says what changes with the length.
        rows: In one forward pass, at most.
        tokens: Of the longest row that there may be, what is written behind it included.
        windows: Also where a window or a scale of attention begins, which no row decides for another, but kernels may.
    """
    without_memory(model)
    config: Any = getattr(model, "config", None)
    known: dict[str, Any] = config.get_text_config().to_dict() if config is not None else {}
    ropes = known.get("rope_parameters") or {}
    begins = [known.get(name) for name in _WINDOWS] if windows else []
    for rope in [ropes] if "rope_type" in ropes else ropes.values():  # one, or one for each kind of layer
        if rope and (rope["rope_type"] not in _STEADY or _SCALES & rope.keys()):
            ends = [rope.get(_ENDS[0]), *(known.get(name) for name in _ENDS)]
            begins += [one for one in ends if one] or [1]
    return 1 if any(isinstance(one, int) and 0 < one < tokens for one in begins) else rows


def without_memory(model: nn.Module) -> None:
    """Lets every rotary embedding of type dynamic begin each pass as a new one would, in place.

    transformers keeps the frequencies of the longest pass so far (seen in 5.23), so that a row would be read by those before it,
    alone or not. Can go when they are computed anew in each pass.
    """
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        known = kinds.values() if isinstance(kinds, dict) else (kinds,)
        if any("dynamic" in str(kind) for kind in known) and _as_new not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(_as_new, with_kwargs=True)


def _as_new(rope: Any, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
    """Of the kind of layer that is asked for alone: what another has just taken is still to be seen (``selfcheck``)."""
    layer = named.get("layer_type", inputs[2] if len(inputs) > 2 else None)
    kind = f"{layer}_" if layer else ""
    if (grown := getattr(rope, f"{kind}max_seq_len_cached", None)) is not None and grown != rope.original_max_seq_len:
        first, now = (getattr(rope, f"{kind}{name}") for name in ("original_inv_freq", "inv_freq"))
        setattr(rope, f"{kind}inv_freq", first.to(now.device).clone())
        setattr(rope, f"{kind}max_seq_len_cached", rope.original_max_seq_len)
