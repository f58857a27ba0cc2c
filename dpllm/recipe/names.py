"""Names and recipes in publishable form: without directories, and without keys that could be used against the run.

Comes in: strings, JSON values that contain strings, a ``RunConfig``. Goes out: the same without directories; digests. Must not
open any file.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dpllm.files import digest as digest_of
from dpllm.recipe.config import RunConfig, Source
from dpllm.recipe.sections import CardConfig, TelemetryConfig

DATA_SUFFIXES = {".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".txt", ".gz", ".bz2", ".xz", ".zst"}
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
# At least one directory deep, and after a character that can precede a path: "data (1)/notes" is relative, like part of a URL.
_ABSOLUTE_PATH = re.compile(r"(?<![^\s'\"`(\[{<>=,;|])(?:file://)?(?:~|[A-Za-z]:)?[/\\][^\s'\"`,;:()]+")


def is_hub_id(name: str) -> bool:
    """Whether a name has the form of a Hugging Face repository and is not a local path."""
    return (
        _HUB_ID.fullmatch(name) is not None
        and Path(name).suffix.lower() not in DATA_SUFFIXES
        and not Path(name).exists()
    )


def listed(source: Source) -> list[str]:
    """The files, globs, directories and Hub ids of a source."""
    return [source] if isinstance(source, str) else source


def public_name(source: Source) -> str:
    """The Hub id or builtin name of a dataset, or the last part of a local path; several are separated by commas."""
    return ", ".join(name if is_builtin(name) or is_hub_id(name) else last_part(name) for name in listed(source))


def last_part(path: str) -> str:
    """The last part of a local path."""
    return re.split(r"[/\\]", path.rstrip("/\\"))[-1]


def is_absolute(name: str) -> bool:
    """Whether a name is an absolute path on this machine."""
    return _ABSOLUTE_PATH.match(name) is not None


def shown(name: str) -> str:
    """A file name with _ in place of unprintable characters, and with _ before a name that looks like an absolute path."""
    visible = "".join(letter if letter.isprintable() else "_" for letter in name)
    return f"_{visible}" if is_absolute(visible) else visible


def without_paths(value: Any) -> Any:
    """A copy of a JSON value in which every absolute local path in a string is cut to its last part.

    The name of a ``dataset`` that is not itself such a path is kept, since it is the name of the ledger's account.
    """
    if isinstance(value, str):
        return _ABSOLUTE_PATH.sub(lambda match: last_part(match[0]), value)
    if isinstance(value, dict):
        return {
            without_paths(key): inner
            if key == "dataset" and isinstance(inner, str) and not is_absolute(inner)
            else without_paths(inner)
            for key, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return [without_paths(inner) for inner in value]
    return value


def is_builtin(name: str) -> bool:
    """Whether a recipe's value starts with builtin:, whether or not it exists."""
    return name.startswith("builtin:")


def publishable(config: RunConfig) -> RunConfig:
    """The recipe without keys that a reader cannot use, or could use against the run.

    Local paths are cut to their last part; the ledger's address, which may contain a password, and the directory of metrics are
    removed; a seed of the noise, by which the noise could be subtracted, becomes 0. The card of the result is the same, byte for
    byte.
    """
    sources = {
        f"data.{name}": _each(public_name, source)
        for name in ("train", "eval", "label_record")
        if (source := getattr(config.data, name))
    }
    adapter, prompts = config.model.adapter, config.train.sample_prompts
    return config.changed(
        {
            **sources,
            "model.name_or_path": public_name(config.model.name_or_path),
            "model.adapter": last_part(adapter) if adapter else None,
            "privacy.ledger": None,
            "privacy.insecure_seed": None if config.privacy.insecure_seed is None else 0,
            "train.sample_prompts": public_name(prompts) if isinstance(prompts, str) else prompts,
            "telemetry.textfile": None,
            "output_dir": last_part(config.output_dir),
        }
    )


def digest(config: RunConfig) -> str:
    """SHA-256 of the publishable recipe, without output_dir and with every name of a model or dataset cut to its last part.

    It does not depend on the location of the run, its data or its model; equal digests mean equal settings.
    """
    recipe = publishable(config).model_dump(mode="json", exclude_defaults=True)
    recipe.setdefault("adapter", {})["method"] = config.adapter.method
    recipe.pop("output_dir", None)
    without_effect = {
        "train": {"process_timeout", "sample_prompts", "sample_every"},
        "telemetry": {"project", "run_name", "group", "entity"},
    }
    for section, keys in without_effect.items():
        recipe[section] = {name: value for name, value in recipe.get(section, {}).items() if name not in keys}
    for section, name in (("model", "name_or_path"), ("data", "train"), ("data", "eval"), ("data", "label_record")):
        if value := recipe[section].get(name):
            recipe[section][name] = _each(lambda part: part if is_builtin(part) else last_part(part), value)
    return digest_of(recipe)


def _each(change: Callable[[str], str], source: Source) -> Source:
    return change(source) if isinstance(source, str) else [change(name) for name in source]


def of_training(config: RunConfig) -> str:
    """The digest of the settings that affect training, for run.json: without card, telemetry, intervals and speed."""
    trained = config.changed(
        {
            "card": CardConfig(),
            "telemetry": TelemetryConfig(),
            "train.tokens_per_pass": "auto",
            "train.eval_every": None,
            "train.checkpoint_every": None,
        }
    )
    return digest(trained)
