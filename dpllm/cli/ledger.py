"""``dpllm ledger``: the privacy budget of each dataset, across all runs."""

from __future__ import annotations

import argparse
import getpass
import json
import os
import re
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpllm.cli.plan import show, take_json, take_ledger, writing
from dpllm.errors import ConfigError, LedgerContradiction

if TYPE_CHECKING:
    from rich.console import Group

    from dpllm.ledger import Ledger
    from dpllm.ledger.values import Budget
    from dpllm.privacy.events import Event

ACTIONS = {
    "init": "set a dataset's budget, once",
    "except": "permit training without differential privacy on a dataset; every later card will say so",
    "show": "how much of each dataset's budget is used",
    "verify": "detect edits, cuts and reordering (exit code 4)",
    "reconcile": "close a run that will not go on",
    "adopt": "register the new location of a ledger that was moved",
    "import": "record what was spent on a dataset elsewhere",
    "export": "write the chain as JSON, without fingerprints",
    "metrics": "print Prometheus metrics for monitoring",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the actions and their options."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True, prog="dpllm ledger")
    parsers = {}
    for name, text in ACTIONS.items():
        action = actions.add_parser(name, help=text, description=text.capitalize() + ".", allow_abbrev=False)
        take_ledger(action)
        parsers[name] = action
    for name in ("init", "except", "import"):
        parsers[name].add_argument("dataset", help="name of the dataset")
    for name in ("show", "verify"):
        take_json(parsers[name])
    parsers["show"].add_argument("dataset", nargs="?", help="name of the dataset (default: all)")
    for name in ("init", "except", "reconcile", "adopt", "import"):
        parsers[name].add_argument("--by", help="who is responsible for it (default: this user)")
        parsers[name].add_argument("--reason", required=True, help="why")
    for name, source in (("init", ""), ("import", "that of the budget, or else ")):
        unit, relation = (None, None) if source else ("example", "zero_out")
        relations = ["zero_out", "zero_out_public_graph", "add_or_remove_one", "label_changed"]
        parsers[name].add_argument("--unit", default=unit, help=f"privacy unit (default: {source}example)")
        text = f"neighbouring relation (default: {source}zero_out); zero_out_public_graph is of data.owners: several, "
        text += "label_changed of the labels of the dataset"
        parsers[name].add_argument("--relation", default=relation, choices=relations, help=text)
    init = parsers["init"]
    init.add_argument("--epsilon", type=float, required=True, help="of all runs together")
    init.add_argument("--delta", type=float, required=True, help="of all runs together, well below 1/N")
    text = "part of delta set aside for imported runs"
    init.add_argument("--import-delta", type=float, default=0.0, help=text)
    init.add_argument(
        "--data", help="a data file, or a recipe that names its columns: copies are recognised from now on"
    )
    verify = parsers["verify"]
    verify.add_argument("--head", help="a head that was copied elsewhere, as HASH:COUNT")
    verify.add_argument("--file", help="verify an exported chain instead")
    parsers["reconcile"].add_argument("entry", help="the reservation's entry, as dpllm ledger show lists it")
    imported = parsers["import"]
    imported.add_argument("--run", default="elsewhere", help="name of the run")
    imported.add_argument("--epsilon", type=float, help="what it stated")
    imported.add_argument("--delta", type=float, default=0.0, help="delta of that epsilon")
    imported.add_argument(
        "--event",
        help="JSON file with its accounting event, if known, or the plan.json of a run, whose unit and relation count",
    )
    parsers["export"].add_argument("--output", help="file (default: standard output)")
    text = "directory of the node exporter's textfile collector (default: standard output)"
    parsers["metrics"].add_argument("--textfile", metavar="DIR", help=text)


def run(args: argparse.Namespace, overrides: list[str]) -> int:
    """Runs one action."""
    from dpllm.ledger import default_path, open_ledger
    from dpllm.ledger.values import check_person, label_account

    if args.action == "verify" and args.file:
        return _verify(None, args)
    if "by" in args:
        args.by = _this_user() if args.by is None else args.by
        check_person("an entry is made", args.by, args.reason)
    if getattr(args, "relation", None) == "label_changed":
        args.dataset = label_account(args.dataset)
    if args.action == "init":  # checked before a ledger is created
        args.wanted = _budget_of(args)
    ledger = open_ledger(args.ledger, create=args.action in ("init", "except", "import"))
    if ledger is None:
        path = args.ledger or default_path()
        raise ConfigError(f"{path}: no ledger there yet; the first private run makes one. Type --ledger for another.")
    with ledger, ledger.counting():
        code: int = globals()[f"_{args.action}"](ledger, args)
        return code


def _this_user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        raise ConfigError("this user has no name, and an entry needs one: type --by NAME") from None


def _budget_of(args: argparse.Namespace) -> Budget:
    from dpllm.ledger.budgets import check_budget
    from dpllm.ledger.values import Budget

    budget = Budget(
        args.epsilon,
        args.delta,
        args.unit,
        args.relation,
        import_delta=args.import_delta,
        by=args.by,
        reason=args.reason,
    )
    check_budget(args.dataset, budget)
    name = args.data
    if name is not None and not os.path.exists(name) and not name.startswith("builtin:") and name.count("/") != 1:
        raise ConfigError(f"{name}: no such file. Check the spelling.")
    return budget


def _init(ledger: Ledger, args: argparse.Namespace) -> int:
    from dpllm.ledger import admission, budgets, dataset_policy
    from dpllm.ledger.values import used_in_words
    from dpllm.privacy.plan import auto_delta, check_delta

    terms = ledger, args.unit, args.relation
    records, units = dataset_policy.records_of(args.data, *terms) if args.data else (None, None)
    if units is not None:
        check_delta(args.delta, units, "--delta", f"Type --delta {auto_delta(units):g} or less.")
        if args.delta * units > 0.1 * (1 + 1e-9):
            print(
                f"Beware: delta {args.delta:g} is more than a tenth of 1/N = {1 / units:.2g}, so close that single records "
                "could be published outright."
            )
    before = ledger.budget(args.dataset)
    budget = budgets.set_budget(ledger, args.dataset, args.wanted, records=records)
    print(f"{args.dataset}: {budget}, in {ledger.location}")
    if before is not None:
        print("It has this budget already." if budget == before else f"It replaces: {before}.")
    share = ledger.used(args.dataset) or 0.0
    if admission.filter_allowance(budget) <= 0:
        print("It is too small for runs in any order: only one run or sweep that is --final can use it.")
    elif budget.relation == "label_changed":
        print(f"{used_in_words(share, budget)}; the epsilons of draws add up.")
    else:
        print(f"{used_in_words(share, budget)}; dpllm plan RECIPE says how many runs like it fit.")
    if records is None:
        print("Until the first run the data are known only by name. Type --data FILE to recognise copies from now on.")
    return 0


def _except(ledger: Ledger, args: argparse.Namespace) -> int:
    from dpllm.ledger import budgets

    budgets.except_from_privacy(ledger, args.dataset, args.by, args.reason)
    print(
        f"{args.dataset}: training without differential privacy is permitted by {args.by}. Every later card will say so, and "
        "the ledger's total does not cover it."
    )
    return 0


def _show(ledger: Ledger, args: argparse.Namespace) -> int:
    names = ledger.datasets()
    if args.dataset is not None:
        account = ledger.records.account_name(args.dataset)
        if account not in names:
            raise ConfigError(
                f"{ledger.location}: knows no dataset {args.dataset!r}. It knows: {', '.join(names) or 'none'}."
            )
        names = [account]
    overview = _overview_values(ledger, names)
    return show(args, overview if args.json else _overview(overview))


def _overview_values(ledger: Ledger, datasets: Sequence[str]) -> dict[str, Any]:
    from dpllm.ledger import admission

    accounts = {}
    for name in datasets:
        account, imports = ledger.account(name), [entry.facts for entry in ledger.chain.of(name, "import")]
        accounts[name] = {
            "budget": asdict(account.budget) if account.budget else None,
            "runs": [
                {key: getattr(run, key) for key in ("state", "steps", "heartbeat")}
                | {key: getattr(run.reservation, key) for key in ("entry", "run", "num_steps", "epsilon", "delta")}
                for run in account.runs
            ],
            "used": admission.used(account),
            "imports": [{"run": facts["run"], "event": facts["event"]} for facts in imports],
            "says": totals(ledger, name),
        }
    refused = ledger.refusals().items()
    refusals = [{"dataset": dataset, "reason": reason, "number": number} for (dataset, reason), number in refused]
    chain = {"location": str(ledger.location), "head": ledger.head(), "problems": ledger.verify()}
    return {"datasets": accounts, "refusals": refusals, **chain}


def _overview(overview: dict[str, Any]) -> Group:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from dpllm.ledger.values import OPEN

    def plain(text: object) -> Text:
        """Text without markup, control characters or characters that cannot be encoded."""
        return Text("".join(letter if letter.isprintable() else "?" for letter in str(text)))

    parts: list[Any] = []
    for name, account in overview["datasets"].items():
        table = Table(title=plain(name), title_justify="left", title_style="bold")
        table.add_column("entry", no_wrap=True)
        for column in ("run", "steps", "state", "epsilon", "delta"):
            table.add_column(column, justify="left" if column in ("run", "state") else "right")
        for run in account["runs"]:
            cost = f"{run['epsilon']:.3f}", f"{run['delta']:g}"
            state = run["state"] + (f", seen {_age(run['heartbeat'])} ago" if run["state"] in OPEN else "")
            table.add_row(run["entry"], plain(run["run"]), f"{run['steps']}/{run['num_steps']}", state, *cost)
        for past in account["imports"]:
            event = past["event"]
            cost = (f"{event['epsilon']:.3f}", f"{event['delta']:g}") if event["type"] == "imported" else ("", "")
            table.add_row("", plain(f"{past['run']} (imported)"), "", "imported", *cost)
        parts += [table, *map(plain, account["says"]), ""]
    if refused := [f"{row['dataset']}: {row['reason']} {row['number']}" for row in overview["refusals"]]:
        parts.append(plain("Refused: " + "; ".join(refused)))
    head = overview["head"]
    sound = f"{overview['location']}: {head['count']} entries, chain unbroken, head {head['hash'][:12]}"
    return Group(*parts, plain(overview["problems"][0] if overview["problems"] else sound))


def totals(ledger: Ledger, dataset: str) -> list[str]:
    """The used share of a dataset's budget (the total, if there is none or after a final run); then groups and exceptions."""
    from dpllm.ledger import admission
    from dpllm.ledger.admission import group_total
    from dpllm.ledger.values import used_in_words

    account = ledger.account(dataset)
    budget, share = account.budget, admission.used(account)
    lines = []
    if budget is not None and share is not None:
        fit = ""
        if account.runs:
            last = account.runs[-1]
            fit = f"; {admission.runs_that_fit(account, last.event)} more like run {last.reservation.run} fit"
        lines.append(f"{used_in_words(share, budget)}{fit}.")
    else:
        spent = ledger.spent(dataset)
        exact = account.final and not account.imports  # an import may have been chosen after the final run's results
        basis = "closed by a final reservation: exactly" if exact else "as if fixed in advance:"
        exceeds = ", which exceeds the budget" if budget and spent > budget.epsilon else ""
        lines.append(f"All runs, {basis} epsilon {spent:.4f}{exceeds}.")
    lines.append(f"Budget: {budget}." if budget else "No budget is set: runs are charged without a limit.")
    for name, runs in account.groups().items():
        group, done = group_total(account, name), sum(run.state == "completed" for run in runs)
        lines.append(
            f"Tuning group {name}: {group['runs']} runs fixed together, {done} completed; all of them come to epsilon "
            f"{group['epsilon']:.3f} at delta {group['delta']:g}."
        )
    return lines + [f"Exception: {line}." for line in account.deviations()]


def _age(heartbeat: float) -> str:
    age = max(0, round(time.time() - heartbeat))
    return f"{age} s" if age < 120 else f"{age // 60} min" if age < 7200 else f"{age // 3600} h"


def _verify(ledger: Ledger | None, args: argparse.Namespace) -> int:
    """Checks a ledger; None: the export of --file."""
    from dpllm.files import read_json
    from dpllm.ledger.chain import read_export, verify_export

    head = _head(args.head)
    if ledger is not None:
        location, problems, last = ledger.location, ledger.verify(head), ledger.head()
    else:
        value, location = read_json(Path(args.file)), args.file
        read_export(value, Path(args.file))
        problems, last = verify_export(value, head), value["head"]
    if args.json:
        show(args, {"location": str(location), "head": last, "problems": problems})
    if problems:
        raise LedgerContradiction(f"{location}: " + " ".join(problems))
    if args.json:
        return 0
    print(f"{location}: {last['count']} entries, chain unbroken, head {last['hash']}:{last['count']}")
    if head is None:
        print("Only a head copied elsewhere shows whether a chain was cut or rewritten: --head HASH:COUNT")
    return 0


def _head(text: str | None) -> dict[str, Any] | None:
    if text is None:
        return None
    if not (match := re.fullmatch(r"(.{64}):([1-9][0-9]{0,17})", text)):
        raise ConfigError(
            f"--head {text!r} is not HASH:COUNT with a count of 1 or more. For the head in a run's run.json, type dpllm verify "
            "RUN --ledger FILE."
        )
    return {"hash": match[1], "count": int(match[2])}


def _reconcile(ledger: Ledger, args: argparse.Namespace) -> int:
    closed = ledger.reconcile(args.entry, args.by, args.reason)
    claim = closed.reservation
    consequence = "its whole reservation stays in the total, which is composed as if fixed in advance"
    if ledger.used(claim.dataset) is not None:
        consequence = "the steps that never ran are returned to the budget"
    print(f"{claim.dataset}: run {claim.run} closed after {closed.steps} of {claim.num_steps} steps; {consequence}.")
    return 0


def _adopt(ledger: Ledger, args: argparse.Namespace) -> int:
    from dpllm.ledger import budgets

    budgets.adopt(ledger, args.by, args.reason)
    print(f"{ledger.location}: is the ledger from now on. Do not write to another copy: that would be a second budget.")
    return 0


def _import(ledger: Ledger, args: argparse.Namespace) -> int:
    from dpllm.files import read_json
    from dpllm.ledger import budgets
    from dpllm.ledger.values import LABELS
    from dpllm.privacy.events import Imported, read
    from dpllm.privacy.parts import imported_delta

    if (args.epsilon is None) == (args.event is None):
        raise ConfigError("what was spent? Type --epsilon E [--delta D], or --event FILE.")
    event: Event
    plan: dict[str, Any] = {}
    if args.event:
        value = read_json(Path(args.event))
        if "num_steps" in value:
            plan = value
            if lacking := [key for key in ("event", "unit", "neighbouring_relation") if not plan.get(key)]:
                raise ConfigError(f"{args.event}: a plan.json without {lacking[0]!r} is damaged. Type the run's own.")
        event = read(plan.get("event", value))
    else:
        event = Imported(args.epsilon, args.delta)
    account, delta = ledger.account(args.dataset), imported_delta(event)
    budget = account.budget
    if budget and not account.used and delta > budget.import_delta:  # its owner can still correct it
        raise ConfigError(
            f"the budget of {args.dataset} sets aside a delta of {budget.import_delta:g} for imports, and this one has "
            f"{delta:g}, so that no run would be admitted after it. Type first: dpllm ledger init {args.dataset} "
            f"--import-delta {delta:g}, with the rest as before; or enter its accounting event (--event FILE)."
        )
    if args.dataset.startswith(LABELS):
        args.relation = "label_changed"
    unit = plan["unit"] if plan else args.unit or (budget.unit if budget else "example")
    relation = plan["neighbouring_relation"] if plan else args.relation or (budget.relation if budget else "zero_out")
    if args.unit not in (None, unit) or args.relation not in (None, relation):
        raise ConfigError(
            f"{args.event}: its run protects a {unit} under {relation}, but an account has one unit and one relation. Leave out "
            "--unit and --relation, and name a dataset whose account has these."
        )
    responsible = {"by": args.by, "reason": args.reason}
    budgets.import_run(ledger, args.dataset, event=event, run=args.run, unit=unit, relation=relation, **responsible)
    print(f"{args.dataset}: entered. {totals(ledger, args.dataset)[0]}")
    if (ledger.used(args.dataset) or 0) >= 1:
        print("That leaves nothing of the budget: every further run will be refused.")
    return 0


def _export(ledger: Ledger, args: argparse.Namespace) -> int:
    from dpllm.files import write_json

    value = ledger.chain.export()
    if args.output:
        with writing(args.output):
            write_json(Path(args.output), value)
        print(f"{args.output}: {value['head']['count']} entries")
    else:
        print(json.dumps(value, indent=2, sort_keys=True))
    return 0


def _metrics(ledger: Ledger, args: argparse.Namespace) -> int:
    from dpllm.telemetry import metrics

    families = metrics.ledger_families(ledger)
    if args.textfile is None:
        print(metrics.exposition(families).decode(), end="")
        return 0
    try:
        metrics.write(Path(args.textfile) / metrics.LEDGER, families)
    except OSError as error:
        raise ConfigError(
            f"--textfile {args.textfile}: cannot be written to ({error.strerror}). Type the directory that the node exporter "
            "reads."
        ) from None
    return 0
