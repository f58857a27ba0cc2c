"""A data set that a privately tuned model writes: post-processing, which spends no further budget.

Comes in: a run directory with its card, and what is asked for. Goes out: a folder as ``card.synthetic`` lays it out, whole
or not at all. Of a run with a guarantee it reads the recipe, run.json and export/, but neither training rows nor anything in
``private/``, unless quality is measured.

Guarantee:
    The rows have the guarantee of the run's weights together with that of the released statistic from which control codes are
    drawn, both of which stand in run/privacy.json, since they are a function of these, of public prompts and of random numbers
    (post-processing; Dwork and Roth 2014, "The Algorithmic Foundations of Differential Privacy", proposition 2.1).
"""

from __future__ import annotations

import json
import random
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from dpllm.card.synthetic import RECORD, ROWS, Quality, Sampling, Synthetic, write_dataset_card
from dpllm.errors import ConfigError, Refused
from dpllm.files import BLOCK, alone, sha256, whole_directory, write_json, write_whole
from dpllm.model import environment
from dpllm.publish import filters, generate
from dpllm.publish.draft import Draft
from dpllm.publish.merge import carded
from dpllm.publish.quality import FOLDER, Tell, of_run, report
from dpllm.recipe.config import RunConfig
from dpllm.run.directory import RunDir
from dpllm.statement.privacy_record import PrivacyRecord
from dpllm.text import control
from dpllm.text.data import load_table, value_name
from dpllm.text.prompts import private_among, read_prompts

BATCH = 64
"""Texts that are drawn at a time. A constant, since with the seed it decides what is drawn."""

Told = Callable[[int, int], None]
"""Called after each batch with the rows that are taken so far, and the texts drawn."""


@dataclass(frozen=True)
class Order:
    """What is asked for.

    Attributes:
        rows: How many, >= 1.
        temperature: 0: the likeliest token each time.
        top_p: Only the likeliest tokens that together have this probability, in (0, 1].
        max_new_tokens: At most this many tokens each; None: the recipe's data.max_length, or as many as the model has room for.
        seed: Decides everything random, on one kind of device; None: the operating system does.
        prompts: File of public prompts, as ``read_prompts`` reads it, that the texts answer; rows cycle through them.
        attempts: At most so many texts are drawn for each row, on average, >= 1.
        keep_unfinished: See ``filters.tests`` for this, min_words, max_words and no_details.
        keep_duplicates: Take a text that is there already, behind the same prompt.
    """

    rows: int
    temperature: float = 1.0
    top_p: float = 1.0
    max_new_tokens: int | None = None
    seed: int | None = None
    prompts: Path | None = None
    attempts: int = 20
    keep_unfinished: bool = False
    keep_duplicates: bool = False
    min_words: int | None = None
    max_words: int | None = None
    no_details: bool = False

    def tests(self) -> dict[str, filters.Test]:
        """The filters, but that of duplicates."""
        names = ("keep_unfinished", "min_words", "max_words", "no_details")
        return filters.tests(**{name: getattr(self, name) for name in names})


@dataclass(frozen=True)
class _Rows:
    """What each row is before its text.

    Attributes:
        heads: Its columns: control codes, and the prompt.
        asked: What the model continues; None: a text is written from its beginning.
        columns: Names of all columns, of which the last is the text's.
        prompts: How many there are; None: none were given.
        shares: Name of the released statistic that says how often codes are asked for; None: there is none.
    """

    heads: Sequence[Mapping[str, str]]
    asked: Sequence[str | None]
    columns: tuple[str, ...]
    prompts: int | None
    shares: str | None = None

    def with_texts(self, texts: Mapping[int, str]) -> list[dict[str, str]]:
        """The rows as they are published."""
        return [{**head, self.columns[-1]: texts[number]} for number, head in enumerate(self.heads)]


@dataclass
class _Taken:
    """What is drawn so far: texts by number of row, and why others were dropped."""

    texts: dict[int, str] = field(default_factory=dict)
    dropped: Counter[str] = field(default_factory=Counter)
    batches: int = 0

    @property
    def drawn(self) -> int:
        """Texts, taken or not."""
        return len(self.texts) + self.dropped.total()

    def add(self, batch: Mapping[str, Any]) -> None:
        """One more batch, as the draft has it."""
        self.texts |= {int(row): text for row, text in batch["texts"].items()}
        self.dropped.update(batch["dropped"])
        self.batches += 1


def synthesize(
    run: RunDir,
    order: Order,
    output: Path | None = None,
    told: Told = lambda taken, drawn: None,
    not_measured: Tell | None = None,
) -> Path:
    """Writes a data set; what was interrupted goes on where it stopped, and ends in the same bytes.

    Args:
        run: A finished run with its card.
        order: What is asked for.
        output: Where; None: ``synthetic`` in the run directory.
        told: Progress.
        not_measured: Called with what of the quality could not be measured; what fails loses no row, since the same call goes
            on. None: nothing is measured.

    Returns:
        The folder.

    Raises:
        ConfigError: No card, no released shares of the control columns, no prompts where the format needs them, settings that
            allow no text, a folder that holds something, a draft with other settings; or too few texts passed the filters.
        DataError: The prompts cannot be read.
        Refused: A run without guarantee on data that are not public; or prompts that are its private data.
    """
    opened, statement = carded(run)
    config = opened.config
    output = _place(run, statement, output)
    if min(order.rows, order.attempts, (order.seed or 0) + 1) < 1:
        raise ConfigError(
            f"rows {order.rows}, attempts {order.attempts} and seed {order.seed} are out of range: the first two are at least "
            "1, the seed is not negative."
        )
    tests = order.tests()
    prompts, (released, shares) = _prompts(config, order), _shares(run, config, statement)
    if order.prompts is not None:
        _refuse_private(run, config, statement, order.prompts, prompts or [])
    generator = generate.load(run.root)
    if order.max_new_tokens is None:
        order = replace(order, max_new_tokens=_longest(config, generator, prompts, shares))
    with alone(output, output.with_name(f".{output.name}.lock")):
        seed, taken = secrets.randbits(63) if order.seed is None else order.seed, _Taken()
        place = output.with_name(f".{output.name}.draft.jsonl")
        draft = Draft(place, _settings(order, run), lambda: {"seed": seed}, taken.add)
        rows = replace(_rows(config, order.rows, prompts, shares, draft.facts["seed"]), shares=released)
        _draw(generator, order, rows, tests, draft, taken, told)
        quality = None
        if not_measured:
            beside = of_run(run, config, statement)
            quality = report(rows.with_texts(taken.texts), beside, run.private / FOLDER, not_measured)
        _write(run, config, order, rows, tests, taken, output, quality)
        draft.path.unlink()
    return output


def _place(run: RunDir, statement: PrivacyRecord, output: Path | None) -> Path:
    """Where the data set goes: nowhere if nothing protects the people behind it."""
    if not statement.guarantee and not statement.data_public:
        raise Refused(
            f"{run.root}: gives no guarantee, and its data are not declared public, so generated rows may repeat private rows. "
            f"Train with differential privacy; or read a few texts yourself: dpllm generate {run.root}."
        )
    output = output or run.root / "synthetic"
    run.outside(output)
    if output.name in ("", "..") or (output.exists() and (not output.is_dir() or any(output.iterdir()))):
        raise ConfigError(f"{output}: already exists, or is not a valid name. Type another --output, or remove it.")
    return output


def _refuse_private(run: RunDir, config: RunConfig, statement: PrivacyRecord, file: Path, prompts: list[str]) -> None:
    """Each row is published with its prompt. A file in private/ is refused whatever it holds, and a copy wherever it lies."""
    public = statement.data_public and (config.data.eval is None or config.data.eval_public)
    why = "is private data of the run"
    if not public and not run.rows.exists():
        why = f"cannot be told from private data of the run, as {run.rows} was removed or an earlier version trained"
    elif not file.resolve().is_relative_to(run.private.resolve()):
        if public or not (found := private_among(run.rows, prompts, lines=20)):
            return
        why += f" ({len(found)} prompts, the first of them number {found[0]})"
    raise Refused(
        f"--prompts {file}: {why}, but rows are published with their prompts. Type a file of public prompts; or declare "
        "data.public if everybody may read these, and train again."
    )


def _prompts(config: RunConfig, order: Order) -> list[str] | None:
    if order.prompts is None:
        if config.data.format == "text":
            return None
        raise ConfigError(
            f"the model answers prompts (data.format {config.data.format}), and those of training are private. Type --prompts "
            "FILE with public prompts, one per line."
        )
    prompts = read_prompts(order.prompts)
    found = [prompt for prompt in prompts if isinstance(prompt, str)]
    if config.data.format == "text" or len(found) < len(prompts):
        raise ConfigError(
            f"--prompts {order.prompts}: prompts have to be plain text, for a model trained on prompts and completions or on "
            "messages. Type such prompts; or leave them out for a model trained on plain text."
        )
    return found


def _shares(
    run: RunDir, config: RunConfig, statement: PrivacyRecord
) -> tuple[str | None, dict[tuple[str, ...], float]]:
    """How often each combination of control values is asked for, and which released statistic says so; empty without control.

    Without a guarantee the training rows say so, which are public.
    """
    if not (columns := config.data.control):
        return None, {}
    if not statement.guarantee:
        table = load_table(config.data.train, config.data, config.data.train_split, run.private / "cache")
        return None, dict(Counter(tuple(value_name(row.get(column)) for column in columns) for row in table.rows))
    name = control.shares_of(columns)
    counts = statement.statistics.positive(name) if statement.statistics else {}
    if not counts:
        declared = ";".join(f"{column}=VALUE,VALUE" for column in columns)
        raise ConfigError(
            f"{run.root}: texts are asked for by {', '.join(columns)}, and its card has no {name!r}, from which to draw the "
            f"values; the exact shares are private. Type dpllm describe {run.config} --epsilon E --shares {declared!r}, then "
            f"dpllm card {run.root} --describe describe.json."
        )
    return name, {tuple(value.split(control.SEPARATOR)): count for value, count in counts.items()}


def _longest(
    config: RunConfig, generator: generate.Generator, prompts: list[str] | None, shares: Iterable[tuple[str, ...]]
) -> int:
    """Tokens of a text where none are asked for: as in training, or what is left behind the longest line and prompt."""
    lines: list[str | None] = [control.line(config.data.control, values) for values in shares]
    parts = (lines or ([] if prompts else [None]), prompts or ())
    longest = sum(max(map(len, generate.encode_all(generator, part)), default=0) for part in parts)
    left = generate.room(generator, [range(longest)])
    return max(1, config.data.max_length if left is None else min(config.data.max_length, left))


def _rows(
    config: RunConfig, count: int, prompts: list[str] | None, shares: Mapping[tuple[str, ...], float], seed: int
) -> _Rows:
    """Each row gets its codes and its prompt before any text, so that filters do not change how often each is asked for."""
    columns = config.data.control
    codes: list[tuple[str, ...]] = [()] * count
    if shares:
        codes = random.Random(f"{seed} codes").choices(list(shares), list(shares.values()), k=count)
    heads, asked = [], []
    for number, values in enumerate(codes):
        prompt = prompts[number % len(prompts)] if prompts else None
        heads.append(dict(zip(columns, values, strict=True)) | ({} if prompt is None else {"prompt": prompt}))
        asked.append((control.line(columns, values) if columns else "") + (prompt or "") or None)
    named = (*columns, "text") if prompts is None else (*columns, "prompt", "completion")
    return _Rows(heads, asked, named, None if prompts is None else len(prompts))


def _settings(order: Order, run: RunDir) -> dict[str, Any]:
    """Everything that decides what is drawn."""
    settings = {**asdict(order), "recipe": sha256(run.config), "card": sha256(run.export / BLOCK)}
    settings |= {"prompts": sha256(order.prompts)} if order.prompts else {}
    del settings["attempts"]  # which decides nothing that is drawn
    return settings | {"software": environment.versions()}


def _draw(
    generator: generate.Generator,
    order: Order,
    rows: _Rows,
    tests: Mapping[str, filters.Test],
    draft: Draft,
    taken: _Taken,
    told: Told,
) -> None:
    """Draws until every row has its text.

    Raises:
        ConfigError: Too few passed.
    """
    sampling = {name: getattr(order, name) for name in ("temperature", "top_p", "max_new_tokens")}
    waiting = [number for number in range(order.rows) if number not in taken.texts]
    seen = {(rows.heads[number].get("prompt"), text) for number, text in taken.texts.items()}
    while waiting:
        told(len(taken.texts), taken.drawn)
        batch = waiting[:BATCH]
        if taken.drawn + len(batch) > order.attempts * order.rows:
            dropped = ", ".join(f"{why}: {many}" for why, many in taken.dropped.most_common())
            raise ConfigError(
                f"of {taken.drawn} texts {len(taken.texts)} passed the filters, of {order.rows} wanted, so nothing is "
                f"written; dropped ({dropped}). Type a larger --attempts to go on; or remove {draft.path} and start with other "
                "filters, such as --keep-unfinished, or a larger --max-new-tokens."
            )
        seed = random.Random(f"{draft.facts['seed']} batch {taken.batches}").getrandbits(63)
        found = generate.sample(generator, [rows.asked[number] for number in batch], 1, seed=seed, **sampling)
        passed: dict[str, str] = {}
        reasons: Counter[str] = Counter()
        for number, one in zip(batch, found, strict=True):
            key = (rows.heads[number].get("prompt"), one.text)
            why = next((name for name, drops in tests.items() if drops(one)), None)
            if why is None and key in seen and not order.keep_duplicates:
                why = filters.DUPLICATE
            if why is None:
                passed[str(number)] = one.text
                seen.add(key)
            else:
                reasons[why] += 1
        draft.add({"texts": passed, "dropped": reasons})
        waiting = [number for number in batch if number not in taken.texts] + waiting[len(batch) :]
    told(len(taken.texts), taken.drawn)


def _write(
    run: RunDir,
    config: RunConfig,
    order: Order,
    rows: _Rows,
    tests: Iterable[str],
    taken: _Taken,
    output: Path,
    quality: Quality | None,
) -> None:
    """The folder, with its card."""
    lines = rows.with_texts(taken.texts)
    reasons = [*tests, *([] if order.keep_duplicates else [filters.DUPLICATE])]
    with whole_directory(output) as part:
        write_whole(part / ROWS, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
        record = Synthetic(
            schema_version=1,
            rows=order.rows,
            columns=rows.columns,
            control=tuple(config.data.control),
            shares=rows.shares,
            prompts=rows.prompts,
            sampling=Sampling.pick({**asdict(order), "engine": "transformers"}),
            attempts=taken.drawn,
            dropped={why: taken.dropped[why] for why in reasons},
            files={},  # the card fills them in
            quality=quality,
            date=time.strftime("%Y-%m-%d", time.gmtime()),
            software=environment.versions(),
        )
        write_json(part / RECORD, record.to_json())
        write_dataset_card(part, run)
