"""The recipe that a command names."""

from __future__ import annotations

import argparse
import math
from typing import TYPE_CHECKING, Any

from dpllm.errors import ConfigError

if TYPE_CHECKING:
    from dpllm.recipe.config import RunConfig


def load_recipe(known: argparse.Namespace, rest: list[str]) -> RunConfig:
    """The recipe that a command names, with its overrides.

    Raises:
        ConfigError: No recipe, two of them, or one that cannot be read.
    """
    from dpllm.recipe.config import load_config
    from dpllm.recipe.section import parse_overrides

    path = known.config or known.recipe
    if known.config and known.recipe:
        raise ConfigError(f"two recipes given: {known.config} and {known.recipe}. Name one.")
    if path is None:
        action = " ".join(filter(None, (known.command, getattr(known, "action", None))))
        raise ConfigError(f"name a recipe: dpllm {action} recipes/lora/e2e.yaml")
    return load_config(path, parse_overrides(rest))


def finite(value: Any) -> Any:
    """The value as JSON can hold it, which has no infinity: an epsilon that cannot be certified is null."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
