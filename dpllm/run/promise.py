"""The one decision: may this run happen, and what does it promise?

Comes in: a recipe, and how the run would begin. Goes out: a ``Decision``. ``dpllm plan`` prints it, training obeys it, and
sweeps and shadow runs take from it what they need. Refusals are collected, not raised, so that what can
still be computed beside one is. Must not import torch, read weights or write to the ledger.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self, TypeVar

from dpllm.canaries.texts import check_place
from dpllm.errors import BudgetExceeded, ConfigError, DpllmError, need
from dpllm.files import read_json, scratch
from dpllm.ledger import Ledger, Outlook, RunRequest, dataset_policy, open_ledger
from dpllm.ledger.dataset_policy import DatasetPolicy
from dpllm.privacy.plan import Plan, resolved_delta
from dpllm.privacy.schedule import Schedule
from dpllm.progress import tell
from dpllm.recipe import derived, names
from dpllm.recipe.config import RunConfig
from dpllm.run.advice import advise, check_learning_rate
from dpllm.run.checkpoint import ResumeState, check_promise, read_resume_state, same_lineage, same_recipe
from dpllm.run.directory import RunDir, check_directory
from dpllm.run.labels import read_labels
from dpllm.statement import lineage, section
from dpllm.statement.formatting import html_table
from dpllm.statement.privacy_record import Lineage
from dpllm.statement.released import Labels
from dpllm.text import builtin, data, layouts, rendering
from dpllm.text.data import Rows
from dpllm.text.prompts import read_prompts

UNBOUNDED = 1e9  # a target epsilon that refuses nothing
Value = TypeVar("Value")


@dataclass(frozen=True)
class Start:
    """How a run begins."""

    resume: bool = False  # go on with the interrupted run in ``output_dir``: same reservation, fresh noise
    overwrite: bool = False  # replace a run that lies in ``output_dir``
    entry: str | None = None  # a reservation that was made for this run before, as one of a tuning group


@dataclass(frozen=True)
class Subject:
    """What is known of the training data."""

    num_units: int  # public number of things that are sampled, without canaries: declared or counted
    format: layouts.Format
    dataset: str  # the name in the ledger
    policy: DatasetPolicy | None  # whose they are, what may be done with them; None where that is refused
    digest: str | None = None  # of the rows that were read, which must be trained on; None where they were only counted
    reads: str = ""  # from which columns, in one line
    example: str = ""  # how the model sees a row: the first of data that are declared public, else the shape of any
    rows: Rows | None = field(default=None, repr=False)  # None in another process
    labels: Labels | None = None  # of preference pairs, where labels were flipped at the source

    @property
    def found(self) -> dict[str, Any]:
        """Keys of the recipe that the data decide."""
        return {"data.format": self.format, "data.label_epsilon": self.labels.epsilon if self.labels else None}


@dataclass(frozen=True)
class Decision:
    """What is known of a run before it starts."""

    config: RunConfig  # with the format that the data were found to have
    subject: Subject | None = None  # None where the data could not be read
    schedule: Schedule | None = None  # None where there is none, say because the batch is larger than the dataset
    # The promise. Where it exceeds its own target or the budget, the figures are those that the refused run would have.
    plan: Plan | None = None  # None where there is nothing to compute, or without differential privacy
    ledger: Outlook | None = None  # what it holds and would hold; None where there is none yet, or nothing to ask it
    lineage: Lineage | None = None  # what this run and the models before it promise together
    resumed: ResumeState | None = None  # the run that goes on; None for a new one
    # Everything that would refuse the run, but for what needs a tokenizer, the model or a second accountant, which needs
    # torch: rows and canaries longer than data.max_length, what the model cannot be, PRV.
    refusals: tuple[DpllmError, ...] = ()
    # SHA-256 of the weights of model.adapter that were judged, which must be those that load.
    weights: str | None = None
    labels_before: tuple[Labels, ...] = ()  # draws of labels that taught the models before

    @property
    def exit_code(self) -> int:
        """0 if nothing refuses; else the largest exit code of the refusals."""
        return max((error.exit_code for error in self.refusals), default=0)

    @property
    def flaw(self) -> str | None:
        """Why the run gives no guarantee; None where it gives one."""
        return derived.deviations(self.config)[0] or lineage.why_not(self.lineage)

    @property
    def labels(self) -> Labels | None:
        """Of the pairs that train, where they were flipped at the source."""
        return self.subject.labels if self.subject else None

    @cached_property
    def advice(self) -> list[str]:
        """What is likely to hurt, and what to type; none without differential privacy."""
        return advise(self.config, self.plan) if self.plan else []

    @property
    def lowered(self) -> str:
        """Says that ``privacy.fit_budget`` lowered the epsilon that was asked for; empty where it did not."""
        plan = self.plan
        asked = self.config.privacy.fit_budget and self.config.privacy.noise_multiplier is None
        if plan is None or not asked or plan.epsilon > 0.99 * plan.target_epsilon:
            return ""
        return (
            f"privacy.fit_budget: epsilon is lowered to {plan.epsilon:.3f} from the {plan.target_epsilon:g} asked for, the most "
            "that the budget has room for, so next to nothing is left for other runs."
        )

    @property
    def policy(self) -> DatasetPolicy:
        """Whose data these are, of a decision that nothing refused."""
        assert self.subject is not None
        assert self.subject.policy is not None
        return self.subject.policy

    def _in_words(self) -> dict[str, str]:
        words = {}
        if self.plan is not None:
            words["Plan"] = str(self.plan)
        elif self.schedule is not None and not self.config.privacy.enabled:
            words["No differential privacy"] = f"{self.schedule.num_steps} steps"
        if self.lowered:
            words["Beware"] = self.lowered
        if (wrong := self.config.objective.wrong_labels) is not None:
            words["Labels"] = wrong
        if self.ledger is not None:
            words["Ledger"] = str(self.ledger)
        if self.subject and self.subject.reads:
            words["Data"] = self.subject.reads
        return words

    def __str__(self) -> str:
        """The same as ``repr``, with advice."""
        return "\n".join([repr(self), *(f"Advice: {text}" for text in self.advice)])

    def __repr__(self) -> str:
        """The promise in one line, and what would refuse it in one line each."""
        lines = [f"{name}: {text}" for name, text in self._in_words().items()]
        return "\n".join([*lines, *(f"Refused: {error}" for error in self.refusals)])

    def _repr_html_(self) -> str:
        more = {"Advice": " ".join(self.advice) or None, "Refused": "; ".join(map(str, self.refusals)) or None}
        return html_table("Decision", {**self._in_words(), **more})

    def without_rows(self) -> Self:
        """The same for other processes, which have not the files of this one open."""
        return replace(self, subject=self.subject and replace(self.subject, rows=None))

    def at(self, config: RunConfig) -> Self:
        """The same with the places of another machine, which ``config`` names."""
        data = self.config.data
        seen = {f"data.{name}": getattr(data, name) for name in ("format", "label_epsilon", "chat_template")}
        return replace(self, config=config.changed(seen))

    def obeyed(self) -> Self:
        """The same, where nothing refuses; else the first refusal is raised."""
        if self.refusals:
            raise self.refusals[0]
        return self


class Refusals:
    """Collects refusals, each message once."""

    def __init__(self) -> None:
        """None so far."""
        self.errors: list[DpllmError] = []

    def add(self, error: DpllmError) -> None:
        """One more."""
        if str(error) not in map(str, self.errors):
            self.errors.append(error)

    def attempt(self, call: Callable[..., Value], *arguments: Any, **more: Any) -> Value | None:
        """The value of ``call``; None, and one refusal more, where it refuses."""
        try:
            return call(*arguments, **more)
        except DpllmError as error:
            self.add(error)
            return None


def decide(
    config: RunConfig,
    start: Start | None = None,
    *,
    subject: Subject | None = None,
    terms: dataset_policy.Terms | None = None,
    fetch: bool = False,
    cache: Path | None = None,
) -> Decision:
    """Everything that the recipe, the data, the ledger and the base model's statement say about a run.

    Args:
        config: The recipe.
        start: How it would begin; None: no run directory is looked at.
        subject: What is known of the data already; None: they are read.
        terms: What a budget leaves to the run, one of several that are reserved together; None: what the ledger says.
        fetch: Whether the base model's statement may be downloaded.
        cache: Where the rows that are read are kept, for whoever trains on them; None: nowhere.
    """
    found, run = Refusals(), RunDir(Path(config.output_dir))
    config = config.changed({"data.chat_template": found.attempt(rendering.read_template, config.data.chat_template)})
    found.attempt(derived.check_modes, config)
    if start is not None:
        found.attempt(check_directory, config, run, resume=start.resume, overwrite=start.overwrite)
        if start.resume:
            found.attempt(same_recipe, config, run)
    ledger = found.attempt(open_ledger, config.privacy.ledger, create=False)
    with ledger or contextlib.nullcontext():
        subject = subject or _read_subject(config, ledger, found, cache)
        if subject is None:
            return Decision(config, refusals=tuple(found.errors))
        config, resumed = config.changed(subject.found), None
        found.attempt(_check_machine, config, start)
        dataset, parent = subject.dataset, config.privacy.derived_from if subject.policy else None
        if start and start.resume:
            if subject.policy:
                resumed = found.attempt(read_resume_state, config, run, ledger, subject.policy)
            if found.errors:
                return Decision(config, subject, resumed=resumed, refusals=tuple(found.errors))
        schedule, plan, seen = found.attempt(derived.schedule_of, config, subject.num_units), None, None
        if start and resumed and schedule and config.privacy.enabled:
            plan = found.attempt(_resumed_plan, config, subject.num_units, resumed)
            schedule = plan.schedule if plan else schedule
        elif config.privacy.enabled:
            left = terms or found.attempt(dataset_policy.terms, ledger, dataset, parent, config.privacy.fit_budget)
            plan, over = _plan(config, subject.num_units, schedule, left or dataset_policy.terms(None, "", None), found)
            if ledger and plan and terms is None and not (start and start.entry):
                seen = found.attempt(ledger.outlook, dataset, [RunRequest.of(plan, final=config.privacy.final)], parent)
            if error := (seen.error if seen else None) or over:
                found.add(error)
        found.attempt(check_learning_rate, config, plan)
        base = found.attempt(lineage.of_base, config, fetch=fetch)
        if resumed and not found.errors:
            found.attempt(same_lineage, base, config, run)
        subject = replace(subject, labels=found.attempt(lineage.of_labels, subject.labels, base, ledger))
        about = {"dataset": dataset, "derived_from": parent, "book": ledger, "plan": plan}
        ancestry = found.attempt(lineage.compose_with_base, base, config, **about)
        of_base = (base.weights, base.labels) if base else ()
        return Decision(config, subject, schedule, plan, seen, ancestry, resumed, tuple(found.errors), *of_base)


def read_subject(config: RunConfig, cache: Path | None = None) -> Subject:
    """Reads the training data for their number and name, once for many decisions.

    Raises:
        DataError: The training data cannot be read as declared.
        Refused: The ledger does not permit them to be trained on in this way.
    """
    found = Refusals()
    with open_ledger(config.privacy.ledger, create=False) or contextlib.nullcontext() as ledger:
        subject = _read_subject(config, ledger, found, cache)
    if found.errors:
        raise found.errors[0]
    assert subject is not None
    return subject


def _read_subject(config: RunConfig, ledger: Ledger | None, found: Refusals, cache: Path | None) -> Subject | None:
    with scratch() if cache is None else contextlib.nullcontext(cache) as where:
        tell("Reading data.train")
        table = found.attempt(data.load_table, config.data.train, config.data, config.data.train_split, where)
        if table is None:
            return None
        held_out = found.attempt(data.load_held_out, config.data, where)
        found.attempt(_check_objective, config, table)
        labels = found.attempt(read_labels, config.data)
        policy = found.attempt(dataset_policy.find_policy, config, table, held_out, ledger)
        units = found.attempt(data.sampled_rows, table, config.data)
    if units is None:
        return None
    delta = config.privacy.delta if config.privacy.enabled else "auto"
    found.attempt(derived.public_units, config.data, len(units), delta)
    fmt = table.format
    # Where the policy refuses, the declared name is shown: what the ledger holds under it is no secret from its owner.
    name = policy.dataset if policy else config.privacy.dataset or data.dataset_name(config.data)
    found.attempt(_check_words, config, name)
    return Subject(
        config.data.public_size or len(units),
        fmt,
        name,
        policy,
        table.digest,
        table.reads,
        rendering.example(table.rows[0], fmt, config.data.template)
        if config.data.public
        else rendering.shape(fmt, config.data.control, config.data.template),
        Rows(table, units, held_out),
        labels.public() if labels else None,
    )


def _check_objective(config: RunConfig, table: data.Table) -> None:
    """Refuses, with a ConfigError, an objective that does not learn from such rows, and canaries that they cannot hold."""
    if not config.objective.learns_from(table.format):
        raise ConfigError(
            f"{table.name}: is {table.reads}, from which train.objective: {config.train.objective} does not learn. Set "
            "train.objective: dpo for pairs of answers and likelihood for anything else, or name other data."
        )
    check_place(config.audit.texts.place, table.format)


def _check_words(config: RunConfig, dataset: str) -> None:
    """Refuses, with a ConfigError, a name or a text that no card can hold, before anything is charged."""
    told = names.publishable(config)
    outside = dataset, told.output_dir, told.model.name_or_path, told.card.title, told.card.description
    marks = re.search("<!-- /?dpllm:", json.dumps([dataset, told.model_dump(mode="json")]))
    if marks or any(section.HIDING.search(f" {text or ''}") for text in outside):
        raise ConfigError(
            f"a text in the recipe, or the name of the data ({dataset!r}), holds a mark of a card's parts, HTML that could hide "
            "them, or style= or class=, with which no card would verify. Change it, or type --privacy.dataset NAME."
        )


def _check_machine(config: RunConfig, start: Start | None) -> None:
    """Refuses, with a ConfigError, what is seen to be missing where a run starts: packages, a local model, its chat template."""
    if start is None:
        return
    if config.model.quantization:
        need("bitsandbytes", "model.quantization")
    for package in config.telemetry.trackers:
        need(package, "telemetry.trackers")
    if isinstance(config.train.sample_prompts, str):
        read_prompts(Path(config.train.sample_prompts))
    name = config.model.name_or_path
    folder = builtin.NAMES.get(name, Path(name))
    if not (folder.is_dir() or names.is_hub_id(name)):
        raise ConfigError(
            f"model.name_or_path {name!r}: is not a folder, a Hub id or builtin:tiny. Check the spelling."
        )
    files = ("config.json", "adapter_config.json", "run.json")  # the last two are refused by name, see lineage
    if folder.is_dir() and not any((folder / file).exists() for file in files):
        raise ConfigError(
            f"model.name_or_path {name}: holds no config.json, so it is not a model. Name the folder of a model."
        )
    settings = folder / "tokenizer_config.json"
    beside = any((folder / file).exists() for file in ("chat_template.jinja", "additional_chat_templates"))
    if config.data.format != "messages" or beside or not settings.exists():  # without a tokenizer, it can be planned
        return
    if not (read_json(settings).get("chat_template") or config.data.chat_template):
        raise ConfigError(
            f"model.name_or_path {name}: has no chat template (most base models have none), so messages cannot be read. Set "
            "data.chat_template, name a model with a chat template, or use rows with prompt and completion."
        )


def _plan(
    config: RunConfig, num_units: int, schedule: Schedule | None, terms: dataset_policy.Terms, found: Refusals
) -> tuple[Plan | None, BudgetExceeded | None]:
    """The Plan, and what is to be said where the budget leaves too little for its noise to be calibrated."""
    over = None
    if schedule is None:  # delta can be judged all the same
        found.attempt(resolved_delta, config.privacy.delta, terms["largest_delta"], num_units)
        return None, None
    try:
        return derived.plan_of(config, num_units, **terms), None
    except BudgetExceeded as error:
        over = error
    except DpllmError as error:
        found.add(error)
    # What it would cost all the same: without the filter, and with no target for a noise multiplier that is given.
    relaxed = config.changed({"privacy.epsilon": UNBOUNDED}) if config.privacy.noise_multiplier else config
    try:
        plan = derived.plan_of(relaxed, num_units, largest_delta=terms["largest_delta"])
    except DpllmError:  # what refuses even that was said already
        return None, over
    return plan.model_copy(update={"target_epsilon": config.privacy.epsilon}), over


def _resumed_plan(config: RunConfig, num_units: int, resumed: ResumeState) -> Plan:
    """The same promise once more: its noise was calibrated to what was left of the budget then."""
    before = resumed.plan
    assert before is not None
    again = config.changed({"privacy.noise_multiplier": before.noise_multiplier, "privacy.delta": before.delta})
    coefficients = before.coefficients  # no other machine's last bits
    check_promise(derived.plan_of(again, num_units, coefficients=coefficients), before)
    return before
