"""A configuration of LLaMA-Factory, axolotl or TRL as a recipe: what carries over, and what has no private counterpart.

Comes in: their YAML file. Goes out: a recipe that parses, and a line for each of their keys. ``imports.yaml`` says where a key
goes, or why it goes nowhere. It must not open any data; LLaMA-Factory's dataset_info.json names them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from pydantic import ValidationError

from dpllm.errors import ConfigError
from dpllm.recipe.config import RETIRED, RunConfig
from dpllm.recipe.section import explain, read_recipe

Json = dict[str, Any]


@cache
def _tables() -> Json:
    return read_recipe(Path(__file__).with_name("imports.yaml"))


class Imported(NamedTuple):
    """A recipe and where it came from."""

    tool: str
    recipe: str  # YAML
    carried: list[str]
    left: list[str]


@dataclass
class _Draft:
    path: Path
    tool: str
    special: Json = field(default_factory=dict)  # "@..." of imports.yaml -> value
    found: Json = field(default_factory=dict)  # our key -> value
    carried: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)


class _No(Exception):
    """Why a value is not carried over."""


def _listed(value: Any) -> list[Any]:
    return [part.strip() for part in value.split(",")] if isinstance(value, str) else list(value or [])


def _layers(value: Any) -> Any:
    return "auto" if value in ("all", "all-linear", ["all-linear"]) else _listed(value)


def _one_of(*known: str) -> Callable[[Any], str]:
    """The one that the value begins with, or else the first."""
    return lambda value: next((name for name in known if str(value).lower().startswith(name)), known[0])


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


CONVERT: dict[str, Callable[[Any], Any]] = {
    "adapter.target_modules": _layers,
    "adapter.modules_to_save": _listed,
    "adapter.dropout": _off("its masks follow a row's place in the batch, so dropout is refused in private training"),
    "adapter.use_dora": _off("the magnitude of DoRA gives no gradient of single rows to clip; LoRA and rsLoRA do"),
    "adapter.last_blocks": _whole,
    "train.learning_rate": float,
    "train.weight_decay": float,
    "train.optimizer": _one_of("adamw", "sgd"),
    "train.lr_scheduler": _one_of("linear", "cosine", "constant"),
    "train.eval_every": _whole,
    "train.checkpoint_every": _whole,
    "telemetry.trackers": lambda value: sorted({"tensorboard", "wandb", "mlflow", "trackio"} & set(_listed(value))),
    "model.quantization": lambda value: f"{value}bit",
    "model.gradient_checkpointing": bool,
}


def import_config(path: Path) -> Imported:
    """Reads a configuration and says what of it a recipe can hold.

    Raises:
        ConfigError: No YAML, of none of the three tools, trains on preferences or rewards, or names no model or data.
    """
    raw = {key: value for key, value in read_recipe(path).items() if value is not None}
    draft = _Draft(path, _tool(path, raw))
    for key in _tables()["outside"].split():
        if raw.get(key):
            _refuse(path, f"{key}: {raw[key]}")
    defaults = _tables()["defaults"][draft.tool]
    if draft.tool == "LLaMA-Factory":
        defaults = {**defaults, "lora_alpha": 2 * raw.get("lora_rank", defaults["lora_rank"])}
    try:
        for key, value in {**defaults, **raw}.items():
            _carry(draft, key, value, "" if key in raw else f" ({draft.tool}'s default)")
        if draft.special.get("@stage", "sft") not in ("sft", "pt"):
            _refuse(path, f"stage: {draft.special['@stage']}")
        for fill in (_method, _length, _sources):
            fill(draft)
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"{path}: holds a value of another kind than {draft.tool} documents, so it cannot be read ({error}). Mend it."
        ) from None
    return Imported(draft.tool, _to_yaml(draft), draft.carried, draft.left)


def _carry(draft: _Draft, key: str, value: Any, note: str) -> None:
    """One key with its value: to the recipe's key, to those that several keys decide, or to what is left out."""
    ours = _tables()[draft.tool].get(key) or _tables()["trainer"].get(key)
    try:
        if ours is None:
            raise _No(_reason(key))
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


def _refuse(path: Path, what: str) -> None:
    raise ConfigError(
        f"{path}: {what} trains on preferences or rewards, whose loss compares several texts of several people, and dpllm clips "
        "the cross-entropy of one person's text. Import the configuration of the supervised stage (sft)."
    )


def _reason(key: str) -> str:
    for entry in _tables()["no_counterpart"]:
        if key in entry["keys"].split():
            return str(entry["why"])
    if key.startswith(tuple(_tables()["no_matter"].split())):
        return "changes logs, speed or files, and nothing that a recipe says"
    return "unknown to this table, and not read; dpllm plan --keys lists what a recipe can say"


def _method(draft: _Draft) -> None:
    """What trains, and in which precision."""
    special, found = draft.special, draft.found
    method = special.get("@method", False)
    if method in (True, "lora", "qlora"):
        found["adapter.method"] = "lora"
        found.pop("adapter.last_blocks", None)
        if special.get("@linear"):
            found["adapter.target_modules"] = "auto"
        if method == "qlora" or special.get("@4bit"):
            found["model.quantization"] = "4bit"
        elif special.get("@8bit"):
            found["model.quantization"] = "8bit"
    else:
        last_blocks = found.get("adapter.last_blocks", 2)
        for key in [key for key in found if key.startswith("adapter.") or key == "model.quantization"]:
            del found[key]
        draft.carried = [line for line in draft.carried if " -> adapter." not in line]  # of LoRA
        found |= {"adapter.method": "frozen", "adapter.last_blocks": last_blocks}
        if method != "freeze":
            draft.left.append(
                "full fine-tuning: noise grows with the number of weights that train, so the last 2 blocks do; or set "
                "adapter.method: lora."
            )
    draft.carried.append(f"method -> adapter.method: {found['adapter.method']}")
    for precision in ("bf16", "fp16"):
        if special.get(f"@{precision}") in (True, "full"):
            found["train.precision"] = precision
            draft.carried.append(f"{precision} -> train.precision: {precision}")


def _length(draft: _Draft) -> None:
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


def _sources(draft: _Draft) -> None:
    """data.train and data.eval, their columns and format."""
    special, found, known = draft.special, draft.found, _dataset_info(draft)
    evaluated = special.get("@eval")
    if str(special.get("@evaluate", "no")) != "no":
        evaluated = special.get("@train")
        found.setdefault("data.eval_split", "test")
    else:
        found.pop("data.eval_split", None)
    if special.get("@text", "text") != "text":
        found["data.columns"] = {"text": special["@text"]}
    for key, value in (("data.train", special.get("@train")), ("data.eval", evaluated)):
        named = [name for entry in _listed(value) for name in _entry(draft, key, known.get(str(entry), entry))]
        if named:
            found[key] = named[0] if len(named) == 1 else named
            draft.carried.append(f"datasets -> {key}: {', '.join(named)}")


def _dataset_info(draft: _Draft) -> Json:
    """LLaMA-Factory's names of datasets -> what it says of them."""
    wanted = Path(draft.special.get("@folder", "data"))
    for folder in (wanted, draft.path.parent / wanted) if draft.tool == "LLaMA-Factory" else ():
        if (folder / "dataset_info.json").is_file():
            known = json.loads((folder / "dataset_info.json").read_text(encoding="utf-8"))
            return {name: {"folder": str(folder), **entry} for name, entry in known.items()}
    if draft.tool == "LLaMA-Factory":
        draft.left.append("dataset: there is no dataset_info.json here, so names stand for files; type the files.")
    return {}


FORMATS = {"alpaca": "prompt_completion", "chat_template": "messages", "sharegpt": "messages", "completion": "text"}
COLUMNS = {
    "prompt": "instruction", "query": "input", "response": "output", "messages": "conversations", "field": "text", "system":
    "system", "field_messages": "conversations", "field_instruction": "instruction", "field_input": "input", "field_output":
    "output", "field_system": "system",
}  # fmt: skip


def _entry(draft: _Draft, key: str, entry: Any) -> list[str]:
    """The files or Hub id of one of their datasets; its columns and its format go to the recipe."""
    if not isinstance(entry, dict):
        return [str(entry)]
    if entry.get("ranking"):
        _refuse(draft.path, "ranking: true")
    found, kind = draft.found, entry.get("type")
    said = {**entry, **(entry.get("columns") or {}), **(kind if isinstance(kind, dict) else {})}
    renamed = {ours: said[theirs] for theirs, ours in COLUMNS.items() if isinstance(said.get(theirs), str)}
    if draft.special.get("@stage") == "pt" and "instruction" in renamed:
        renamed = {"text": renamed["instruction"]}
    if fmt := FORMATS.get(str(entry.get("formatting", kind)).split(".")[0].split(":")[0]):
        found["data.format"] = fmt if found.get("data.format", fmt) == fmt else "auto"
    if renamed := {ours: name for ours, name in renamed.items() if name not in (ours, "messages")}:
        found["data.columns"] = {**found.get("data.columns", {}), **renamed}
    if "split" in entry:
        found[f"{key}_split"] = entry["split"]
    draft.left += [f"datasets.{other}: {_reason(other)}." for other in ("weight", "name") if other in entry]
    named = entry.get("data_files") or entry.get("hf_hub_url") or entry.get("path")
    if "file_name" in entry:
        named = str(Path(entry["folder"]) / entry["file_name"])
    return [named] if isinstance(named, str) else list(named or [])


def _to_yaml(draft: _Draft) -> str:
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
