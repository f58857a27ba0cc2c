"""Converts a configuration of LLaMA-Factory, axolotl or TRL to a recipe, and reports what has no private counterpart.

Comes in: their YAML file. Goes out: a recipe that parses, and a line for each of their keys. ``imports.yaml`` maps each key to a
recipe key, or says why there is none. Opens no data; LLaMA-Factory's dataset_info.json names them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from dpllm.errors import ConfigError
from dpllm.recipe.config import make_config
from dpllm.recipe.names import is_hub_id
from dpllm.recipe.section import read_recipe

Json = dict[str, Any]
TABLES: Json = read_recipe(Path(__file__).with_name("imports.yaml"))


@dataclass
class Imported:
    """A configuration of another tool and the recipe made from it, key by key."""

    path: Path
    tool: str
    special: Json = field(default_factory=dict)  # "@..." of imports.yaml -> value
    shown: dict[str, str] = field(default_factory=dict)  # the same -> their key and value, until reported
    values: Json = field(default_factory=dict)  # the recipe's key -> value
    carried: list[str] = field(default_factory=list)
    omitted: list[str] = field(default_factory=list)
    recipe: str = ""  # YAML, at the end

    def carry(self, word: str, key: str, value: Any) -> None:
        """Sets a recipe key from their key for ``word``, and reports it."""
        self.values[key] = value
        self.carried.append(f"{self.shown.pop(word)} -> {key}: {value}")

    def leave(self, word: str, why: str) -> None:
        """Reports why their key for ``word`` is not carried over."""
        self.omitted.append(f"{self.shown.pop(word).partition(': ')[0]}: {why}")

    def drop(self, *keys: str, why: str) -> None:
        """Removes recipe keys with these prefixes, and reports why."""
        for key in [key for key in self.values if key.startswith(keys)]:
            del self.values[key]
        for line in [line for line in self.carried if line.partition(" -> ")[2].startswith(keys)]:
            self.carried.remove(line)
            self.omitted.append(f"{line.partition(': ')[0]}: {why}")


def _listed(value: Any) -> list[Any]:
    return [part.strip() for part in value.split(",")] if isinstance(value, str) else list(value or [])


class _NotCarried(Exception):
    """The reason why a value is not carried over."""


def _optimizer(value: Any) -> str:
    for name in ("adamw", "sgd"):
        if str(value).lower().removeprefix("paged_").startswith(name):
            return name
    raise _NotCarried(f"a recipe knows adamw and sgd, so its default, adamw, replaces {value}")


def _schedule(value: Any) -> str:
    """Compares the complete name: cosine_with_min_lr is a different curve from cosine."""
    name = str(value).lower().removesuffix("_with_warmup")
    if name in ("linear", "cosine", "constant"):
        return name
    raise _NotCarried(f"a recipe knows linear, cosine (both decay to zero) and constant; linear replaces {value}")


def _whole_number(value: Any) -> int:
    if float(value) < 1 or not float(value).is_integer():
        raise _NotCarried("a recipe counts in whole steps")
    return int(value)


def _off(value: Any, why: str) -> Any:
    if value:
        raise _NotCarried(why)
    return value


def _one_adapter(value: Any) -> str:
    if not isinstance(value, str) or "," in value:
        raise _NotCarried("a recipe starts from one adapter; merge the others into the base model first")
    return value


CONVERT: dict[str, Callable[[Any], Any]] = {
    "adapter.target_modules": lambda value: (
        "auto" if value in ("all", "all-linear", ["all-linear"]) else _listed(value)
    ),
    "adapter.modules_to_save": _listed,
    "adapter.dropout": partial(
        _off, why="its masks depend on a row's place in the batch, so private training refuses it"
    ),
    "adapter.use_dora": partial(_off, why="DoRA's magnitude has no per-example gradient to clip; LoRA and rsLoRA have"),
    "adapter.last_blocks": _whole_number,
    "adapter.r": lambda value: int(str(value)),  # accepts "8", but not 8.5
    "data.columns": lambda value: {"text": value} if value != "text" else None,
    "train.learning_rate": float,
    "train.weight_decay": float,
    "train.epochs": float,
    "train.warmup": float,
    "train.steps": lambda value: int(value) if int(value) > 0 else None,
    "train.optimizer": _optimizer,
    "train.lr_scheduler": _schedule,
    "train.eval_every": _whole_number,
    "train.checkpoint_every": _whole_number,
    "telemetry.trackers": lambda value: sorted({"tensorboard", "wandb", "mlflow", "trackio"} & set(_listed(value))),
    "model.quantization": lambda value: f"{value}bit",
    "model.gradient_checkpointing": bool,
    "model.adapter": _one_adapter,
}
"""Recipe key -> conversion of their value; None if there is nothing to set."""


def import_config(path: Path) -> Imported:
    """Converts a configuration of another tool to a recipe.

    Raises:
        ConfigError: The file is not YAML or not of these tools, trains on preferences or rewards, or names no model or data.
    """
    raw = {str(key): value for key, value in read_recipe(path).items() if value is not None}  # YAML reads "on" as true
    draft = Imported(path, _tool(path, raw))
    for key, value in raw.items():
        if _outside(key, value):
            _refuse(path, f"{key}: {value}")
    try:
        defaults = TABLES["defaults"][draft.tool]
        if draft.tool == "LLaMA-Factory":
            defaults = {**defaults, "lora_alpha": 2 * CONVERT["adapter.r"]({**defaults, **raw}["lora_rank"])}
        for key, value in {**defaults, **raw}.items():
            _carry(draft, key, value, "" if key in raw else f" ({draft.tool}'s default)")
        for fill in (_method, _length, _datasets):
            fill(draft)
        draft.carried += [f"{line} -> nothing to set" for line in draft.shown.values()]
        if "wandb_project" in raw:
            draft.values.setdefault("telemetry.trackers", ["wandb"])
    except (TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise ConfigError(
            f"{path}: has a value of another type than {draft.tool} documents ({error}). Fix it."
        ) from None
    draft.omitted = list(dict.fromkeys(draft.omitted))
    draft.recipe = _to_yaml(draft)
    return draft


def _tool(path: Path, raw: Json) -> str:
    if "base_model" in raw:
        return "axolotl"
    if "model_name_or_path" in raw:
        keys_of_llama_factory = {"stage", "finetuning_type", "cutoff_len", "dataset", "template"}
        return "LLaMA-Factory" if keys_of_llama_factory & raw.keys() else "TRL"
    raise ConfigError(
        f"{path}: is not a configuration of LLaMA-Factory or TRL (model_name_or_path) or of axolotl (base_model), so nothing "
        "says which model to train. Name such a file, or write a recipe as in docs/howto/own-data.md."
    )


def _outside(key: str, value: Any) -> bool:
    """Whether a key belongs to training on preferences or rewards; 0 counts as a value."""
    if key in ("loss_type", "stage"):
        return not str(value).startswith(tuple(TABLES["supervised"].split()))
    names = TABLES["outside"].split()
    outside = key in names or key.startswith(tuple(name for name in names if name.endswith("_")))
    return outside and value is not False


def _refuse(path: Path, sign: str) -> None:
    raise ConfigError(
        f"{path}: {sign} trains on preferences or rewards, which cannot be imported. Import a configuration of sft; for DPO "
        "set train.objective: dpo and data.format: preference in the recipe."
    )


def _carry(draft: Imported, key: str, value: Any, note: str) -> None:
    """Converts one key to a recipe key, or stores it for recipe keys that depend on several, or leaves it out."""
    recipe_key = TABLES[draft.tool].get(key) or TABLES["trainer"].get(key)
    shown = key if isinstance(value, list | dict) else f"{key}: {value}{note}"
    try:
        if recipe_key is None:
            raise _NotCarried(_reason(key))
        if isinstance(recipe_key, dict):  # a flag that means a value
            ((recipe_key, converted),) = recipe_key.items()
            converted = "auto" if value == "auto" else converted if value else None
        else:
            converted = CONVERT.get(recipe_key, lambda same: same)(value)
    except _NotCarried as reason:
        draft.omitted.append(f"{key}: {reason}.")
        return
    draft.shown[recipe_key] = shown
    if recipe_key.startswith("@"):
        draft.special[recipe_key] = converted
    elif converted is not None:
        draft.carry(recipe_key, recipe_key, converted)
    else:
        draft.carried.append(f"{draft.shown.pop(recipe_key)} -> nothing to set")


def _reason(key: str) -> str:
    for entry in TABLES["no_counterpart"]:
        if key in entry["keys"].split():
            return str(entry["why"])
    if key.startswith(tuple(TABLES["no_matter"].split())):
        return "changes logs, speed or files, nothing that a recipe sets"
    return "unknown, not read; dpllm plan --keys lists what a recipe can set"


def _method(draft: Imported) -> None:
    method, values = draft.special.get("@method", False), draft.values
    shown = draft.shown.setdefault("@method", "full fine-tuning")
    if method in (True, "lora", "qlora"):
        draft.carry("@method", "adapter.method", "lora")
        values.pop("adapter.last_blocks", None)
        if method == "qlora" and values.setdefault("model.quantization", "4bit") == "4bit":
            draft.carried.append(f"{shown} -> model.quantization: 4bit")
        return
    last_blocks = values.get("adapter.last_blocks", 2)
    draft.drop("adapter.", "model.adapter", "model.quantization", why="belongs to an adapter, and none trains.")
    draft.carry("@method", "adapter.method", "frozen")
    values["adapter.last_blocks"] = last_blocks
    if method != "freeze":
        reason = "full fine-tuning: noise grows with the number of weights that train"
        if method not in (False, "full", "none"):
            reason = f"method {method}: a recipe trains LoRA or the last blocks"
        draft.omitted.append(f"{reason}, so the last 2 blocks train; or set adapter.method: lora.")


def _length(draft: Imported) -> None:
    values = draft.values
    batch, accumulated = int(draft.special["@rows"]), int(draft.special["@accumulated"])
    draft.carry("@accumulated", "train.batch_size", batch * accumulated)
    draft.carried[-1] += "; multiply it by the number of processes that you used"
    steps = int(values.get("train.steps", 0))
    if steps:
        draft.drop("train.epochs", why="the number of steps decides.")
    if warmup := float(draft.special.get("@warmup_steps", 0)):
        draft.drop("train.warmup", why="the number of warm-up steps decides.")
        if warmup >= 1 and not steps:
            draft.leave(
                "@warmup_steps", "the number of steps is not known; train.warmup is a share of it (default 0.05)."
            )
        else:
            draft.carry("@warmup_steps", "train.warmup", warmup / steps if warmup >= 1 else warmup)


def _datasets(draft: Imported) -> None:
    registered = _dataset_info(draft)
    for key, word in (("data.train", "@train"), ("data.eval", "@eval")):
        entries = [registered.get(str(entry), entry) for entry in _listed(draft.special.get(word))]
        if sources := [source for entry in entries for source in _entry(draft, key, entry)]:
            draft.carry(word, key, sources[0] if len(sources) == 1 else sources)


def _dataset_info(draft: Imported) -> Json:
    if draft.tool != "LLaMA-Factory":
        return {}
    named_folder = Path(draft.special.get("@folder", "data"))
    for folder in (named_folder, draft.path.parent / named_folder):
        if (folder / "dataset_info.json").is_file():
            registered = json.loads((folder / "dataset_info.json").read_text(encoding="utf-8"))
            return {name: {"folder": str(folder), **entry} for name, entry in registered.items()}
    draft.omitted.append("dataset: there is no dataset_info.json here to look its names up; type the files.")
    return {}


def _entry(draft: Imported, key: str, entry: Any) -> list[str]:
    if not isinstance(entry, dict):
        return [str(entry)]
    if entry.get("ranking"):
        _refuse(draft.path, "ranking: true")
    unread = entry.keys() - set(TABLES["datasets"].split())
    draft.omitted += [f"datasets.{name}: {_reason(name)}." for name in sorted(unread)]
    source = entry.get("data_files") or entry.get("hf_hub_url") or entry.get("path")
    if "file_name" in entry:
        source = str(Path(entry.get("folder", "")) / entry["file_name"])
    files = [source] if isinstance(source, str) else list(source or [])
    default_split = "train" if draft.tool != "TRL" and any(map(is_hub_id, files)) else None  # TRL: dataset_train_split
    split = entry.get("split") or default_split
    if split is not None and draft.values.setdefault(f"{key}_split", split) != split:
        raise ConfigError(
            f"{draft.path}: its datasets name several splits, {split!r} among them, but a recipe has one {key}_split for all, so "
            "rows would be misread. Write the datasets as files."
        )
    return files


def _to_yaml(draft: Imported) -> str:
    recipe: Json = {"model": {}, "adapter": {}, "data": {}, "privacy": {"epsilon": 8.0}, "train": {}}
    for key, value in draft.values.items():
        section, _, name = key.rpartition(".")
        (recipe.setdefault(section, {}) if section else recipe)[name] = value
    recipe["output_dir"] = recipe.pop("output_dir", f"runs/{draft.path.stem}")
    make_config(recipe, None, str(draft.path))  # refuses invalid recipes
    return yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True)
