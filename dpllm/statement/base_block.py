"""What a base model says about its own privacy: its block, once it was found to be about these weights.

Comes in: the recipe. Goes out: a ``Base``, or a refusal of a block that is damaged or about something else. Must not import
torch, read training text, or know what the new run promises.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any

from dpllm.errors import ConfigError, DpllmError, Refused
from dpllm.files import BLOCK, CARD, digest, sha256
from dpllm.privacy import accounting
from dpllm.recipe import names
from dpllm.recipe.config import RunConfig
from dpllm.recipe.names import is_builtin
from dpllm.statement import privacy_record
from dpllm.statement.fields import Terms
from dpllm.statement.privacy_record import PrivacyRecord

Json = dict[str, Any]

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack")
LARGEST_BLOCK = 2**24  # bytes
TERMS = ("epsilon", "delta", "unit", "neighbouring_relation", "event")
ROUNDING = 1e-3  # between versions of an accountant


@dataclass(frozen=True)
class Base:
    """The privacy block of a base model, once it was found to be about these weights.

    Attributes:
        statement: {"name", "guarantee", "epsilon", "delta", "unit", "neighbouring_relation", "dataset", "entry", "head",
            "event", "files_digest"}; without a guarantee, the numbers are None.
        ancestors: The same of the models before it, the nearest first.
        budgeted: Whether its dataset had a budget in its ledger.
        whole_event: Whether the ledger's entry alone pays for the event.
    """

    statement: Json
    ancestors: tuple[Json, ...]
    budgeted: bool
    whole_event: bool


def of_base(config: RunConfig, *, fetch: bool = True) -> Base | None:
    """Reads and checks what a recipe's base model says about its own privacy.

    Args:
        config: The recipe. A local directory is read as it is; of a Hub id, ``privacy.json`` and the weights that it names.
        fetch: Whether files of a Hub id may be fetched; else only what lies in the cache is read.

    Returns:
        None where the base model has no privacy block, or (of a Hub id) none that can be reached.

    Raises:
        ConfigError: The directory is an adapter or a run directory, which no run can start from.
        Refused: The block is damaged, is about other weights, or states less than its own event costs.
    """
    name = config.model.name_or_path
    if is_builtin(name):
        return None
    path = Path(name)
    if path.is_dir():
        _refuse_what_is_no_model(path)
        if not (path / BLOCK).exists():
            _refuse_a_card_alone(path)
            return None
        record = _read(path / BLOCK)
        found = {str(file.relative_to(path).as_posix()): file for file in path.rglob("*") if file.is_file()}
        wrong = _changed(record.files, found)
    else:
        where = _hub_file(name, BLOCK, config.model.revision, fetch)
        if where is None:
            return None
        record = _read(where)
        if _is_adapter(record.files):
            raise ConfigError(_no_adapters(name))
        weights = [file for file in record.files if file.endswith(WEIGHTS)]
        # What transformers loads first may be a file that the block does not speak of.
        asked = dict.fromkeys([*weights, "model.safetensors"])
        found = {f: at for f in asked if (at := _hub_file(name, f, config.model.revision, fetch))}
        wrong = _changed({file: record.files[file] for file in weights if fetch or file in found}, found)
    if wrong:
        raise Refused(
            f"{wrong[0]} of the base model {names.last_part(name)} is not the file that its privacy.json describes"
            f"{f' ({len(wrong)} such files)' if len(wrong) > 1 else ''}, so nobody knows what these weights promise. Take a copy "
            "that dpllm verify passes; if it was changed on purpose, remove privacy.json and the card, which no longer speak "
            "of it."
        )
    return _base(_public_name(path) if path.is_dir() else names.public_name(name), record)


def _public_name(path: Path) -> str:
    """A directory's last part, and the one before it where the last says nothing."""
    path = path.resolve()
    return f"{path.parent.name}/{path.name}" if path.name in ("export", "merged") else path.name


def _refuse_what_is_no_model(path: Path) -> None:
    if (path / "adapter_config.json").exists() and not (path / "config.json").exists():
        raise ConfigError(_no_adapters(str(path)))
    if (path / "run.json").exists() and (path / "export").is_dir():
        raise ConfigError(
            f"model.name_or_path {path}: is a run directory, and no model. Name {path / 'export'} if the run trained whole "
            f"layers; if it trained an adapter, type dpllm merge {path} and name what that writes."
        )


def _no_adapters(name: str) -> str:
    return (
        f"model.name_or_path {name}: is an adapter, which says what to add to a model and is none; a new run would not know "
        "where to start. Merge it into its base first, dpllm merge RUN, and name the merged directory."
    )


def _is_adapter(files: dict[str, str]) -> bool:
    return "adapter_config.json" in files and "config.json" not in files


def _refuse_a_card_alone(path: Path) -> None:
    """A card with a privacy block whose privacy.json is gone is a copy from which something was cut.

    Raises:
        Refused: So it is here.
    """
    from dpllm.statement.section import front_matter

    try:
        stated = front_matter((path / CARD).read_text(encoding="utf-8")).get("privacy")
    except (OSError, UnicodeDecodeError, ConfigError):  # no card, or one that states nothing
        return
    if isinstance(stated, dict) and "guarantee" in stated:
        raise Refused(
            f"{path}: its card has a privacy block and privacy.json is missing, so what these weights promise cannot be checked. "
            "Take a whole copy, which dpllm verify passes."
        )


def _read(path: Path) -> PrivacyRecord:
    try:
        if path.stat().st_size > LARGEST_BLOCK:
            raise ValueError
        record = privacy_record.read(json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_constant))
        for file in record.files:
            if PurePosixPath(file).is_absolute() or ".." in PurePosixPath(file).parts:
                raise ValueError
    except (OSError, ValueError, RecursionError, DpllmError):
        raise Refused(
            f"{path}: is no privacy block that this version of dpllm can read, so what the base model promises is unknown, and "
            "with it what a run on it would. Take a copy that dpllm verify passes, or write its card again with dpllm card."
        ) from None
    return record


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _changed(files: dict[str, str], found: dict[str, Path]) -> list[str]:
    """Names of files that are missing or another; and of weights that the block does not speak of."""
    changed = [name for name, sha in files.items() if name not in found or _sha256(found[name]) != sha]
    return changed + [name for name in sorted(found) if name.endswith(WEIGHTS) and name not in files]


def _sha256(path: Path) -> str:
    seen = path.stat()
    return _sha256_of(str(path), seen.st_size, seen.st_mtime_ns, seen.st_ino)


@lru_cache(maxsize=4096)  # one sweep looks at the same weights many times
def _sha256_of(path: str, size: int, modified: int, inode: int) -> str:
    return sha256(Path(path))


def _hub_file(name: str, file: str, revision: str | None, fetch: bool) -> Path | None:
    """A file of a Hub repository in the cache; None where there is none, or where nobody can be asked."""
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    try:
        if not fetch:
            cached = try_to_load_from_cache(name, file, revision=revision)
            return Path(cached) if isinstance(cached, str) else None
        return Path(hf_hub_download(name, file, revision=revision))
    except Exception:  # no such file or repository, no network, a name that is none: the tokenizer's loading says which
        return None


def _base(name: str, record: PrivacyRecord) -> Base:
    promised: Json = dict.fromkeys(TERMS)
    if record.guarantee:
        _refuse_if_it_states_too_little(name, record.terms)
        promised = {key: getattr(record, key) for key in TERMS}
    account, before = record.composed, record.lineage
    # A model that was trained without privacy has no entry. Its lineage knows the name where its base had one, and of public
    # data the block's own name is the one that the ledger would give them.
    dataset = (account.dataset if account else None) or (before.dataset if before else None) or record.dataset
    statement = {
        "name": name,
        "guarantee": record.guarantee,
        **promised,
        "dataset": dataset,
        "entry": account.entry if account else None,
        "head": account.head if account else None,
        "files_digest": digest(record.files),
    }
    ancestors = () if before is None else (before.base, *before.ancestors)
    return Base(
        statement,
        tuple(one.to_json() for one in ancestors),
        account is not None and account.budget is not None,
        account is None or not account.made_up_by,
    )


def _refuse_if_it_states_too_little(name: str, terms: Terms) -> None:
    try:
        costs = accounting.stated(terms.event, terms.delta, terms.neighbouring_relation)[0]
    except DpllmError:
        costs = math.inf
    if costs > terms.epsilon * (1 + ROUNDING) + ROUNDING:
        raise Refused(
            f"the privacy block of the base model {name} states epsilon {terms.epsilon:g}, and its own event costs {costs:g} "
            f"at delta {terms.delta:g}: it is damaged or a lie. Take a copy that dpllm verify passes."
        )
