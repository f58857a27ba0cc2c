"""Statistics of private data, released with differential privacy: what they cost, their reservation, then the draws.

Comes in: the recipe, what is asked, an epsilon for all of it. Goes out: an ``Offer``, which spends nothing; of one, the released
``Statistics`` and their file. Must not draw noise (``privacy.releases``), nor compute a value (``asked``).

Guarantee:
    What ``release`` returns and writes is (epsilon, delta)-differentially private for one unit, all of whose rows but
    ``max_examples_per_unit`` are left out by a rule that reads that unit's rows only. Each release is an entry of the ledger:
    reserved, charged before its value is computed, and closed when the file is there, so that a crash leaves it charged.
    Which columns the data have, and that they can be read, is taken as public: where not, there is a refusal, and no release.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path

import dpllm
from dpllm.errors import ConfigError, Refused
from dpllm.files import alone, scratch, write_json
from dpllm.ledger import Ledger, Outlook, RunRequest, dataset_policy, open_ledger
from dpllm.ledger.budgets import reserve_all
from dpllm.privacy.accounting import compose, epsilon
from dpllm.privacy.events import count_releases, number
from dpllm.privacy.plan import auto_delta, resolved_delta
from dpllm.privacy.releases import Measurement, Statistic, measurement
from dpllm.recipe.config import RunConfig
from dpllm.records import Json
from dpllm.releases.asked import columns_of, exact_values
from dpllm.run.base_model import of_base
from dpllm.run.subject import public_units
from dpllm.statement.released import Statistics
from dpllm.text import data
from dpllm.text.data import Groups

DELTA = 1e-9
"""At which a total is stated where neither a budget nor the user names another: no release needs one."""
FINEST = 1e-4
"""Epsilons are multiples of it, as PLD counts."""
MOST_TEXT = 160_000
"""Bytes of all releases as JSON; with values, not three times as many, ``dpllm verify`` still reads a card that shows them."""
Charge = Callable[[int], None]
"""Writes down that a step of a release, counted from 1, is about to be drawn."""


@dataclass(frozen=True)
class Offer:
    """What would be released, before anything is spent.

    Attributes:
        statistics: Costs and errors, without values.
        seen: What the ledger holds for the dataset, and would hold; None where there is none yet.
        notes: What the noise does, for people.
    """

    statistics: Statistics
    seen: Outlook | None
    notes: tuple[str, ...]
    _source: Opened
    _ready: Callable[[], object]  # what may fail because of a row, while it is free
    _draws: Sequence[Callable[[Charge], Json]]  # of each release: fields that are known when it is drawn
    _write: Callable[[Path, Statistics], None]

    def release(self, output: Path) -> Statistics:
        """Reserves, draws and writes; within ``offered`` with ``create``.

        Raises:
            BudgetExceeded: The ledger has no room for all of them; nothing is spent.
            DataError: A row of which the chat template makes no tokens; nothing is spent.
            ConfigError: ``output`` is there already or cannot be written, or another process writes there.
        """
        with alone(output, output.with_name(f".{output.name}.lock")):
            if output.exists():
                raise ConfigError(
                    f"--output {output}: holds an earlier release, which would be lost, and releasing it again costs again. "
                    "Type another."
                )
            if self.seen and self.seen.error:
                raise self.seen.error
            ledger, policy, releases = self._source.ledger, self._source.policy, []
            assert ledger is not None
            self._ready()
            claims = reserve_all(
                ledger,
                policy.dataset,
                self._source.requests(self.statistics),
                records=policy.records,
                derived_from=policy.derived_from,
            )
            for release, draw, claim in zip(self.statistics.releases, self._draws, claims, strict=True):
                values = draw(partial(ledger.charge, claim.entry))
                releases.append(release.model_copy(update={**values, "entry": claim.entry}))
            released = self.statistics.model_copy(update={"releases": tuple(releases)})
            self._write(output, released)
            for claim in claims:
                ledger.finish(claim.entry, "completed")
            return released


@contextlib.contextmanager
def offered(
    config: RunConfig, asked: Sequence[Sequence[Statistic]], epsilon: float, delta: float | str | None, *, create: bool
) -> Iterator[Offer]:
    """What statistics would cost and how exact they would be; spends nothing.

    A refusal that comes of the records tells whether rows are among a dataset's, and is counted, of a dry run too: without a
    look at them the costs shown could be those of another account.

    Args:
        config: The recipe: whose data, and which ledger.
        asked: Statistics, each with its releases; equal parts of epsilon for each statistic, and within it for each release.
        epsilon: Of all of them together, > 0.
        delta: At which they come to it, below 1/N, since at 0.9 an exact count would cost epsilon 0; auto: as in a run; None: the
            budget's, or ``DELTA``. N is data.public_size, or counted: the relation is then zero-out, which compares datasets of
            one public size, and a run publishes that too.
        create: Make the ledger if there is none, to release afterwards.

    Raises:
        DataError: The data cannot be read, or have no such column.
        ConfigError: A part of epsilon is too small, too many values are declared, or OpenDP is not there.
        Refused: These records are another dataset of the ledger; or delta is 1/N or more.
    """
    tokenizer = None
    if any(one.kind == "lengths" for group in asked for one in group):
        from dpllm.model.loading import load_tokenizer

        tokenizer = load_tokenizer(config.model, config.data)
    columns = (name for group in asked for one in group for name in columns_of(one))
    with opened(without_evaluation(config), delta, columns, max_delta=DELTA, create=create) as source:
        exact = partial(exact_values, units=source.units, table=source.table, data=config.data, tokenizer=tokenizer)
        measurements, statistics = _priced(config, asked, epsilon, source)

        def ready() -> None:
            # A row that cannot be read, say by a chat template, is refused while that is free.
            for statistic in {(one.asked.kind, one.asked.column): one.asked for one in measurements}.values():
                deque(exact(statistic), maxlen=0)

        def draw(measure: Measurement, charge: Charge) -> Json:
            charge(1)
            return {"value": measure.release(exact(measure.asked))}

        def write(output: Path, released: Statistics) -> None:
            write_json(output, released.to_json())

        draws = [partial(draw, measure) for measure in measurements]
        yield Offer(statistics, source.outlook(statistics), (), source, ready, draws, write)


def without_evaluation(config: RunConfig) -> RunConfig:
    """The same recipe, whose evaluation data nobody reads."""
    return config.changed({"data.eval": None})


def refuse_adapter(config: RunConfig) -> None:
    """Refuses an adapter where nothing trains, with a ConfigError."""
    if config.model.adapter is not None:
        raise ConfigError(
            "model.adapter: is an adapter to train on from, and nothing trains here. Merge it, or leave it out."
        )


@dataclass(frozen=True)
class Opened:
    """Private rows, and the account that pays for what is released of them."""

    table: data.Table
    units: Groups
    ledger: Ledger | None
    policy: dataset_policy.DatasetPolicy
    account: str
    delta: float
    final: bool  # nothing can follow what is released

    def statistics(self, config: RunConfig, releases: Sequence[Json], software: Mapping[str, str]) -> Statistics:
        """What would be released of these data today, and what all of it costs together."""
        relation, event = config.data.relation, compose([release["event"] for release in releases])
        return Statistics.pick(
            {},
            dataset=self.account,
            unit=config.data.unit,
            max_examples_per_unit=config.data.max_examples_per_unit or 1,
            neighbouring_relation=relation,
            epsilon=epsilon(event, self.delta, relation),
            delta=self.delta,
            date=time.strftime("%Y-%m-%d", time.gmtime()),
            software={"dpllm": dpllm.__version__, **software},
            releases=[{**release, "value": None, "entry": None} for release in releases],
        )

    def requests(self, offered: Statistics) -> list[RunRequest]:
        """What the ledger is asked for: an entry for each release."""
        of_all = offered.unit, offered.neighbouring_relation
        steps = ((release, count_releases(release.event)) for release in offered.releases)
        return [
            RunRequest(release.event, offered.delta, count, *of_all, f"describe: {release.statistic}", final=self.final)
            for release, count in steps
        ]

    def outlook(self, offered: Statistics) -> Outlook | None:
        """What the ledger holds, and would hold; None where there is none yet."""
        return self.ledger.outlook(self.account, self.requests(offered)) if self.ledger else None

    def refuse_tuned(self, config: RunConfig) -> None:
        """A model that learned these data tells of them by itself."""
        refuse_adapter(config)
        base = of_base(config)
        if base and any(model.dataset in (self.account, None) for model in base.models):
            raise Refused(
                f"{config.model.name_or_path}: was tuned on {self.account}, or says not on what, so that its own privacy loss "
                "would have to be added. Use a base model that never saw these data."
            )


@contextlib.contextmanager
def opened(
    config: RunConfig, delta: float | str | None, columns: Iterable[str], *, max_delta: float, create: bool
) -> Iterator[Opened]:
    """The rows of a recipe and their account; evaluation data are looked at where it has any.

    Args:
        config: The recipe: whose data, and which ledger.
        delta: See ``offered``; None: the budget's, or as in a run, at most ``max_delta``.
        columns: That the data must have.
        max_delta: Upper limit of a delta that is chosen here.
        create: Make the ledger if there is none.
    """
    if config.data.owners == "several":
        raise ConfigError(
            f"data.owners: several, and here all rows of one {config.data.unit} count as a whole, so that a row of two people "
            "would count twice. Name a column with one owner in data.unit, and set data.owners: one."
        )
    with contextlib.ExitStack() as stack:
        cache = stack.enter_context(scratch())
        table = data.load_table(config.data.train, config.data, config.data.train_split, cache, [*columns])
        units = data.group_rows(table, config.data)
        if (ledger := open_ledger(config.privacy.ledger, create=create)) is not None:
            stack.enter_context(ledger)
            stack.enter_context(ledger.counting())
        # A recipe without differential privacy may be asked about as any other.
        owner = config.changed({"privacy.enabled": True})
        policy = dataset_policy.find_policy(owner, table, data.load_held_out(config.data, cache), ledger)
        account = ledger.records.charged_to(policy.dataset, policy.derived_from) if ledger else policy.dataset
        budget = ledger.budget(account) if ledger else None
        counted = len(units if config.data.sampling == "unit" else units.each_alone())
        size = public_units(config.data, counted)
        wanted_delta = delta if delta is not None else budget.delta if budget else min(max_delta, auto_delta(size))
        resolved = resolved_delta(wanted_delta, budget.delta if budget else 1.0, size, "--delta")
        public_units(config.data, counted, resolved, "--delta")
        yield Opened(table, units, ledger, policy, account, resolved, config.privacy.final)


def _priced(
    config: RunConfig, asked: Sequence[Sequence[Statistic]], epsilon: float, source: Opened
) -> tuple[list[Measurement], Statistics]:
    number("--epsilon", epsilon, 0.0, 1000.0)
    measurements = []
    for group in asked:
        cost = int(epsilon / len(asked) / len(group) / FINEST + 1e-6) * FINEST
        if cost < FINEST:
            raise ConfigError(
                f"--epsilon {epsilon:g} leaves less than {FINEST:g} to each {group[0].name}, which would be pure noise. Ask for "
                "fewer statistics, or raise --epsilon."
            )
        measurements += [measurement(one, config.data.max_examples_per_unit or 1, cost) for one in group]
    releases = [measure.to_json() for measure in measurements]
    statistics = source.statistics(config, releases, {"opendp": metadata.version("opendp")})
    if len(statistics.model_dump_json(indent=2)) > MOST_TEXT:
        raise ConfigError(
            "too many values or candidates are declared for a card to show what is released, and all of them would be paid "
            "for. Declare fewer: with several columns, each combination counts."
        )
    return measurements, statistics
