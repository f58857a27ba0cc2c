"""A configuration of LLaMA-Factory, axolotl or TRL as a recipe: what carries over, and what has no private counterpart.

Comes in: their YAML file. Goes out: a recipe that parses, and a line for each of their keys. ``imports.yaml`` says where a key
goes, or why it goes nowhere. No data are opened; LLaMA-Factory's dataset_info.json names them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
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
    pairs: bool = False  # of DPO
    special: Json = field(default_factory=dict)  # "@..." of imports.yaml -> value
    said: dict[str, str] = field(default_factory=dict)  # the same -> their key with its value, until a line tells it
    told: set[str] = field(default_factory=set)  # those of which a line does
    found: Json = field(default_factory=dict)  # our key -> value
    carried: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    recipe: str = ""  # YAML, at the end

    def carry(self, word: str, key: str, value: Any) -> None:
        """Sets our key by what their key for ``word`` says, and tells it."""
        self.found[key] = value
        their = self.said.get(word, word.removeprefix("@"))
        self.carried.append(f"{their} -> {key}: {value}")
        self.told.add(word)

    def leave(self, word: str, why: str) -> None:
        """Tells why their key for ``word`` is not carried over."""
        self.left.append(f"{self.said.get(word, word).partition(': ')[0]}: {why}")
        self.told.add(word)

    def drop(self, *keys: str) -> list[str]:
        """Takes back what was carried to keys that begin so, and returns its lines."""
        for key in [key for key in self.found if key.startswith(keys)]:
            del self.found[key]
        dropped = [line for line in self.carried if line.partition(" -> ")[2].startswith(keys)]
        self.carried = [line for line in self.carried if line not in dropped]
        return dropped


def _listed(value: Any) -> list[Any]:
    """The parts of a list, or of a word with commas."""
    return [part.strip() for part in value.split(",")] if isinstance(value, str) else list(value or [])


class _No(Exception):
    """Why a value is not carried over."""


def _one_of(*known: str) -> Callable[[Any], str]:
    """The one that the value begins with; the first is the recipe's default."""

    def convert(value: Any) -> str:
        for name in known:
            if str(value).lower().removeprefix("paged_").startswith(name):
                return name
        raise _No(f"a recipe knows {', '.join(known)}, so its default, {known[0]}, replaces {value}")

    return convert


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
    "adapter.target_modules": lambda value: (
        "auto" if value in ("all", "all-linear", ["all-linear"]) else _listed(value)
    ),
    "adapter.modules_to_save": _listed,
    "adapter.dropout": _off("its masks depend on a row's place in the batch, so private training refuses it"),
    "adapter.use_dora": _off("DoRA's magnitude has no per-example gradient to clip; LoRA and rsLoRA have"),
    "adapter.last_blocks": _whole,
    "adapter.r": lambda value: int(str(value)),  # of "8" too, and not of 8.5
    "train.learning_rate": float,
    "train.weight_decay": float,
    "train.optimizer": _one_of("adamw", "sgd"),
    "train.lr_scheduler": _schedule,
    "train.eval_every": _whole,
    "train.checkpoint_every": _whole,
    "telemetry.trackers": lambda value: sorted({"tensorboard", "wandb", "mlflow", "trackio"} & set(_listed(value))),
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
    draft = Imported(path, _tool(path, raw))
    try:
        loss = _loss(raw) if draft.tool == "TRL" else None
        draft.pairs = isinstance(loss, str) and loss in TABLES["pair_losses"]
        known = {*TABLES["TRL DPO"], "max_prompt_length", "precompute_ref_log_probs"} if draft.pairs else set()
        for key, value in raw.items():
            if key not in known and _outside(key, value):
                _refuse(path, f"{key}: {value}")
        defaults = TABLES["defaults"]["TRL DPO" if draft.pairs else draft.tool]
        if draft.tool == "LLaMA-Factory":
            defaults = {**defaults, "lora_alpha": 2 * CONVERT["adapter.r"]({**defaults, **raw}["lora_rank"])}
        for key, value in {**defaults, **raw}.items():
            _carry(draft, key, value, "" if key in raw else f" ({draft.tool}'s default)")
        if draft.special.get("@stage", False) not in (False, "sft", "pt"):
            _refuse(path, f"stage: {draft.special['@stage']}")
        for fill in (_method, _length, _datasets):
            fill(draft)
        if draft.pairs:
            _objective(draft, str(loss))
        draft.carried += [f"{line} -> nothing to set" for word, line in draft.said.items() if word not in draft.told]
        if any(key.startswith("wandb_") for key in raw) and draft.found.get("telemetry.project"):
            draft.found.setdefault("telemetry.trackers", ["wandb"])
    except (TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise ConfigError(
            f"{path}: has a value of another type than {draft.tool} documents ({error}). Fix it."
        ) from None
    draft.left = list(dict.fromkeys(draft.left))
    draft.recipe = _to_yaml(draft)
    return draft


def _loss(raw: Json) -> Any:
    """TRL's loss_type; where a configuration of DPO names none, its default."""
    pairs, supervised = (set(TABLES[keys].split()) & raw.keys() for keys in ("pair_keys", "supervised_keys"))
    loss = raw.get("loss_type", TABLES["defaults"]["TRL DPO"]["loss_type"] if pairs and not supervised else None)
    return loss[0] if isinstance(loss, list) and len(loss) == 1 else loss


def _carry(draft: Imported, key: str, value: Any, note: str) -> None:
    """One key with its value: to the recipe's key, to those that several keys decide, or to what is left out."""
    of_pairs = TABLES["TRL DPO"] if draft.pairs else {}
    ours = of_pairs.get(key) or TABLES[draft.tool].get(key) or TABLES["trainer"].get(key)
    try:
        if ours is None:
            raise _No(_reason(key))
        ready = CONVERT.get(ours, lambda same: same)(value)
    except _No as why:
        draft.left.append(f"{key}: {why}.")
        return
    if ours.startswith("@"):
        draft.special[ours] = ready
        draft.said[ours] = f"{key}: {value}{note}"
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
        f"{path}: is not a configuration of LLaMA-Factory or TRL (model_name_or_path) or of axolotl (base_model), so nothing "
        "says which model to train. Name such a file, or write a recipe as in docs/howto/own-data.md."
    )


def _outside(key: str, value: Any) -> bool:
    """Of a training on preferences or rewards; 0 is a value too."""
    names = TABLES["outside"].split()
    outside = key in names or key.startswith(tuple(name for name in names if name.endswith("_")))
    if key == "loss_type":
        outside = not str(value).startswith(tuple(TABLES["supervised_losses"].split()))
    return outside and value is not False


def _reason(key: str) -> str:
    """Why a key has no place in a recipe."""
    for entry in TABLES["no_counterpart"]:
        if key in entry["keys"].split():
            return str(entry["why"])
    if key.startswith(tuple(TABLES["no_matter"].split())):
        return "changes logs, speed or files, nothing that a recipe sets"
    return "unknown, not read; dpllm plan --keys lists what a recipe can set"


def _refuse(path: Path, what: str) -> None:
    raise ConfigError(
        f"{path}: {what} trains on preferences or rewards in a way that dpllm does not: its loss compares texts of several "
        "people, or moves a reference. Import a configuration of sft, or of TRL's DPO with loss_type: sigmoid, robust or ipo."
    )


def _method(draft: Imported) -> None:
    """What trains, and in which precision."""
    special, found = draft.special, draft.found
    method = special.get("@method", False)
    if method in (True, "lora", "qlora"):
        draft.carry("@method", "adapter.method", "lora")
        found.pop("adapter.last_blocks", None)
        if special.get("@new_adapter"):
            draft.drop("model.adapter")
            draft.leave("@new_adapter", "the old adapter becomes part of the base; name the merged model.")
        if special.get("@linear"):
            draft.carry("@linear", "adapter.target_modules", "auto")
        for word, bits in (("@8bit", "8bit"), ("@4bit", "4bit")):
            if special.get(word):
                draft.carry(word, "model.quantization", bits)
        if method == "qlora":
            draft.carry("@method", "model.quantization", "4bit")
    else:
        last_blocks = found.get("adapter.last_blocks", 2)
        draft.drop("adapter.", "model.adapter", "model.quantization")
        draft.carry("@method", "adapter.method", "frozen")
        found["adapter.last_blocks"] = last_blocks
        if method != "freeze":
            why = "full fine-tuning: noise grows with the number of weights that train"
            if method not in (False, "full", "none"):
                why = f"method {method}: a recipe trains LoRA or the last blocks"
            draft.left.append(f"{why}, so the last 2 blocks train; or set adapter.method: lora.")
    asked = {precision: special.get(f"@{precision}") for precision in ("bf16", "fp16")}
    for precision, value in asked.items():
        if value in (True, "full", "auto"):
            draft.carry(f"@{precision}", "train.precision", "auto" if value == "auto" else precision)
    if False in asked.values() and not any(asked.values()):
        draft.carry("@bf16" if asked["bf16"] is False else "@fp16", "train.precision", "fp32")


def _objective(draft: Imported, loss: str) -> None:
    """What DPO calls its loss; with sigmoid, a share of wrong labels makes it conservative."""
    soft = loss == "sigmoid" and draft.found.get("train.label_smoothing", 0) > 0
    draft.carry("@loss", "train.objective", "cdpo" if soft else TABLES["pair_losses"][loss])
    draft.found["data.format"] = "preference"
    if "default" in draft.said["@loss"]:
        draft.left.append(
            "loss_type: not given; KTO and ORPO leave it out too, so check that this is a configuration of DPO."
        )
    if loss == "ipo":
        draft.left.append("loss_type: ipo compares sums of log-likelihoods here, and TRL their means over tokens.")


def _length(draft: Imported) -> None:
    """Batch, epochs or steps, warm-up."""
    special = draft.special
    rows, times = int(special["@rows"]), int(special.get("@accumulated", 1))
    draft.carry("@rows", "train.physical_batch_size", rows)
    draft.carry("@accumulated" if "@accumulated" in special else "@rows", "train.batch_size", rows * times)
    draft.carried[-1] += "; multiply it by the number of processes that you used"
    steps = int(special.get("@steps", -1))
    if steps > 0:
        draft.carry("@steps", "train.steps", steps)
        draft.leave("@epochs", "the number of steps decides.")
    else:
        draft.carry("@epochs", "train.epochs", float(special["@epochs"]))
    warmup = float(special.get("@warmup_steps", 0))
    if warmup >= 1 and steps <= 0:
        draft.leave("@warmup_steps", "the number of steps is not known; train.warmup is a share of it (default 0.05).")
    elif warmup:
        draft.carry("@warmup_steps", "train.warmup", warmup / steps if warmup >= 1 else warmup)
    else:
        draft.carry("@warmup", "train.warmup", float(special["@warmup"]))


def _datasets(draft: Imported) -> None:
    """data.train and data.eval, their columns and format."""
    special, found, known = draft.special, draft.found, _dataset_info(draft)
    held_out = "@eval"
    if str(special.get("@evaluate", "no")).lower() not in ("no", "false"):  # which is what YAML makes of no
        held_out = "@train"
        found.setdefault("data.eval_split", "test")
    if special.get("@text", "text") != "text":
        draft.carry("@text", "data.columns", {"text": special["@text"]})
    sources: dict[str, list[str]] = {}
    for key, word in (("data.train", "@train"), ("data.eval", held_out)):
        value = special.get(word)
        named = [name for entry in _listed(value) for name in _entry(draft, key, known.get(str(entry), entry))]
        again = set(named) & set(sources.get("data.train", []))
        one_split = found.get("data.train_split", "train") == found.get("data.eval_split", "train")
        if again and (one_split or not all(map(is_hub_id, again))):  # a file has no splits
            draft.left.append("data.eval: these rows would train too; name a file of held-out rows there.")
        elif named:
            found[key] = named[0] if len(named) == 1 else named
            draft.told.add("@evaluate" if (key, word) == ("data.eval", "@train") else word)
            their = draft.said[word if key == "data.train" or word == "@eval" else "@evaluate"].partition(": ")[0]
            draft.carried.append(f"{their} -> {key}: {', '.join(named)}")
        sources[key] = named
    if "data.eval" not in found:
        draft.left += [f"{line.split(':')[0]}: nothing is evaluated." for line in draft.drop("data.eval_split")]


def _dataset_info(draft: Imported) -> Json:
    """LLaMA-Factory's names of datasets -> what it says of them."""
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
    """The files or Hub id of one of their datasets; its columns and its format go to the recipe."""
    if not isinstance(entry, dict):
        return [str(entry)]
    if entry.get("ranking"):
        _refuse(draft.path, "ranking: true")
    known, kind = TABLES["datasets"], entry.get("type")
    parts = [entry, *(part for part in (entry.get("columns"), kind) if isinstance(part, dict))]
    said = {name: value for part in parts for name, value in part.items() if value is not None}
    renamed = {ours: said[theirs] for theirs, ours in known["columns"].items() if isinstance(said.get(theirs), str)}
    fmt = known["formats"].get(str(entry.get("formatting", kind)).split(".")[0].split(":")[0])
    unread = said.keys() - known["columns"].keys() - set(known["read"].split())
    unread |= {name for name in ("type", "formatting") if isinstance(said.get(name), str) and not fmt}
    unread |= {"columns"} if isinstance(said.get("columns"), list) else set()  # TRL: those to keep
    if fmt != "messages" and renamed.pop("system", None):
        unread |= {"system", "field_system"} & said.keys()
    draft.left += [f"datasets.{name}: {_reason(name)}." for name in sorted(unread)]
    if draft.special.get("@stage") == "pt" and "instruction" in renamed:
        renamed = {"text": renamed["instruction"]}
    if fmt:
        draft.found["data.format"] = fmt if draft.found.get("data.format", fmt) == fmt else "auto"
    for ours, name in renamed.items():
        if name not in (ours, "messages"):
            _agree(draft, draft.found.setdefault("data.columns", {}), ours, name)
    named = entry.get("data_files") or entry.get("hf_hub_url") or entry.get("path")
    if "file_name" in entry:
        named = str(Path(entry.get("folder", "")) / entry["file_name"])
    files = [named] if isinstance(named, str) else list(named or [])
    named_apart = draft.tool == "TRL"  # dataset_test_split
    split = said.get("split", "train" if not named_apart and any(map(is_hub_id, files)) else None)
    if split is not None and not (named_apart and key == "data.eval"):
        _agree(draft, draft.found, f"{key}_split", split)
    return files


def _agree(draft: Imported, table: Json, key: str, value: Any) -> None:
    """Sets what a recipe says once for all its data."""
    if table.setdefault(key, value) != value:
        raise ConfigError(
            f"{draft.path}: its datasets name {table[key]!r} and {value!r} for {key}, but a recipe has one for all, so rows "
            "would be misread. Write the datasets as files with the same columns."
        )


def _to_yaml(draft: Imported) -> str:
    recipe: Json = {"model": {}, "adapter": {}, "data": {}, "privacy": {"epsilon": 8.0}, "train": {}}
    for key, value in draft.found.items():
        section, _, name = key.rpartition(".")
        (recipe.setdefault(section, {}) if section else recipe)[name] = value
    recipe["output_dir"] = recipe.pop("output_dir", f"runs/{draft.path.stem}")
    make_config(recipe, None, str(draft.path))  # refuses what no recipe may hold
    return yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True)
