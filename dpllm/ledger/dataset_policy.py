"""The account of a recipe's data, and the permitted uses of these data.

Comes in: the recipe and its rows. Goes out: a ``DatasetPolicy``, or a refusal. Every command that trains or plans calls it.
This binds the code of dpllm: it does not stop other programs, or anyone who changes every record a little.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

from dpllm.errors import ConfigError, DataError, Refused
from dpllm.files import scratch
from dpllm.ledger.admission import filter_left
from dpllm.ledger.ledger import Ledger
from dpllm.ledger.records import LEAST_SHARE, Fingerprint, fingerprint, rows_among, share_in_common
from dpllm.ledger.values import check_name
from dpllm.privacy.accounting import Relation
from dpllm.privacy.renyi import Fit
from dpllm.recipe import names
from dpllm.recipe.config import DataConfig, RunConfig, load_config
from dpllm.text import data
from dpllm.text.data import Table
from dpllm.text.layouts import FIELDS


@dataclass(frozen=True)
class DatasetPolicy:
    """The dataset of a recipe, its account and its records."""

    dataset: str  # name in the ledger
    derived_from: str | None  # the dataset that is charged instead, if the recipe declares one
    records: Fingerprint | None  # the records of the name; None if there is no ledger yet
    deviations: tuple[str, ...]  # deviations that every later card must state
    account: str  # the dataset that is charged, or would be


def find_policy(config: RunConfig, table: Table, held_out: Table | None, ledger: Ledger | None) -> DatasetPolicy:
    """Finds the account of a recipe's training rows; refuses uses that the account or the evaluation rows do not permit.

    Raises:
        Refused: Without an exception of the owner: training without differential privacy on data that have a budget or are not
            declared public, or ``insecure_seed`` on data with a budget. Always: records of another dataset of the ledger;
            evaluation data that are training data, or that are declared public and are private.
        ConfigError: ``privacy.derived_from`` names no dataset of the ledger, or the name of the data cannot be published.
    """
    records = fingerprint(table.parts(), FIELDS[table.format], ledger.records.key()) if ledger else None
    registered_name = ledger.records.known_as(records) if ledger and records else None
    name = config.privacy.dataset or registered_name or data.dataset_name(config.data)
    parent = config.privacy.derived_from
    check_name(name)  # before anything is charged under it
    if names.is_absolute(name):
        raise ConfigError(
            f"privacy.dataset: {name!r} is a path of this machine, which no card may hold, so none could be written after the "
            "run is charged. Type a name, such as notes."
        )
    if parent is not None and ledger is None:
        raise ConfigError(f"privacy.derived_from: there is no ledger yet that holds {parent!r}. Remove the key.")
    account = None
    if ledger and records:
        if clash := ledger.records.conflict(name, records, parent):
            raise clash
        account = ledger.account(ledger.records.charged_to(name, parent))
    if not (account and account.permission):
        _refuse_without_privacy(config, name, account is not None and account.budget is not None)
    if held_out is not None:
        train_records = records or fingerprint(table.parts(), FIELDS[table.format], b"compared here")
        _check_evaluation(config, held_out, train_records, ledger, name)
    charged = account.dataset if account else name
    return DatasetPolicy(name, parent, records, tuple(account.deviations()) if account else (), charged)


class Terms(TypedDict):
    """Limits that a budget sets for a plan; arguments of ``run.promise.plan_of``."""

    fit: Fit | None
    largest_delta: float


def terms(ledger: Ledger | None, dataset: str, derived_from: str | None, fit_budget: bool = False) -> Terms:
    """The rest of the budget, if the run is to fit it, and the largest delta for ``privacy.delta: auto``."""
    if ledger is None:
        return {"fit": None, "largest_delta": 1.0}
    account = ledger.account(ledger.records.charged_to(dataset, derived_from))
    fit = filter_left(account) if fit_budget else None
    return {"fit": fit, "largest_delta": account.budget.delta if account.budget else 1.0}


def _refuse_without_privacy(config: RunConfig, name: str, budgeted: bool) -> None:
    if not config.privacy.enabled and (budgeted or not config.data.public):
        status = "has a privacy budget" if budgeted else "is not declared public"
        public = "" if budgeted else ", or data.public: true if the data are"
        problem = (
            f"privacy.enabled: false on dataset {name!r}, which {status}: its texts could be extracted from the adapter. "
            f"Set privacy.enabled: true{public}"
        )
    elif config.privacy.enabled and budgeted and config.privacy.insecure_seed is not None:
        problem = (
            f"privacy.insecure_seed on dataset {name!r}, which has a privacy budget: anyone who knows the seed can remove the "
            "noise. Remove privacy.insecure_seed"
        )
    else:
        return
    authority = "the budget's owner" if budgeted else "whoever answers for the data"
    raise Refused(
        f"{problem}; or let {authority} record an exception: dpllm ledger except {name} --by NAME --reason WHY.",
        dataset=name,
        reason="no_privacy",
    )


def _check_evaluation(
    config: RunConfig, held_out: Table, train_records: Fingerprint, ledger: Ledger | None, dataset: str
) -> None:
    """Refuses evaluation data that are training data, or that are declared public and are private: their losses are published."""
    key = ledger.records.key() if ledger else b"compared here"
    records = fingerprint(held_out.parts(), FIELDS[held_out.format], key)
    share, private_source = share_in_common(records.hashes, train_records.hashes), None
    if config.data.eval_public and not config.data.public and share >= LEAST_SHARE:
        private_source = "data.train, which is not"
    if config.data.eval_public and ledger:
        for name in ledger.records.overlaps(records):
            account = ledger.records.account_name(name)
            if ledger.budget(account) is not None:
                private_source = f"dataset {account!r}, which has a privacy budget"
    if private_source:
        raise Refused(
            f"data.eval is declared public and shares records with {private_source}: exact losses on them would "
            "be in run.json and on the card. Set data.eval_public: false, or evaluate on other data.",
            reason="public_evaluation",
        )
    if 2 * rows_among(held_out.parts(), FIELDS[held_out.format], key, train_records) > len(held_out.rows):
        raise Refused(
            "data.eval holds mostly rows of data.train, so its figures would measure what the model remembers and not what it "
            "learned. Set data.eval to rows that do not train, or to null.",
            dataset=dataset,
            reason="evaluation_trains",
        )


def records_of(source: str, ledger: Ledger, unit: str, relation: Relation = "zero_out") -> tuple[Fingerprint, int]:
    """The records, or labels, of a data file or of a recipe's training data, for a budget about to be set.

    Returns:
        The records, and the number of units: distinct values of the column ``unit``; rows, if it is "example"; or rows of which
        no two share an owner, if rows have several owners.

    Raises:
        ConfigError: The recipe has another unit than the budget, or labels are asked of rows that are not pairs.
        DataError: A row names no unit.
    """
    recipe = Path(source).suffix in (".yaml", ".yml")
    settings = load_config(source).data if recipe else DataConfig(train=source)
    if recipe and settings.unit != unit:
        raise ConfigError(
            f"{source}: data.unit is {settings.unit!r}, and the budget would count per {unit!r}. Type --unit {settings.unit}."
        )
    owners = "several" if relation == "zero_out_public_graph" else settings.owners
    by_unit = settings.changed({"unit": unit, "max_examples_per_unit": 1, "owners": owners})
    try:
        with scratch() as cache:
            table = data.load_table(settings.train, by_unit, settings.train_split, cache)
    except DataError as error:
        if recipe:
            raise
        raise DataError(f"{error} A recipe can say how rows are read: type --data RECIPE, not the file.") from None
    units = len(data.group_rows(table, by_unit))
    labels = relation == "label_changed"
    if labels and table.format != "preference":
        raise ConfigError(f"{source}: is {table.reads}, and only pairs have labels. Name pairs, or leave out --data.")
    key = ledger.records.label_key() if labels else ledger.records.key()
    return fingerprint(table.parts(), FIELDS[table.format], key, pairs_whole=labels), units
