"""Lineage: what a base model says about its own privacy, and what it and a run on it promise together.

Comes in: the recipe, its account in the ledger, its Plan. Goes out: the base model's statement, once it was found to be about
these weights; the value that run.json and the card have under ``lineage``; or a refusal. Must not import torch or read any row.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpllm.errors import ConfigError, DpllmError, Refused
from dpllm.files import BLOCK, CARD, digest, sha256
from dpllm.privacy import accounting, guards
from dpllm.recipe import names
from dpllm.recipe.config import RunConfig
from dpllm.recipe.names import is_builtin
from dpllm.statement import privacy_record
from dpllm.statement.fields import Ancestor, ComposedLineage, Lineage
from dpllm.statement.privacy_record import PrivacyRecord

if TYPE_CHECKING:
    from dpllm.ledger import Ledger
    from dpllm.privacy.plan import Plan

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack")
_LARGEST_BLOCK = 2**24  # bytes
_PROMISED = ("epsilon", "delta", "unit", "neighbouring_relation", "event")
_ROUNDING = 1e-3  # between versions of an accountant


@dataclass(frozen=True)
class Base:
    """The privacy block of a base model, once it was found to be about these weights.

    Attributes:
        statement: What it says.
        ancestors: The same of the models before it, the nearest first.
        budgeted: Whether its dataset had a budget in its ledger.
        whole_event: Whether the ledger's entry alone pays for the event.
    """

    statement: Ancestor
    ancestors: tuple[Ancestor, ...]
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
            return None
        record = _read(path / BLOCK)
        found = {file.relative_to(path).as_posix(): file for file in path.rglob("*") if file.is_file()}
        wrong = _changed(record.files, found)
    else:
        where = _hub_file(name, BLOCK, config.model.revision, fetch)
        if where is None:
            return None
        record = _read(where)
        if "adapter_config.json" in record.files and "config.json" not in record.files:
            raise ConfigError(_no_adapters(name))
        weights = [file for file in record.files if file.endswith(_WEIGHTS)]
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
    public = names.public_name(name)
    if path.is_dir():
        path = path.resolve()
        public = f"{path.parent.name}/{path.name}" if path.name in ("export", "merged") else path.name
    return _base(public, record)


def compose_with_base(
    base: Base | None,
    config: RunConfig,
    *,
    dataset: str,
    derived_from: str | None,
    book: Ledger | None,
    plan: Plan | None,
) -> Lineage | None:
    """Judges a run by its base model's statement, and composes the two where they are about the same data.

    Args:
        base: Of ``of_base``.
        config: The recipe.
        dataset: The name of its data in the ledger.
        derived_from: The dataset that is charged instead, where the recipe declares one.
        book: The ledger that the recipe names; None where there is none yet.
        plan: The promise; None without differential privacy, or where only refusals are asked for.

    Returns:
        None without a block. ``dataset`` is the common one; ``composed`` is of this run and every guaranteed one before it on
        the same dataset, or None for ``reason``; ``excepted`` says who permitted what would be refused.

    Raises:
        Refused: The run would continue a model with differential privacy on the same data without it, or outside the
            ledger that holds their budget, and nobody excepted it; or the ledger contradicts the block.

    Guarantee:
        ``composed`` bounds what all these runs together reveal about one unit of the common dataset: each is an adaptive
        composition of sampled Gaussian sums, whose parameters must have been fixed before any result was seen.

    References:
        Dwork, Rothblum and Vadhan 2010, "Boosting and Differential Privacy", section 3 (a mechanism may read what came
        before it); Doroshenko et al. 2022 (PLD). Against parameters chosen later: Rogers et al. 2016, "Privacy Odometers
        and Filters".
    """
    if base is None:
        return None
    account = book.records.charged_to(dataset, derived_from) if book else derived_from or dataset
    mine = [parent for parent in (base.statement, *base.ancestors) if parent.dataset == account]
    _refuse_contradictions(base, book)
    excepted = _permission(base, config, mine, account, book)
    composed, reason = _compose(mine, plan, guards.deviations(config)[0])
    return Lineage(
        base=base.statement,
        ancestors=base.ancestors,
        same_dataset=bool(mine),
        dataset=account if mine else None,
        composed=composed,
        reason=reason,
        excepted=excepted,
    )


def why_not(lineage: Lineage | None) -> str | None:
    """Why a run's own guarantee does not hold because of the models before it; None if it does."""
    if lineage is None or not lineage.same_dataset:
        return None
    for parent in (lineage.base, *lineage.ancestors):
        if not parent.guarantee and parent.dataset == lineage.dataset:
            return (
                f"its base model goes back to {parent.name}, which was trained on the same dataset "
                f"({lineage.dataset}) without a guarantee"
            )
    return None


def deviations(lineage: Lineage | None) -> list[str]:
    """What the card must name: who excepted what, and models before this one that promise nothing for their own data."""
    if lineage is None:
        return []
    notes = [lineage.excepted] if lineage.excepted else []
    for parent in (lineage.base, *lineage.ancestors):
        if not parent.guarantee and not (lineage.same_dataset and parent.dataset == lineage.dataset):
            notes.append(
                f"{parent.name}, from which this model was made, states no differential privacy guarantee for the data it was "
                "trained on: these weights may reveal them; a guarantee of this run is about this run's own training data, "
                "and only as far as they are not among those"
            )
    return list(dict.fromkeys(notes))


def _refuse_what_is_no_model(path: Path) -> None:
    """An adapter, a run directory, or a copy of a model from which privacy.json was cut."""
    from dpllm.statement.section import front_matter

    if (path / "adapter_config.json").exists() and not (path / "config.json").exists():
        raise ConfigError(_no_adapters(str(path)))
    if (path / "run.json").exists() and (path / "export").is_dir():
        raise ConfigError(
            f"model.name_or_path {path}: is a run directory, not a model. Name {path / 'export'} if the run trained whole "
            f"layers; if it trained an adapter, type dpllm merge {path} and name what that writes."
        )
    try:
        stated = (
            {} if (path / BLOCK).exists() else front_matter((path / CARD).read_text(encoding="utf-8")).get("privacy")
        )
    except (OSError, UnicodeDecodeError, ConfigError):  # no card, or one that states nothing
        return
    if isinstance(stated, dict) and "guarantee" in stated:
        raise Refused(
            f"{path}: its card has a privacy block and privacy.json is missing, so what these weights promise cannot be checked. "
            "Take a whole copy, which dpllm verify passes."
        )


def _no_adapters(name: str) -> str:
    return (
        f"model.name_or_path {name}: is an adapter and not a whole model, so no run can start from it. Merge it into its "
        "base first, dpllm merge RUN, and name the merged directory."
    )


def _read(path: Path) -> PrivacyRecord:
    try:
        if path.stat().st_size > _LARGEST_BLOCK:
            raise ValueError
        return privacy_record.read(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError, DpllmError):
        raise Refused(
            f"{path}: is no privacy block that this version of dpllm can read, so what the base model promises is unknown, and "
            "with it what a run on it would. Take a copy that dpllm verify passes, or write its card again with dpllm card."
        ) from None


def _changed(files: dict[str, str], found: dict[str, Path]) -> list[str]:
    """Names of files that are missing or another; and of weights that the block does not speak of."""
    changed = [name for name, sha in files.items() if name not in found or _sha256(found[name]) != sha]
    return changed + [name for name in sorted(found) if name.endswith(_WEIGHTS) and name not in files]


def _sha256(path: Path) -> str:
    seen = path.stat()
    return _sha256_of(path, seen.st_size, seen.st_mtime_ns, seen.st_ino)


@lru_cache(maxsize=4096)  # one sweep looks at the same weights many times
def _sha256_of(path: Path, size: int, modified: int, inode: int) -> str:
    return sha256(path)


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
    promised: dict[str, Any] = dict.fromkeys(_PROMISED)
    if record.guarantee:
        terms = record.terms
        promised = {key: getattr(terms, key) for key in _PROMISED}
        try:
            costs = accounting.stated(terms.event, terms.delta, terms.neighbouring_relation)[0]
        except DpllmError:
            costs = math.inf
        if costs > terms.epsilon * (1 + _ROUNDING) + _ROUNDING:
            raise Refused(
                f"the privacy block of the base model {name} states epsilon {terms.epsilon:g}, and its own event costs {costs:g} "
                f"at delta {terms.delta:g}: the block is damaged or false. Take a copy that dpllm verify passes."
            )
    account, before = record.composed, record.lineage
    # A model that was trained without privacy has no entry. Its lineage knows the name where its base had one, and of public
    # data the block's own name is the one that the ledger would give them.
    dataset = (account.dataset if account else None) or (before.dataset if before else None) or record.dataset
    statement = Ancestor(
        name=name,
        guarantee=record.guarantee,
        **promised,
        dataset=dataset,
        entry=account.entry if account else None,
        head=account.head if account else None,
        files_digest=digest(record.files),
    )
    return Base(
        statement,
        () if before is None else (before.base, *before.ancestors),
        budgeted=account is not None and account.budget is not None,
        whole_event=account is None or not account.made_up_by,
    )


def _refuse_contradictions(base: Base, book: Ledger | None) -> None:
    parent = base.statement
    if book is None or not _holds(book, parent.entry):
        return
    run = book.run(str(parent.entry))
    other_data = run.reservation.dataset != parent.dataset
    if other_data or (base.whole_event and parent.event is not None and run.event != parent.event):
        raise Refused(
            f"the privacy block of the base model {parent.name} names entry {parent.entry} of the ledger, which is about "
            f"{'another dataset' if other_data else 'another event'}: one of the two was changed. Take a copy that dpllm verify "
            "passes.",
            dataset=run.reservation.dataset,
            reason="lineage",
        )


def _holds(book: Ledger | None, entry: str | int | None) -> bool:
    if book is None or not isinstance(entry, str):
        return False
    try:
        book.run(entry)
    except ConfigError:
        return False
    return True


def _permission(base: Base, config: RunConfig, mine: list[Ancestor], account: str, book: Ledger | None) -> str | None:
    """Who permitted this continuation; None where nobody has to. Refused where somebody has to and nobody did."""
    guaranteed = [parent for parent in mine if parent.guarantee]
    if not config.privacy.enabled:
        if not guaranteed:
            return None
        what = f"continuing {guaranteed[0].name} on dataset {account!r} without differential privacy"
        refusal = (
            f"privacy.enabled: false would continue {guaranteed[0].name}, which was trained on dataset {account!r} with "
            "differential privacy, on the same data without it: its guarantee would be gone, and no figure would show it. Set "
            "privacy.enabled: true, or let whoever answers for the data record an exception: "
            f"dpllm ledger except {account} --by NAME --reason WHY."
        )
        return _exception(what, refusal, "no_privacy", account, book)
    outside = [parent for parent in guaranteed if not _holds(book, parent.entry)]
    elsewhere = base.budgeted and base.statement in outside
    if not elsewhere and (book is None or book.budget(account) is None or _entered(outside, book, account)):
        return None
    entry = outside[0].entry
    what = f"continuing {outside[0].name} on the budgeted dataset {account!r} outside the ledger that holds its entry"
    enter = f"enter what it cost with dpllm ledger import {account}, " if not elsewhere else ""
    refusal = (
        f"{outside[0].name} was trained on dataset {account!r}, which has a budget, and its entry {entry} is not in this "
        "recipe's ledger: the two runs would be booked apart, and neither would show what both cost. Set privacy.ledger to "
        f"the ledger that holds the entry, {enter}or let the budget's owner record an exception: "
        f"dpllm ledger except {account} --by NAME --reason WHY."
    )
    return _exception(what, refusal, "outside_ledger", account, book)


def _entered(outside: list[Ancestor], book: Ledger, account: str) -> bool:
    """Whether the ledger holds an import for each of these runs: the same event, or an epsilon and delta as large."""
    imports = list(book.account(account).imports)
    for parent in outside:
        for event in imports:
            told = event["type"] == "imported" and all(
                event[key] >= getattr(parent, key) for key in ("epsilon", "delta")
            )
            if told or event == parent.event:
                imports.remove(event)
                break
        else:
            return False
    return True


def _exception(what: str, refusal: str, reason: str, account: str, book: Ledger | None) -> str:
    """Who permitted this; or the refusal where nobody did."""
    found = book.account(account).permission if book else None
    if found is None:
        raise Refused(refusal, dataset=account, reason=reason)
    return f"{what} was permitted by {found['by']} on {found['at'][:10]} ({found['reason']})"


def _compose(mine: list[Ancestor], plan: Plan | None, broken: str | None) -> tuple[ComposedLineage | None, str | None]:
    """Epsilon of this run and all guaranteed ones before it on the same data; or why there is none."""
    if not mine:
        return None, "the runs are on different datasets: each statement is about its own data"
    if plan is None or broken:
        return None, f"this run gives no guarantee: {broken or 'nothing was planned'}"
    if not all(parent.guarantee for parent in mine):
        return None, "a run before this one on the same dataset has no guarantee, so both together have none"
    for key, own in (("unit", plan.unit), ("neighbouring_relation", plan.neighbouring_relation)):
        if other := next((parent for parent in mine if getattr(parent, key) != own), None):
            label = key.replace("_", " ")
            return None, f"{other.name} was protected by another {label} ({getattr(other, key)}, here {own})"
    known = [parent.event for parent in mine if parent.event is not None]
    if len(known) < len(mine):
        return None, "a run before this one on the same dataset does not say what it released"
    event = accounting.compose([plan.event, *known])
    try:
        epsilon, name = accounting.stated(event, plan.delta, plan.neighbouring_relation)
    except Refused:
        return None, "no accountant knows every part of what the runs released"
    if not math.isfinite(epsilon):
        return None, f"no finite epsilon can be certified at delta {plan.delta:g} for all runs together"
    accountant = f"dp-accounting {name.upper()} {accounting.versions()['version']}"
    return ComposedLineage(epsilon=epsilon, delta=plan.delta, accountant=accountant), None
