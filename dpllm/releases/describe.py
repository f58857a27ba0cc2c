"""Statistics of private data, released with differential privacy: their cost, their reservation, then the draws.

Comes in: the recipe, the requested statistics, a total epsilon. Goes out: an ``Offer``, which spends nothing; from an offer, the
released ``Statistics`` and their file. Must not draw noise (``privacy.releases``) or compute values (``asked``).

Guarantee:
    The result and the file of ``release`` are (epsilon, delta)-differentially private for one unit, of which at most
    ``max_examples_per_unit`` rows are used, chosen by a rule that reads only that unit's rows. Each release is an entry of the
    ledger: reserved, charged before its value is computed, and closed when the file is written, so a crash leaves it charged.
    The columns of the data, and that the data can be read, are assumed to be public: otherwise there is a refusal, not a release.
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
"""Delta of the total unless a budget or the user sets another; the releases themselves need none."""
FINEST = 1e-4
"""Epsilons are multiples of this, the resolution of PLD."""
MOST_TEXT = 160_000
"""Bytes of all releases as JSON without values; with values less than three times as many, which ``dpllm verify`` still reads."""
Charge = Callable[[int], None]
"""Records that a step of a release, counted from 1, is about to be drawn."""


@dataclass(frozen=True)
class Offer:
    """A priced release, before anything is spent.

    Attributes:
        statistics: Costs and errors, without values.
        seen: The dataset's account before and after the release; None if there is no ledger yet.
        notes: The effect of the noise, in words.
    """

    statistics: Statistics
    seen: Outlook | None
    notes: tuple[str, ...]
    _source: Opened
    _ready: Callable[[], object]  # reads all rows, so that failures come before anything is spent
    _draws: Sequence[Callable[[Charge], Json]]  # for each release: draws it and returns the drawn fields
    _write: Callable[[Path, Statistics], None]

    def release(self, output: Path) -> Statistics:
        """Reserves, draws and writes; within ``offered`` with ``create``.

        Raises:
            BudgetExceeded: The budget does not admit all of them; nothing is spent.
            DataError: The chat template rejects a row; nothing is spent.
            ConfigError: ``output`` exists or cannot be written, or another process writes there.
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
    config: RunConfig, groups: Sequence[Sequence[Statistic]], epsilon: float, delta: float | str | None, *, create: bool
) -> Iterator[Offer]:
    """The cost and accuracy of statistics; spends nothing.

    A refusal because of the records tells whether rows are among a dataset's, so it is counted even in a dry run; without
    reading the records, the costs shown could be those of another account.

    Args:
        config: The recipe: data and ledger.
        groups: Releases of each statistic; epsilon is split equally among statistics, and then among their releases.
        epsilon: Total of all releases, > 0.
        delta: Delta of the total, below 1/N, since at 0.9 an exact count would cost epsilon 0; auto: as in a run; None: the
            budget's, or ``DELTA``. N is data.public_size, or counted: the relation is then zero-out, which compares datasets of
            one public size, and a run publishes that too.
        create: Make the ledger if there is none, to release afterwards.

    Raises:
        DataError: The data cannot be read or lack a column.
        ConfigError: A part of epsilon is too small, too many values are declared, or OpenDP is not installed.
        Refused: These records are another dataset of the ledger; or delta is 1/N or more.
    """
    tokenizer = None
    if any(statistic.kind == "lengths" for group in groups for statistic in group):
        from dpllm.model.loading import load_tokenizer

        tokenizer = load_tokenizer(config.model, config.data)
    columns = (name for group in groups for statistic in group for name in columns_of(statistic))
    with opened(without_evaluation(config), delta, columns, max_delta=DELTA, create=create) as source:
        exact = partial(exact_values, units=source.units, table=source.table, data=config.data, tokenizer=tokenizer)
        measurements, statistics = _priced(config, groups, epsilon, source)

        def ready() -> None:
            # Refuses a row that cannot be read, for instance by a chat template, before anything is spent.
            for statistic in {(part.asked.kind, part.asked.column): part.asked for part in measurements}.values():
                deque(exact(statistic), maxlen=0)

        def draw(measure: Measurement, charge: Charge) -> Json:
            charge(1)
            return {"value": measure.release(exact(measure.asked))}

        def write(output: Path, released: Statistics) -> None:
            write_json(output, released.to_json())

        draws = [partial(draw, measure) for measure in measurements]
        yield Offer(statistics, source.outlook(statistics), (), source, ready, draws, write)


def without_evaluation(config: RunConfig) -> RunConfig:
    """The same recipe without evaluation data."""
    return config.changed({"data.eval": None})


def refuse_adapter(config: RunConfig) -> None:
    """Refuses an adapter, with a ConfigError, if nothing is trained."""
    if config.model.adapter is not None:
        raise ConfigError(
            "model.adapter: is a starting point for training, and nothing is trained here. Merge it, or leave it out."
        )


@dataclass(frozen=True)
class Opened:
    """Private rows, and the account that pays for releases from them."""

    table: data.Table
    units: Groups
    ledger: Ledger | None
    policy: dataset_policy.DatasetPolicy
    account: str
    delta: float
    final: bool  # the release closes the account for good

    def statistics(self, config: RunConfig, releases: Sequence[Json], software: Mapping[str, str]) -> Statistics:
        """The statistics without values, dated today, with their total cost."""
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
        """The requests to the ledger: one for each release."""
        shared = offered.unit, offered.neighbouring_relation
        steps = ((release, count_releases(release.event)) for release in offered.releases)
        return [
            RunRequest(release.event, offered.delta, count, *shared, f"describe: {release.statistic}", final=self.final)
            for release, count in steps
        ]

    def outlook(self, offered: Statistics) -> Outlook | None:
        """The account before and after the releases; None if there is no ledger yet."""
        return self.ledger.outlook(self.account, self.requests(offered)) if self.ledger else None

    def refuse_tuned(self, config: RunConfig) -> None:
        """Refuses a model that was tuned on these data, since its own outputs reveal them."""
        refuse_adapter(config)
        base = of_base(config)
        if base and any(model.dataset in (self.account, None) for model in base.models):
            raise Refused(
                f"{config.model.name_or_path}: was tuned on {self.account}, or does not say on what, so its own privacy loss "
                "would have to be added. Use a base model that never saw these data."
            )


@contextlib.contextmanager
def opened(
    config: RunConfig, delta: float | str | None, columns: Iterable[str], *, max_delta: float, create: bool
) -> Iterator[Opened]:
    """Opens the rows of a recipe and their account; checks evaluation data if the recipe has any.

    Args:
        config: The recipe: data and ledger.
        delta: See ``offered``; None: the budget's, or as in a run, at most ``max_delta``.
        columns: Columns that the data must have.
        max_delta: Upper limit of a delta that is chosen here.
        create: Make the ledger if there is none.
    """
    if config.data.owners == "several":
        raise ConfigError(
            f"data.owners: several, and releases count all rows of one {config.data.unit} together, so a row of two people "
            "would count twice. Name a column with one owner in data.unit, and set data.owners: one."
        )
    with contextlib.ExitStack() as stack:
        cache = stack.enter_context(scratch())
        table = data.load_table(config.data.train, config.data, config.data.train_split, cache, [*columns])
        units = data.group_rows(table, config.data)
        if (ledger := open_ledger(config.privacy.ledger, create=create)) is not None:
            stack.enter_context(ledger)
            stack.enter_context(ledger.counting())
        # The release is private even if training by this recipe would not be.
        private = config.changed({"privacy.enabled": True})
        policy = dataset_policy.find_policy(private, table, data.load_held_out(config.data, cache), ledger)
        account = ledger.records.charged_to(policy.dataset, policy.derived_from) if ledger else policy.dataset
        budget = ledger.budget(account) if ledger else None
        counted = len(units if config.data.sampling == "unit" else units.each_alone())
        size = public_units(config.data, counted)
        chosen_delta = delta if delta is not None else budget.delta if budget else min(max_delta, auto_delta(size))
        resolved = resolved_delta(chosen_delta, budget.delta if budget else 1.0, size, "--delta")
        public_units(config.data, counted, resolved, "--delta")
        yield Opened(table, units, ledger, policy, account, resolved, config.privacy.final)


def _priced(
    config: RunConfig, groups: Sequence[Sequence[Statistic]], epsilon: float, source: Opened
) -> tuple[list[Measurement], Statistics]:
    number("--epsilon", epsilon, 0.0, 1000.0)
    measurements = []
    for group in groups:
        cost = int(epsilon / len(groups) / len(group) / FINEST + 1e-6) * FINEST
        if cost < FINEST:
            raise ConfigError(
                f"--epsilon {epsilon:g} leaves less than {FINEST:g} to each {group[0].name}, which would be pure noise. Ask for "
                "fewer statistics, or raise --epsilon."
            )
        measurements += [measurement(statistic, config.data.max_examples_per_unit or 1, cost) for statistic in group]
    releases = [measure.to_json() for measure in measurements]
    statistics = source.statistics(config, releases, {"opendp": metadata.version("opendp")})
    if len(statistics.model_dump_json(indent=2)) > MOST_TEXT:
        raise ConfigError(
            "too many values or candidates are declared for a card to show the releases, and all of them would be paid "
            "for. Declare fewer: with several columns, each combination counts."
        )
    return measurements, statistics
