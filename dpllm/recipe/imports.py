"""A configuration of LLaMA-Factory, axolotl or TRL as a recipe: what carries over, and what has no private counterpart.

Comes in: their YAML file. Goes out: a recipe that parses, and a line for each of their keys. ``imports.yaml`` says where a key
goes, or why it goes nowhere; ``import_datasets.py`` reads the datasets.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from pydantic import ValidationError

from dpllm.errors import ConfigError
from dpllm.recipe.config import RETIRED, RunConfig
from dpllm.recipe.import_datasets import Draft, Json, carry_datasets, listed, reason, refuse, tables
from dpllm.recipe.section import explain, read_recipe


class Imported(NamedTuple):
    """A recipe and where it came from."""

    tool: str
    recipe: str  # YAML
    carried: list[str]
    left: list[str]


class _No(Exception):
    """Why a value is not carried over."""


def _one_of(*known: str) -> Callable[[Any], str]:
    """The one that the value begins with; the first is the recipe's default."""

    def convert(value: Any) -> str:
        for name in known:
            if str(value).lower().removeprefix("paged_").startswith(name):
                return name
        raise _No(f"a recipe has {', '.join(known)}, so its default, {known[0]}, stands instead of {value}")

    return convert


def _whole(value: Any) -> int:
    if float(value) < 1 or not float(value).is_integer():
        raise _No("a recipe counts in whole steps")
    return int(value)


def _off(why: str) -> Callable[[Any], Any]:
    def convert(value: Any) -> Any:
        if value:
            raise _No(why)
        return value

    return convert


def _one_adapter(value: Any) -> str:
    if not isinstance(value, str) or "," in value:
        raise _No("a recipe starts from one adapter; merge the others into the base model first")
    return value


CONVERT: dict[str, Callable[[Any], Any]] = {
    "adapter.target_modules": lambda value: "auto" if value in ("all", "all-linear", ["all-linear"]) else listed(value),
    "adapter.modules_to_save": listed,
    "adapter.dropout": _off("its masks follow a row's place in the batch, so dropout is refused in private training"),
    "adapter.use_dora": _off("the magnitude of DoRA gives no gradient of single rows to clip; LoRA and rsLoRA do"),
    "adapter.last_blocks": _whole,
    "adapter.r": lambda value: int(str(value)),  # of "8" too, and not of 8.5
    "train.learning_rate": float,
    "train.weight_decay": float,
    "train.optimizer": _one_of("adamw", "sgd"),
    "train.lr_scheduler": _one_of("linear", "cosine", "constant"),
    "train.eval_every": _whole,
    "train.checkpoint_every": _whole,
    "telemetry.trackers": lambda value: sorted({"tensorboard", "wandb", "mlflow", "trackio"} & set(listed(value))),
    "model.quantization": lambda value: f"{value}bit",
    "model.gradient_checkpointing": bool,
    "model.adapter": _one_adapter,
}


def import_config(path: Path) -> Imported:
    """Reads a configuration and says what of it a recipe can hold.

    Raises:
        ConfigError: No YAML, of none of the three tools, trains on preferences or rewards, or names no model or data.
    """
    raw = {key: value for key, value in read_recipe(path).items() if value is not None}
    draft = Draft(path, _tool(path, raw))
    try:
        for key, value in raw.items():
            if _outside(key, value):
                refuse(path, f"{key}: {value}")
        defaults = tables()["defaults"][draft.tool]
        if draft.tool == "LLaMA-Factory":
            defaults = {**defaults, "lora_alpha": 2 * CONVERT["adapter.r"]({**defaults, **raw}["lora_rank"])}
        for key, value in {**defaults, **raw}.items():
            _carry(draft, key, value, "" if key in raw else f" ({draft.tool}'s default)")
        if draft.special.get("@stage", False) not in (False, "sft", "pt"):
            refuse(path, f"stage: {draft.special['@stage']}")
        for fill in (_method, _length, carry_datasets):
            fill(draft)
    except (TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise ConfigError(
            f"{path}: holds a value of another kind than {draft.tool} documents, so it cannot be read ({error}). Mend it."
        ) from None
    return Imported(draft.tool, _to_yaml(draft), draft.carried, list(dict.fromkeys(draft.left)))


def _carry(draft: Draft, key: str, value: Any, note: str) -> None:
    """One key with its value: to the recipe's key, to those that several keys decide, or to what is left out."""
    ours = tables()[draft.tool].get(key) or tables()["trainer"].get(key)
    try:
        if ours is None:
            raise _No(reason(key))
        ready = CONVERT.get(ours, lambda same: same)(value)
    except _No as why:
        draft.left.append(f"{key}: {why}.")
        return
    if ours.startswith("@"):
        draft.special[ours] = ready
    else:
        draft.found[ours] = ready
        draft.carried.append(f"{key}: {value}{note} -> {ours}: {ready}")


def _tool(path: Path, raw: Json) -> str:
    if "base_model" in raw:
        return "axolotl"
    if "model_name_or_path" in raw:
        own = {"stage", "finetuning_type", "cutoff_len", "dataset", "template"}
        return "LLaMA-Factory" if own & raw.keys() else "TRL"
    raise ConfigError(
        f"{path}: is no configuration of LLaMA-Factory or TRL (model_name_or_path), or axolotl (base_model), so nothing "
        "says which model to train. Name such a file, or write a recipe as in docs/howto/own-data.md."
    )


def _outside(key: str, value: Any) -> bool:
    """Of a training on preferences or rewards; 0 is a value too."""
    names = tables()["outside"].split()
    outside = key in names or key.startswith(tuple(name for name in names if name.endswith("_")))
    if key == "loss_type":
        outside = not str(value).startswith(tuple(tables()["supervised_losses"].split()))
    return outside and value is not False


def _method(draft: Draft) -> None:
    """What trains, and in which precision."""
    special, found = draft.special, draft.found
    method = special.get("@method", False)
    if method in (True, "lora", "qlora"):
        found["adapter.method"] = "lora"
        found.pop("adapter.last_blocks", None)
        if special.get("@new_adapter"):
            _drop(draft, "model.adapter")
            draft.left.append("create_new_adapter: the old adapter becomes part of the base; name the sum of both.")
        if special.get("@linear"):
            found["adapter.target_modules"] = "auto"
        if method == "qlora" or special.get("@4bit"):
            found["model.quantization"] = "4bit"
        elif special.get("@8bit"):
            found["model.quantization"] = "8bit"
    else:
        last_blocks = found.get("adapter.last_blocks", 2)
        _drop(draft, "adapter.", "model.adapter", "model.quantization")
        found |= {"adapter.method": "frozen", "adapter.last_blocks": last_blocks}
        if method != "freeze":
            why = "full fine-tuning: noise grows with the number of weights that train"
            if method not in (False, "full", "none"):
                why = f"method {method}: a recipe trains LoRA or the last blocks"
            draft.left.append(f"{why}, so the last 2 blocks train; or set adapter.method: lora.")
    draft.carried.append(f"method -> adapter.method: {found['adapter.method']}")
    for precision in ("bf16", "fp16"):
        if special.get(f"@{precision}") in (True, "full"):
            found["train.precision"] = precision
            draft.carried.append(f"{precision} -> train.precision: {precision}")


def _drop(draft: Draft, *keys: str) -> None:
    """Takes back what was carried to keys that begin so."""
    for key in [key for key in draft.found if key.startswith(keys)]:
        del draft.found[key]
    draft.carried = [line for line in draft.carried if not line.partition(" -> ")[2].startswith(keys)]


def _length(draft: Draft) -> None:
    """Batch, epochs or steps, warm-up."""
    special, found = draft.special, draft.found
    rows, times = int(special["@rows"]), int(special.get("@accumulated", 1))
    found |= {"train.batch_size": rows * times, "train.physical_batch_size": rows}
    draft.carried.append(
        f"{rows} rows x {times} accumulated -> train.batch_size: {rows * times}, train.physical_batch_size: {rows}; multiply "
        "batch_size by the number of processes that you used"
    )
    steps = int(special.get("@steps", -1))
    key, length = ("train.steps", steps) if steps > 0 else ("train.epochs", float(special["@epochs"]))
    found[key] = length
    draft.carried.append(f"length -> {key}: {length}")
    warmup = float(special.get("@warmup_steps", 0))
    if warmup >= 1 and steps <= 0:
        draft.left.append(
            "warmup_steps: the number of steps is not known; train.warmup is a share of it (default 0.05)."
        )
        return
    found["train.warmup"] = warmup / steps if warmup >= 1 else warmup or float(special["@warmup"])
    draft.carried.append(f"warm-up -> train.warmup: {found['train.warmup']:g}")


def _to_yaml(draft: Draft) -> str:
    recipe: Json = {"model": {}, "adapter": {}, "data": {}, "privacy": {"epsilon": 8.0}, "train": {}}
    for key, value in draft.found.items():
        section, _, name = key.rpartition(".")
        (recipe.setdefault(section, {}) if section else recipe)[name] = value
    recipe["output_dir"] = recipe.pop("output_dir", f"runs/{draft.path.stem}")
    try:
        RunConfig.model_validate(recipe)
    except ValidationError as error:
        raise ConfigError("\n".join(f"{draft.path}: {line}" for line in explain(error, RunConfig, RETIRED))) from None
    return yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True)
