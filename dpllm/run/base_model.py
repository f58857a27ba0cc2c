"""Reads what a recipe's base model or adapter states about its own privacy, and checks that it is about these weights.

Comes in: the recipe; a directory, or files of a Hub id. Goes out: a ``Base`` with the statement in ``privacy.json``, or a
refusal. ``statement.lineage`` decides what it means for a run. Must not import torch or read any row.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from dpllm.errors import ConfigError, DpllmError, Refused
from dpllm.files import BLOCK, CARD, digest, read_json, sha256
from dpllm.privacy import accounting
from dpllm.recipe import names
from dpllm.recipe.config import LoraConfig, RunConfig
from dpllm.recipe.names import is_builtin
from dpllm.statement import privacy_record
from dpllm.statement.lineage import Base
from dpllm.statement.privacy_record import Ancestor, Lineage, PrivacyRecord
from dpllm.statement.section import front_matter

ADAPTER = ("adapter_config.json", "adapter_model.safetensors")  # names that peft gives
_OURS = {"r", "lora_alpha", "use_rslora", "target_modules", "modules_to_save", "megatron_core", "qalora_group_size"}
_OURS |= {"exclude_modules", "layers_to_transform", "layers_pattern", "rank_pattern", "fan_in_fan_out", "lora_dropout"}
_OURS |= {"peft_version", "task_type", "auto_mapping", "base_model_name_or_path", "revision", "inference_mode"}
_PLAIN: dict[str, Any] = {"peft_type": ["LORA"], "bias": ["none"], "init_lora_weights": [True, "gaussian"]}
"""Keys of adapter_config.json that the recipe determines or that change nothing, and harmless values of others."""
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack")
_PROMISED = ("epsilon", "delta", "unit", "neighbouring_relation", "event")
_ROUNDING = 1e-3  # allowed between versions of an accountant


def of_base(config: RunConfig, *, fetch: bool = True) -> Base | None:
    """The checked privacy statements of a recipe's base model and of the adapter that training starts from.

    Args:
        config: The recipe. Reads a local directory, or of a Hub id ``privacy.json`` and the weights that it lists.
        fetch: Whether files of a Hub id may be downloaded; else only the cache is read.

    Returns:
        The adapter's statement if the recipe names one; else the base model's, None if no block of it can be found.

    Raises:
        ConfigError: The base model or adapter is something else, or the adapter's settings are not the recipe's.
        Refused: The block is damaged, is about other weights, or states less than its own event costs; or the adapter was trained
            on a base with another statement.
    """
    base = None if is_builtin(config.model.name_or_path) else _of_model(config, fetch)
    return base if config.model.adapter is None else _of_adapter(config, Path(config.model.adapter), base)


def same_base(base: Base | None, lineage: Lineage | None) -> bool:
    """Whether a run with this lineage started from a base model with this statement."""
    stated = next((parent.files_digest for parent in lineage.models if not parent.adapter), None) if lineage else None
    return stated == (base.statement.files_digest if base else None)


def _of_model(config: RunConfig, fetch: bool) -> Base | None:
    name, revision = config.model.name_or_path, config.model.revision
    path = Path(name)
    if path.is_dir():
        _refuse_no_model(name, {file.name for file in path.iterdir()})
        record = _stated(path, "base model")
        return _base(_public(path), record) if record else None
    where = _hub_file(name, BLOCK, revision, fetch)
    if where is None:
        return None
    record = _read(where)
    _refuse_no_model(name, record.files)
    weights = [file for file in record.files if file.endswith(_WEIGHTS)]
    # transformers may prefer to load a file that the block does not list.
    candidates = dict.fromkeys([*weights, "model.safetensors"])
    available = {f: at for f in candidates if (at := _hub_file(name, f, revision, fetch))}
    listed = {file: record.files[file] for file in weights if fetch or file in available}
    _refuse_changed(listed, available, f"base model {names.last_part(name)}")
    return _base(names.public_name(name), record)


def _of_adapter(config: RunConfig, path: Path, base: Base | None) -> Base:
    """An adapter without a block counts as trained on unknown data."""
    _check_settings(config, path)
    record = _stated(path, "adapter")
    if base is not None and not same_base(base, record.lineage if record else None):
        raise Refused(
            f"model.adapter {path}: does not name the privacy statement of {base.statement.name} as that of its base, so what it "
            "learned is unknown. Start from an adapter trained on exactly this base, or without one (model.adapter: null)."
        )
    if record is None:
        files = {name: sha256(path / name) for name in ADAPTER}
        nothing = dict.fromkeys((*_PROMISED, "dataset", "entry"))
        unknown = Ancestor(name=_public(path), guarantee=False, **nothing, files_digest=digest(files), adapter=True)
        return Base(unknown, (), files[ADAPTER[1]])
    result = replace(_base(_public(path), record, adapter=True), weights=record.files[ADAPTER[1]])
    if base is None:
        return result
    # For the base, its own statement counts, not what the adapter's block says about it.
    adapters = takewhile(lambda model: model.adapter, result.ancestors)
    labels = dict.fromkeys((*result.labels, *base.labels))
    return replace(result, ancestors=(*adapters, *base.models), labels=tuple(labels))


def _check_settings(config: RunConfig, path: Path) -> None:
    if missing := next((name for name in ADAPTER if not (path / name).is_file()), None):
        raise ConfigError(
            f"model.adapter {path}: holds no {missing}, and a run starts only from LoRA that peft wrote as safetensors: "
            "other files may run code. Name the export/ of a run that trained an adapter, or a directory of save_pretrained."
        )
    theirs, lora = read_json(path / ADAPTER[0]), config.adapter
    assert isinstance(lora, LoraConfig)  # the recipe's own check ensures it
    if extra := next((k for k in theirs if k not in _OURS and theirs[k] and theirs[k] not in _PLAIN.get(k, ())), None):
        raise ConfigError(
            f"model.adapter {path}: has {extra} {theirs[extra]}, which a recipe cannot express. Name another adapter."
        )
    for key, ours, expected, where_absent in (
        ("r", "adapter.r", lora.r, None),
        ("lora_alpha", "adapter.alpha", lora.alpha, None),
        ("use_rslora", "adapter.use_rslora", lora.use_rslora, False),
        ("base_model_name_or_path", "model.name_or_path", names.last_part(config.model.name_or_path), ""),
    ):
        stated = theirs.get(key) or where_absent
        stated = names.last_part(stated) if isinstance(stated, str) else stated
        if stated not in (expected, ""):
            raise ConfigError(
                f"model.adapter {path}: has {key} {stated!r}, and {ours} is {expected}, so its factors would mean something "
                f"else here. Type --{ours} {stated}."
            )


def _stated(path: Path, label: str) -> PrivacyRecord | None:
    """The block of a directory; Refused if it is about other files, or missing while the card has one."""
    if not (path / BLOCK).exists():
        try:
            stated = front_matter((path / CARD).read_text(encoding="utf-8")).get("privacy")
        except (OSError, UnicodeDecodeError, ConfigError):  # no card, or one that states nothing
            return None
        if not isinstance(stated, dict) or "guarantee" not in stated:
            return None
        raise Refused(
            f"{path}: its card has a privacy block but privacy.json is missing, so what these weights promise cannot be checked. "
            "Use a complete copy that passes dpllm verify."
        )
    record = _read(path / BLOCK)
    present = {file.relative_to(path).as_posix(): file for file in path.rglob("*") if file.is_file()}
    _refuse_changed(record.files, present, f"{label} {names.last_part(str(path))}")
    return record


def _refuse_no_model(name: str, files: Collection[str]) -> None:
    adapter = "adapter_config.json" in files and "config.json" not in files
    if adapter or ("run.json" in files and "export" in files):
        raise ConfigError(
            f"model.name_or_path {name}: is {'an adapter' if adapter else 'a run directory'} and not a whole model. Name what "
            "dpllm merge RUN writes, or the export/ of a run that trained whole layers; to continue from an adapter, type "
            "--model.adapter with its directory."
        )


def _read(path: Path) -> PrivacyRecord:
    try:
        return privacy_record.read(read_json(path))
    except DpllmError:
        raise Refused(
            f"{path}: is not a privacy block that this version of dpllm can read, so what a run on this model would promise is "
            "unknown. Use a copy that passes dpllm verify, or write its card again with dpllm card."
        ) from None


def _refuse_changed(files: dict[str, str], present: dict[str, Path], label: str) -> None:
    wrong = [name for name, stated in files.items() if name not in present or sha256(present[name]) != stated]
    wrong += [name for name in sorted(present) if name.endswith(_WEIGHTS) and name not in files]
    if wrong:
        raise Refused(
            f"{wrong[0]} of the {label} is not the file that its privacy.json describes, so nobody knows what these weights "
            "promise. Use a copy that passes dpllm verify; if it was changed on purpose, remove privacy.json and the card."
        )


def _public(path: Path) -> str:
    path = path.resolve()
    return f"{path.parent.name}/{path.name}" if path.name in ("export", "merged") else path.name


def _hub_file(name: str, file: str, revision: str | None, fetch: bool) -> Path | None:
    """The cached path of a file of a Hub repository; None if it has no such file or cannot be reached."""
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    from dpllm.text.sources import asking_hub

    try:
        if not fetch:
            cached = try_to_load_from_cache(name, file, revision=revision)
            return Path(cached) if isinstance(cached, str) else None
        with asking_hub(name):
            return Path(hf_hub_download(name, file, revision=revision))
    except Exception:  # no such file or repository, no network, an invalid name: loading the tokenizer says which
        return None


def _base(name: str, record: PrivacyRecord, *, adapter: bool = False) -> Base:
    promised: dict[str, Any] = dict.fromkeys(_PROMISED)
    if record.guarantee:
        terms = record.plan
        promised = {key: getattr(terms, key) for key in _PROMISED}
        costs = accounting.epsilon(terms.event, terms.delta, terms.neighbouring_relation)
        if costs > terms.epsilon * (1 + _ROUNDING) + _ROUNDING:
            raise Refused(
                f"the privacy block of {name} states epsilon {terms.epsilon:g}, and its own event costs {costs:g} at delta "
                f"{terms.delta:g}: the block is damaged or false. Use a copy that passes dpllm verify."
            )
    if adapter:
        promised["adapter"] = True
    account, before = record.composed, record.lineage
    # A model trained without privacy has no ledger entry; its block has the name of the account. Its lineage has it too, if its
    # base learned the same.
    dataset = (account.dataset if account else None) or (before.dataset if before else None) or record.dataset
    statement = Ancestor(
        name=name,
        guarantee=record.guarantee,
        **promised,
        dataset=dataset,
        entry=account.entry if account else None,
        files_digest=digest(record.files),
    )
    labels = (record.labels,) if record.labels else ()
    return Base(statement, before.models if before else (), labels=(*labels, *record.labels_before))
