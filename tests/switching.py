"""Tiny models that read all rows of a batch in another way once the longest has some number of tokens."""

from __future__ import annotations

from typing import Any

import tiny
import torch

LONG = {"short_factor": [1.0] * 4, "long_factor": [1.0, 1.3, 5.0, 40.0]}


def model(kind: str, after: int, **changes: Any) -> Any:
    """``kind`` is a type of rotary embeddings, or by layer, or where attention has a window; random weights, eval mode."""
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0}
    positions: dict[str, Any] = {"max_position_embeddings": 512}
    if kind == "longrope":
        rope |= {**LONG, "original_max_position_embeddings": after}
        family, positions["original_max_position_embeddings"] = "phi3", after
    elif kind == "dynamic":
        family, positions["max_position_embeddings"] = "llama", after
    elif kind == "by layer":
        usual = {"rope_type": "default", "rope_theta": 1e4}
        family, rope = "gemma3_text", {"full_attention": {**rope, "rope_type": "dynamic"}, "sliding_attention": usual}
        layers = ["full_attention", "sliding_attention"]
        positions |= {"max_position_embeddings": after, "layer_types": layers, "sliding_window": 512}
    else:
        family, rope = "mistral", {"rope_type": "default", "rope_theta": 1e4}
        positions["sliding_window"] = after
    made = tiny.model(family, rope_parameters=rope, **positions, **changes).eval()
    with torch.no_grad():  # at first, no token depends much on those before it
        for name, parameter in made.named_parameters():
            if "layers" in name and parameter.dim() > 1:
                parameter.mul_(30)
    return made
