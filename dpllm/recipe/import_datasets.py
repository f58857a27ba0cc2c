"""The datasets in a configuration of LLaMA-Factory, axolotl or TRL as the data section of a recipe.

Comes in: what ``imports.py`` read of the configuration so far. Goes out: the same with files, columns, splits and format. It must
not open any data; LLaMA-Factory's dataset_info.json names them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from dpllm.errors import ConfigError
from dpllm.recipe.names import is_hub_id
from dpllm.recipe.section import read_recipe

Json = dict[str, Any]


@cache
def tables() -> Json:
    """Where their keys go."""
    return read_recipe(Path(__file__).with_name("imports.yaml"))


@dataclass
class Draft:
    """What is read of a configuration so far."""

    path: Path
    tool: str
    special: Json = field(default_factory=dict)  # "@..." of imports.yaml -> value
    found: Json = field(default_factory=dict)  # our key -> value
    carried: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)


def listed(value: Any) -> list[Any]:
    """The parts of a list, or of a word with commas."""
    return [part.strip() for part in value.split(",")] if isinstance(value, str) else list(value or [])


def refuse(path: Path, what: str) -> None:
    """Refuses a training on preferences or rewards.

    Raises:
        ConfigError: Always.
    """
    raise ConfigError(
        f"{path}: {what} trains on preferences or rewards, whose loss compares several texts of several people, and dpllm clips "
        "the cross-entropy of one person's text. Import the configuration of the supervised stage (sft)."
    )


def reason(key: str) -> str:
    """Why a key has no place in a recipe."""
    for entry in tables()["no_counterpart"]:
        if key in entry["keys"].split():
            return str(entry["why"])
    if key.startswith(tuple(tables()["no_matter"].split())):
        return "changes logs, speed or files, and nothing that a recipe says"
    return "unknown to this table, and not read; dpllm plan --keys lists what a recipe can say"


def carry_datasets(draft: Draft) -> None:
    """data.train and data.eval, their columns and format."""
    special, found, known = draft.special, draft.found, _dataset_info(draft)
    evaluated = special.get("@eval")
    if str(special.get("@evaluate", "no")).lower() not in ("no", "false"):  # which is what YAML makes of no
        evaluated = special.get("@train")
        found.setdefault("data.eval_split", "test")
    if special.get("@text", "text") != "text":
        found["data.columns"] = {"text": special["@text"]}
    sources: dict[str, list[str]] = {}
    for key, value in (("data.train", special.get("@train")), ("data.eval", evaluated)):
        named = [name for entry in listed(value) for name in _entry(draft, key, known.get(str(entry), entry))]
        again = set(named) & set(sources.get("data.train", []))
        one_split = found.get("data.train_split", "train") == found.get("data.eval_split", "train")
        if again and (one_split or not all(map(is_hub_id, again))):  # a file has no splits
            draft.left.append("data.eval: would be rows that train; name a file of held-out rows there.")
        elif named:
            found[key] = named[0] if len(named) == 1 else named
            draft.carried.append(f"datasets -> {key}: {', '.join(named)}")
        sources[key] = named
    if "data.eval" not in found and found.pop("data.eval_split", None):
        draft.left += [
            f"{line.split(':')[0]}: nothing is evaluated." for line in draft.carried if "-> data.eval_split" in line
        ]
        draft.carried = [line for line in draft.carried if "-> data.eval_split" not in line]


def _dataset_info(draft: Draft) -> Json:
    """LLaMA-Factory's names of datasets -> what it says of them."""
    wanted = Path(draft.special.get("@folder", "data"))
    for folder in (wanted, draft.path.parent / wanted) if draft.tool == "LLaMA-Factory" else ():
        if (folder / "dataset_info.json").is_file():
            known = json.loads((folder / "dataset_info.json").read_text(encoding="utf-8"))
            return {name: {"folder": str(folder), **entry} for name, entry in known.items()}
    if draft.tool == "LLaMA-Factory":
        draft.left.append("dataset: there is no dataset_info.json here, so names stand for files; type the files.")
    return {}


def _entry(draft: Draft, key: str, entry: Any) -> list[str]:
    """The files or Hub id of one of their datasets; its columns and its format go to the recipe."""
    if not isinstance(entry, dict):
        return [str(entry)]
    if entry.get("ranking"):
        refuse(draft.path, "ranking: true")
    known, kind = tables()["datasets"], entry.get("type")
    parts = [entry, *(part for part in (entry.get("columns"), kind) if isinstance(part, dict))]
    said = {name: value for part in parts for name, value in part.items() if value is not None}
    renamed = {ours: said[theirs] for theirs, ours in known["columns"].items() if isinstance(said.get(theirs), str)}
    fmt = known["formats"].get(str(entry.get("formatting", kind)).split(".")[0].split(":")[0])
    unread = said.keys() - known["columns"].keys() - set(known["read"].split())
    unread |= {name for name in ("type", "formatting") if isinstance(said.get(name), str) and not fmt}
    unread |= {"columns"} if isinstance(said.get("columns"), list) else set()  # TRL: those to keep
    if fmt != "messages" and renamed.pop("system", None):
        unread |= {"system", "field_system"} & said.keys()
    draft.left += [f"datasets.{name}: {reason(name)}." for name in sorted(unread)]
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


def _agree(draft: Draft, table: Json, key: str, value: Any) -> None:
    """Sets what a recipe says once for all its data."""
    if table.setdefault(key, value) != value:
        raise ConfigError(
            f"{draft.path}: its datasets name {table[key]!r} and {value!r} for {key}, and a recipe names one for all, so rows "
            "would be misread. Write the datasets as files with the same columns."
        )
