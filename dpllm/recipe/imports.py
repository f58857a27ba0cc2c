"""A configuration of LLaMA-Factory, axolotl or TRL as a recipe: what carries over, and what has no private counterpart.

Comes in: their YAML file. Goes out: a recipe that parses, and a line for each of their keys. ``imports.yaml`` says where a key
goes, or why it goes nowhere. No data are opened; LLaMA-Factory's dataset_info.json names them.
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
    """A configuration and what of it a recipe can hold, filled key by key."""

    path: Path
    tool: str
    special: Json = field(default_factory=dict)  # "@..." of imports.yaml -> value
    said: dict[str, str] = field(default_factory=dict)  # the same -> their key with its value, until a line tells it
    found: Json = field(default_factory=dict)  # our key -> value
    carried: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    recipe: str = ""  # YAML, at the end

    def carry(self, word: str, key: str, value: Any) -> None:
        """Sets our key by what their key for ``word`` says, and tells it."""
        self.found[key] = value
        self.carried.append(f"{self.said.pop(word)} -> {key}: {value}")

    def leave(self, word: str, why: str) -> None:
        """Tells why their key for ``word`` is not carried over."""
        self.left.append(f"{self.said.pop(word).partition(': ')[0]}: {why}")

    def drop(self, *keys: str, why: str) -> None:
        """Takes back what was carried to keys that begin so, and tells why."""
        for key in [key for key in self.found if key.startswith(keys)]:
            del self.found[key]
        for line in [line for line in self.carried if line.partition(" -> ")[2].startswith(keys)]:
            self.carried.remove(line)
            self.left.append(f"{line.partition(': ')[0]}: {why}")


def _listed(value: Any) -> list[Any]:
    return [part.strip() for part in value.split(",")] if isinstance(value, str) else list(value or [])


class _No(Exception):
    """Why a value is not carried over."""


def _optimizer(value: Any) -> str:
    for name in ("adamw", "sgd"):
        if str(value).lower().removeprefix("paged_").startswith(name):
            return name
    raise _No(f"a recipe knows adamw and sgd, so its default, adamw, replaces {value}")


def _schedule(value: Any) -> str:
    """By its whole name: cosine_with_min_lr is another curve than cosine."""
    name = str(value).lower().removesuffix("_with_warmup")
    if name in ("linear", "cosine", "constant"):
        return name
    raise _No(f"a recipe knows linear, cosine (both decay to zero) and constant; linear replaces {value}")


def _whole(value: Any) -> int:
    if float(value) < 1 or not float(value).is_integer():
        raise _No("a recipe counts in whole steps")
    return int(value)


def _off(value: Any, why: str) -> Any:
    if value:
        raise _No(why)
    return value


def _one_adapter(value: Any) -> str:
    if not isinstance(value, str) or "," in value:
        raise _No("a recipe starts from one adapter; merge the others into the base model first")
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
    "adapter.last_blocks": _whole,
    "adapter.r": lambda value: int(str(value)),  # of "8" too, and not of 8.5
    "data.columns": lambda value: {"text": value} if value != "text" else None,
    "train.learning_rate": float,
    "train.weight_decay": float,
    "train.epochs": float,
    "train.warmup": float,
    "train.steps": lambda value: int(value) if int(value) > 0 else None,
    "train.optimizer": _optimizer,
    "train.lr_scheduler": _schedule,
    "train.eval_every": _whole,
    "train.checkpoint_every": _whole,
    "telemetry.trackers": lambda value: sorted({"tensorboard", "wandb", "mlflow", "trackio"} & set(_listed(value))),
    "model.quantization": lambda value: f"{value}bit",
    "model.gradient_checkpointing": bool,
    "model.adapter": _one_adapter,
}
"""Our key -> its value from theirs; None where there is nothing to set."""


def import_config(path: Path) -> Imported:
    """Reads a configuration and says what of it a recipe can hold.

    Raises:
        ConfigError: No YAML, of none of the three tools, trains on preferences or rewards, or names no model or data.
    """
    raw = {key: value for key, value in read_recipe(path).items() if value is not None}
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
        draft.carried += [f"{line} -> nothing to set" for line in draft.said.values()]
        if "wandb_project" in raw:
            draft.found.setdefault("telemetry.trackers", ["wandb"])
    except (TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise ConfigError(
            f"{path}: has a value of another type than {draft.tool} documents ({error}). Fix it."
        ) from None
    draft.left = list(dict.fromkeys(draft.left))
    draft.recipe = _to_yaml(draft)
    return draft


def _tool(path: Path, raw: Json) -> str:
    if "base_model" in raw:
        return "axolotl"
    if "model_name_or_path" in raw:
        own = {"stage", "finetuning_type", "cutoff_len", "dataset", "template"}
        return "LLaMA-Factory" if own & raw.keys() else "TRL"
    raise ConfigError(
        f"{path}: is not a configuration of LLaMA-Factory or TRL (model_name_or_path) or of axolotl (base_model), so nothing "
        "says which model to train. Name such a file, or write a recipe as in docs/howto/own-data.md."
    )


def _outside(key: str, value: Any) -> bool:
    """Of a training on preferences or rewards; 0 is a value too."""
    if key in ("loss_type", "stage"):
        return not str(value).startswith(tuple(TABLES["supervised"].split()))
    names = TABLES["outside"].split()
    outside = key in names or key.startswith(tuple(name for name in names if name.endswith("_")))
    return outside and value is not False


def _refuse(path: Path, what: str) -> None:
    raise ConfigError(
        f"{path}: {what} trains on preferences or rewards, of which nothing is imported. Import a configuration of sft; for DPO "
        "set train.objective: dpo and data.format: preference in the recipe."
    )


def _carry(draft: Imported, key: str, value: Any, note: str) -> None:
    """One key with its value: to the recipe's key, to those that several keys decide, or to what is left out."""
    ours = TABLES[draft.tool].get(key) or TABLES["trainer"].get(key)
    said = key if isinstance(value, list | dict) else f"{key}: {value}{note}"
    try:
        if ours is None:
            raise _No(_reason(key))
        if isinstance(ours, dict):  # a flag that stands for a value
            ((ours, ready),) = ours.items()
            ready = "auto" if value == "auto" else ready if value else None
        else:
            ready = CONVERT.get(ours, lambda same: same)(value)
    except _No as why:
        draft.left.append(f"{key}: {why}.")
        return
    draft.said[ours] = said
    if ours.startswith("@"):
        draft.special[ours] = ready
    elif ready is not None:
        draft.carry(ours, ours, ready)
    else:
        draft.carried.append(f"{draft.said.pop(ours)} -> nothing to set")


def _reason(key: str) -> str:
    for entry in TABLES["no_counterpart"]:
        if key in entry["keys"].split():
            return str(entry["why"])
    if key.startswith(tuple(TABLES["no_matter"].split())):
        return "changes logs, speed or files, nothing that a recipe sets"
    return "unknown, not read; dpllm plan --keys lists what a recipe can set"


def _method(draft: Imported) -> None:
    method, found = draft.special.get("@method", False), draft.found
    their = draft.said.setdefault("@method", "full fine-tuning")
    if method in (True, "lora", "qlora"):
        draft.carry("@method", "adapter.method", "lora")
        found.pop("adapter.last_blocks", None)
        if method == "qlora" and found.setdefault("model.quantization", "4bit") == "4bit":
            draft.carried.append(f"{their} -> model.quantization: 4bit")
        return
    last_blocks = found.get("adapter.last_blocks", 2)
    draft.drop("adapter.", "model.adapter", "model.quantization", why="belongs to an adapter, and none trains.")
    draft.carry("@method", "adapter.method", "frozen")
    found["adapter.last_blocks"] = last_blocks
    if method != "freeze":
        why = "full fine-tuning: noise grows with the number of weights that train"
        if method not in (False, "full", "none"):
            why = f"method {method}: a recipe trains LoRA or the last blocks"
        draft.left.append(f"{why}, so the last 2 blocks train; or set adapter.method: lora.")


def _length(draft: Imported) -> None:
    found = draft.found
    rows, times = int(draft.special["@rows"]), int(draft.special["@accumulated"])
    draft.carry("@accumulated", "train.batch_size", rows * times)
    draft.carried[-1] += "; multiply it by the number of processes that you used"
    steps = int(found.get("train.steps", 0))
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
    known = _dataset_info(draft)
    for key, word in (("data.train", "@train"), ("data.eval", "@eval")):
        entries = [known.get(str(entry), entry) for entry in _listed(draft.special.get(word))]
        if sources := [source for entry in entries for source in _entry(draft, key, entry)]:
            draft.carry(word, key, sources[0] if len(sources) == 1 else sources)


def _dataset_info(draft: Imported) -> Json:
    if draft.tool != "LLaMA-Factory":
        return {}
    wanted = Path(draft.special.get("@folder", "data"))
    for folder in (wanted, draft.path.parent / wanted):
        if (folder / "dataset_info.json").is_file():
            known = json.loads((folder / "dataset_info.json").read_text(encoding="utf-8"))
            return {name: {"folder": str(folder), **entry} for name, entry in known.items()}
    draft.left.append("dataset: there is no dataset_info.json here to look its names up; type the files.")
    return {}


def _entry(draft: Imported, key: str, entry: Any) -> list[str]:
    """The files or Hub id of one of their datasets."""
    if not isinstance(entry, dict):
        return [str(entry)]
    if entry.get("ranking"):
        _refuse(draft.path, "ranking: true")
    unread = entry.keys() - set(TABLES["datasets"].split())
    draft.left += [f"datasets.{name}: {_reason(name)}." for name in sorted(unread)]
    named = entry.get("data_files") or entry.get("hf_hub_url") or entry.get("path")
    if "file_name" in entry:
        named = str(Path(entry.get("folder", "")) / entry["file_name"])
    files = [named] if isinstance(named, str) else list(named or [])
    usual = "train" if draft.tool != "TRL" and any(map(is_hub_id, files)) else None  # TRL: dataset_train_split
    split = entry.get("split") or usual
    if split is not None and draft.found.setdefault(f"{key}_split", split) != split:
        raise ConfigError(
            f"{draft.path}: its datasets name several splits, {split!r} among them, but a recipe has one {key}_split for all, so "
            "rows would be misread. Write the datasets as files."
        )
    return files


def _to_yaml(draft: Imported) -> str:
    recipe: Json = {"model": {}, "adapter": {}, "data": {}, "privacy": {"epsilon": 8.0}, "train": {}}
    for key, value in draft.found.items():
        section, _, name = key.rpartition(".")
        (recipe.setdefault(section, {}) if section else recipe)[name] = value
    recipe["output_dir"] = recipe.pop("output_dir", f"runs/{draft.path.stem}")
    make_config(recipe, None, str(draft.path))  # refuses what no recipe may hold
    return yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True)
