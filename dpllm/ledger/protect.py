"""Which account a recipe's data belong to, and what may be done with them.

Comes in: the recipe and its rows. Goes out: a ``Custody``, or a refusal. Every command that trains or plans asks here.
This binds the code of dpllm: it does not stop other programs, nor somebody who changes every record a little.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from dpllm import data
from dpllm.config import RunConfig
from dpllm.data import FIELDS, Table
from dpllm.errors import ConfigError, Refused
from dpllm.ledger.book import Ledger, open_ledger
from dpllm.ledger.fingerprint import Fingerprint, fingerprint
from dpllm.ledger.store import default_path
from dpllm.privacy.renyi import Fit


@dataclass(frozen=True)
class Custody:
    """Whose data a recipe trains on.

    Attributes:
        dataset: Their name in the ledger.
        derived_from: The dataset that is charged instead, where the recipe declares one.
        records: What the name stands for; None where there is no ledger yet.
        exceptions: Who permitted training without differential privacy on them, when and why.
    """

    dataset: str
    derived_from: str | None
    records: Fingerprint | None
    exceptions: tuple[dict[str, Any], ...]

    def deviations(self) -> list[str]:
        """What every later card must say."""
        return [
            f"training without differential privacy on dataset {self.dataset!r} was permitted by {e['by']} on {e['at'][:10]} "
            f"({e['reason']}); no figure of the ledger covers what was trained that way"
            for e in self.exceptions
        ]


def take_custody(config: RunConfig, table: Table, book: Ledger | None) -> Custody:
    """Finds the account of a recipe's data, and refuses what it does not permit.

    Args:
        config: The recipe.
        table: Its training rows.
        book: The ledger that the recipe names; None where there is none yet.

    Raises:
        Refused: Training without differential privacy on data that are not declared public, or that have a budget, and
            no exception; records that are another dataset of the ledger; or a budget in another ledger.
        ConfigError: ``privacy.derived_from`` names no dataset of the ledger.
    """
    records = fingerprint(table.rows, FIELDS[table.format], book.records.key()) if book else None
    known = book.records.known_as(records) if book and records else None
    name = config.privacy.dataset or known or data.dataset_name(config.data)
    parent = config.privacy.derived_from
    if parent is not None and book is None:
        raise ConfigError(f"privacy.derived_from: there is no ledger yet that knows {parent!r}. Remove the key.")
    budgeted, exceptions = False, []
    if book and records:
        if clash := book.records.conflict(name, records, parent):
            raise clash
        account = book.records.charged_to(name, parent)
        budgeted, exceptions = book.budget(account) is not None, book.exceptions(account)
    if not config.privacy.enabled and not exceptions:
        _refuse_without_privacy(config, name, budgeted)
    for elsewhere in _other_ledgers(book):
        with elsewhere:
            _refuse_outside(config, table, elsewhere)
    return Custody(name, parent, records, tuple(exceptions))


class Terms(TypedDict):
    """What a budget asks of a plan; arguments of ``make_plan``."""

    fit: Fit | None
    largest_delta: float


def terms(book: Ledger | None, dataset: str, derived_from: str | None) -> Terms:
    """What is left of an adaptive budget, and the largest delta that a budget leaves to ``privacy.delta: auto``."""
    if book is None:
        return {"fit": None, "largest_delta": 1.0}
    budget = book.budget(book.records.charged_to(dataset, derived_from))
    fit = book.fit(dataset, derived_from)
    return {"fit": fit, "largest_delta": budget.delta if budget else 1.0}


def _refuse_without_privacy(config: RunConfig, name: str, budgeted: bool) -> None:
    if budgeted:
        raise Refused(
            f"privacy.enabled: false on dataset {name!r}, which has a privacy budget: whatever it holds could be read out of the "
            "adapter, and no ledger would show it. Set privacy.enabled: true, or let the budget's owner record an exception: "
            f"dpllm ledger except {name} --by NAME --reason WHY.",
            dataset=name,
            reason="no_privacy",
        )
    if not config.data.public:
        raise Refused(
            "privacy.enabled: false trains without differential privacy, and data.train is not declared public: whatever it "
            "holds could be read out of the adapter. Set data.public: true if it is public, or privacy.enabled: true; or let "
            f"whoever answers for the data record an exception: dpllm ledger except {name} --by NAME --reason WHY.",
            dataset=name,
            reason="no_privacy",
        )


def _refuse_outside(config: RunConfig, table: Table, elsewhere: Ledger) -> None:
    records = fingerprint(table.rows, FIELDS[table.format], elsewhere.records.key())
    known = elsewhere.records.known_as(records)
    for other in [known] if known else elsewhere.records.overlaps(records):
        share = 1.0 if known else elsewhere.records.overlaps(records)[other]
        account = elsewhere.records.account_name(other)
        if share < 0.01 or elsewhere.budget(account) is None:
            continue
        if not config.privacy.enabled and elsewhere.exceptions(account):
            continue
        raise Refused(
            f"data.train has records of dataset {other!r}, whose budget lies in another ledger, {elsewhere.location}: outside it "
            f"nothing may be trained on them. Set privacy.ledger: {elsewhere.location}.",
            dataset=account,
            reason="outside_ledger",
        )


def records_of(source: str, book: Ledger) -> Fingerprint:
    """The records of a data file, or of the training data of a recipe.

    Raises:
        ConfigError: Neither can be read.
    """
    import tempfile

    from dpllm.config import DataConfig, load_config

    recipe = Path(source).suffix in (".yaml", ".yml")
    wanted = load_config(source).data if recipe else DataConfig(train=source)
    with tempfile.TemporaryDirectory() as cache:
        table = data.load_table(wanted.train, wanted, wanted.train_split, Path(cache))
    return fingerprint(table.rows, FIELDS[table.format], book.records.key())


def remember_ledger(book: Ledger) -> None:
    """Notes that this ledger holds a budget, so that runs that name another one are checked against it too."""
    path = _registry()
    known = _registered()
    location = book.location if "://" in book.location else str(Path(book.location).resolve())
    if location not in known:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(sorted({*known, location}), indent=2) + "\n", encoding="utf-8")


def _registry() -> Path:
    return default_path().parent / "ledgers.json"


def _registered() -> list[str]:
    with suppress(OSError, ValueError):
        return [str(location) for location in json.loads(_registry().read_text(encoding="utf-8"))]
    return []


def _other_ledgers(book: Ledger | None) -> Iterator[Ledger]:
    """Ledgers in which this user set budgets, and the default one; those that cannot be opened are left out."""
    here = book.location if book else None
    mine = here if here is None or "://" in here else str(Path(here).resolve())
    for location in dict.fromkeys([str(default_path().resolve()), *_registered()]):
        if location != mine:
            with suppress(ConfigError):
                other = open_ledger(location, create=False)
                if other is not None:
                    yield other
