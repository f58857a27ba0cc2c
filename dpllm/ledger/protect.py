"""Which account a recipe's data belong to, and what may be done with them.

Comes in: the recipe and its rows. Goes out: a ``Custody``, or a refusal. Every command that trains or plans asks here.
This binds the code of dpllm: it does not stop other programs, nor somebody who changes every record a little.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from dpllm import data
from dpllm.config import DataConfig, RunConfig, load_config
from dpllm.data import FIELDS, Table
from dpllm.errors import ConfigError, Refused
from dpllm.ledger.book import Ledger, open_ledger
from dpllm.ledger.fingerprint import Fingerprint, fingerprint, share_in_common
from dpllm.ledger.records import LEAST_SHARE
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
            no exception of its owner; records that are another dataset of the ledger, or repeated more often than before;
            evaluation data declared public that are not; a budget in another ledger, or in one that cannot be asked.
        ConfigError: ``privacy.derived_from`` names no dataset of the ledger.
    """
    records = fingerprint(table.rows, FIELDS[table.format], book.records.key()) if book else None
    known = book.records.known_as(records) if book and records else None
    name = config.privacy.dataset or known or data.dataset_name(config.data)
    parent = config.privacy.derived_from
    if parent is not None and book is None:
        raise ConfigError(f"privacy.derived_from: there is no ledger yet that knows {parent!r}. Remove the key.")
    budgeted, excepted, exceptions = False, False, []
    if book and records:
        if clash := book.records.conflict(name, records, parent):
            raise clash
        account = book.records.charged_to(name, parent)
        budgeted, excepted = book.budget(account) is not None, book.excepted(account)
        exceptions = book.exceptions(account)
        if budgeted and config.data.unit == "example":
            _refuse_repetitions(book, account, records)
    if not config.privacy.enabled and not excepted:
        _refuse_without_privacy(config, name, budgeted)
    evaluation = _public_evaluation(config)
    if evaluation and not config.data.public:
        own, other = (fingerprint(part.rows, FIELDS[part.format], b"compared here") for part in (evaluation, table))
        _refuse_evaluation("data.train, which is not", share_in_common(own.hashes, other.hashes))
    if evaluation and book:
        _refuse_budgeted_evaluation(evaluation, book)
    for elsewhere in _other_ledgers(book):
        with elsewhere:
            _refuse_outside(config, table, elsewhere)
            if evaluation:
                _refuse_budgeted_evaluation(evaluation, elsewhere)
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


def _refuse_repetitions(book: Ledger, account: str, records: Fingerprint) -> None:
    """Whoever repeats the rows of a budgeted dataset multiplies what each of its people gives, at the price of one row."""
    if book.records.repeated(account, records) >= LEAST_SHARE:
        raise Refused(
            f"data.train shares records with dataset {account!r} that occur more often here than in the data its budget is "
            "about: each row would be protected as before, and whoever stands behind it less. Remove the repetitions.",
            dataset=account,
            reason="repeated",
        )


def _public_evaluation(config: RunConfig) -> Table | None:
    """Evaluation data whose exact losses would be published."""
    if config.data.eval is None or not config.data.eval_public:
        return None
    with tempfile.TemporaryDirectory() as cache:
        return data.load_table(config.data.eval, config.data, config.data.eval_split, Path(cache))


def _refuse_budgeted_evaluation(evaluation: Table, book: Ledger) -> None:
    name, share = _budgeted_in(evaluation, book)
    _refuse_evaluation(f"dataset {name!r}, which has a privacy budget", share)


def _refuse_evaluation(whose: str, share: float) -> None:
    if share >= LEAST_SHARE:
        raise Refused(
            f"data.eval is declared public and shares records with {whose}: exact losses on them would "
            "stand in run.json and on the card. Set data.eval_public: false, or evaluate on other data.",
            reason="public_evaluation",
        )


def _refuse_outside(config: RunConfig, table: Table, elsewhere: Ledger) -> None:
    other, share = _budgeted_in(table, elsewhere)
    if other is None or share < LEAST_SHARE:
        return
    if not config.privacy.enabled and elsewhere.excepted(other):
        return
    raise Refused(
        f"data.train has records of dataset {other!r}, whose budget lies in another ledger, {elsewhere.location}: outside it "
        f"nothing may be trained on them. Set privacy.ledger: {elsewhere.location}.",
        dataset=other,
        reason="outside_ledger",
    )


def _budgeted_in(table: Table, book: Ledger) -> tuple[str | None, float]:
    """The account with a budget that shares most records with these rows, and the share."""
    records = fingerprint(table.rows, FIELDS[table.format], book.records.key())
    for name, share in sorted(book.records.overlaps(records).items(), key=lambda item: -item[1]):
        account = book.records.account_name(name)
        if book.budget(account) is not None:
            return account, share
    return None, 0.0


def records_of(source: str, book: Ledger, unit: str) -> tuple[Fingerprint, int]:
    """The records of a data file, or of the training data of a recipe, for a budget that is about to be set on them.

    Args:
        source: A data file, or a recipe.
        book: The ledger that the budget will lie in.
        unit: The privacy unit of the budget: a column of the data, or "example".

    Returns:
        The records, and the number of units.

    Raises:
        ConfigError: Neither can be read.
        DataError: A row that names no unit.
        Refused: They have a budget in another ledger already.
    """
    recipe = Path(source).suffix in (".yaml", ".yml")
    wanted = load_config(source).data if recipe else DataConfig(train=source)
    with tempfile.TemporaryDirectory() as cache:
        table = data.load_table(wanted.train, wanted, wanted.train_split, Path(cache))
    if recipe and wanted.unit != unit:
        raise ConfigError(
            f"{source}: data.unit is {wanted.unit!r}, and the budget would count per {unit!r}. Type --unit."
        )
    by_unit = wanted.model_copy(update={"unit": unit, "max_examples_per_unit": 1})
    units = len(data.group_rows(table, by_unit))
    for elsewhere in _other_ledgers(book):
        with elsewhere:
            other, share = _budgeted_in(table, elsewhere)
            if other is not None and share >= LEAST_SHARE:
                raise Refused(
                    f"{wanted.train} has records of dataset {other!r}, whose budget lies in another ledger, "
                    f"{elsewhere.location}: two budgets for the same people would be none. Keep to that one.",
                    dataset=other,
                    reason="outside_ledger",
                )
    return fingerprint(table.rows, FIELDS[table.format], book.records.key()), units


def remember_ledger(book: Ledger) -> None:
    """Notes that this ledger holds a budget, so that runs that name another one are checked against it too."""
    location = book.location if "://" in book.location else str(Path(book.location).resolve())
    if location not in _registered():
        path = _registry()
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a", encoding="utf-8") as file:  # one short line is appended whole, whoever else appends
            file.write(location + "\n")


def _registry() -> Path:
    return default_path().parent / "ledgers.txt"


def _registered() -> list[str]:
    """Where this user set budgets.

    Raises:
        Refused: The list cannot be read, so that nobody knows what has a budget.
    """
    try:
        return [line for line in _registry().read_text(encoding="utf-8").splitlines() if line]
    except FileNotFoundError:
        return []
    except (OSError, ValueError):
        raise Refused(
            f"{_registry()}, the list of ledgers with budgets of this user, cannot be read, so whether data.train has a budget "
            "in one of them cannot be told. Restore it, one location a line.",
            reason="unreachable_ledger",
        ) from None


def _other_ledgers(book: Ledger | None) -> Iterator[Ledger]:
    """Ledgers in which this user set budgets, and the default one; a file that is gone is left out.

    Raises:
        Refused: One of them cannot be opened, so that it cannot be asked.
    """
    mine = book.records.key() if book else None
    for location in dict.fromkeys([str(default_path().resolve()), *_registered()]):
        try:
            other = open_ledger(location, create=False)
        except ConfigError as error:
            raise Refused(
                f"a ledger with budgets of this user cannot be asked whether data.train is budgeted there: {error} If it is gone "
                f"for good, remove its line from {_registry()}.",
                reason="unreachable_ledger",
            ) from None
        if other is None:
            continue
        if other.records.key() == mine:  # the same one, whatever the path or URL
            other.close()
        else:
            yield other
