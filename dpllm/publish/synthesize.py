"""Generates a data set with a privately tuned model: post-processing, which costs no further epsilon.

Comes in: a run directory with its card, and a request. Goes out: a folder in the layout of ``card.synthetic``, written
atomically. From a run with a guarantee it reads the recipe, run.json and export/, but no training rows and nothing in
``private/``, except to measure quality and to refuse private prompts.

Guarantee:
    The rows are a function of the run's weights, of the released statistic from which control codes are drawn, of public
    prompts and of random numbers. So they have the guarantee of weights and statistic, which run/privacy.json states
    (post-processing; Dwork and Roth 2014, "The Algorithmic Foundations of Differential Privacy", proposition 2.1).
"""

from __future__ import annotations

import json
import random
import secrets
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dpllm.card.synthetic import RECORD, ROWS, Sampling, Synthetic, write_dataset_card
from dpllm.errors import ConfigError, Refused
from dpllm.files import BLOCK, alone, sha256, whole_directory, write_json, write_whole
from dpllm.model import processes
from dpllm.progress import tell
from dpllm.publish import generate
from dpllm.publish.merge import carded
from dpllm.recipe.config import RunConfig
from dpllm.releases import draft
from dpllm.releases.quality import FOLDER, Tell, of_run, public_shares, report
from dpllm.run.directory import RunDir
from dpllm.statement.privacy_record import PrivacyRecord
from dpllm.text import layouts
from dpllm.text.prompts import private_among, read_prompts

BATCH = 64
"""Texts in a batch. A constant, because the draws depend on it as well as on the seed."""
Shares = dict[tuple[str, ...], float]
"""The share of each combination of control values."""


@dataclass(frozen=True)
class SynthesisRequest:
    """The number of rows, and the settings of sampling and filters.

    Attributes:
        rows: Number of rows, >= 1.
        temperature: 0 for greedy decoding.
        top_p: Nucleus sampling: only the likeliest tokens that together have this probability, in (0, 1].
        max_new_tokens: At most this many tokens each; None: the recipe's data.max_length, or the room that the model has.
        seed: The same seed gives the same rows, on one kind of device; None: a secret random seed.
        prompts: File of public prompts in the format of ``read_prompts``; rows cycle through them.
        attempts: Largest mean number of texts that are drawn for each row, >= 1.
        keep_unfinished: See ``draft.filters``, also for ``min_words``.
        keep_duplicates: Keep a text that repeats an earlier text of the same prompt.
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
    min_words: int = 0

    def __post_init__(self) -> None:
        """Raises ConfigError for values with which no text can be drawn."""
        if min(self.rows, self.attempts, (self.seed or 0) + 1) < 1:
            raise ConfigError(
                f"rows {self.rows}, attempts {self.attempts} and seed {self.seed} are out of range: the first two are at least "
                "1, the seed is not negative."
            )


def synthesize(
    run: RunDir, request: SynthesisRequest, output: Path | None = None, not_measured: Tell | None = None
) -> Path:
    """Writes a data set and returns its folder. The same call after an interruption resumes, and gives the same bytes.

    Args:
        run: A finished run with its card.
        request: Number of rows, sampling and filters.
        output: Folder; None: ``synthetic`` in the run directory.
        not_measured: Called with each figure of quality that could not be measured. No rows are lost if a measurement fails,
            since the same call resumes. None: quality is not measured.

    Raises:
        ConfigError: There is no card, no released shares of the control columns, or no prompts where the format needs them; the
            folder is not empty, a draft has other settings, no text is possible, or too few texts passed the filters.
        DataError: The prompts cannot be read.
        Refused: The run gives no guarantee and its data are not public, or the prompts are its private data.
    """
    opened, statement = carded(run)
    config = opened.config
    output = _output_of(run, statement, output)
    prompts, (released, shares) = _prompts(config, request.prompts), _shares(run, config, statement)
    if request.prompts and prompts:
        _refuse_private(run, config, statement, request.prompts, prompts)
    generator = generate.load(run.root)
    if request.max_new_tokens is None:
        request = replace(request, max_new_tokens=_longest(config, generator, prompts, shares))
    with alone(output, output.with_name(f".{output.name}.lock")):
        seed = secrets.randbits(63) if request.seed is None else request.seed
        draft_path = output.with_name(f".{output.name}.draft.jsonl")
        saved = draft.Draft(draft_path, _settings(request, run), lambda: {"seed": seed})
        heads = _heads(config.data.control, request.rows, prompts, shares, saved.facts["seed"])
        texts, dropped = _draw(generator, request, config.data.control, heads, saved)
        column = "text" if prompts is None else "completion"
        rows = [{**head, column: text} for head, text in zip(heads, texts, strict=True)]
        quality = None
        if not_measured:
            quality = report(rows, of_run(run, config, statement), run.private / FOLDER, not_measured)
        record = Synthetic(
            schema_version=1,
            rows=len(rows),
            columns=tuple(rows[0]),
            control=tuple(config.data.control),
            shares=released,
            prompts=None if prompts is None else len(prompts),
            sampling=Sampling.pick({**asdict(request), "engine": "transformers"}),
            attempts=len(rows) + sum(dropped.values()),
            dropped=dropped,
            files={},  # write_dataset_card fills them in
            quality=quality,
            date=time.strftime("%Y-%m-%d", time.gmtime()),
            software=processes.versions(),
        )
        with whole_directory(output) as part:
            write_whole(part / ROWS, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
            write_json(part / RECORD, record.to_json())
            write_dataset_card(part, run)
        saved.path.unlink()
    return output


def _output_of(run: RunDir, statement: PrivacyRecord, output: Path | None) -> Path:
    """The folder of the data set. Refuses a run on private data that gives no guarantee."""
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
    """Refuses private prompts, which the rows would publish: a file in private/, or a copy of private rows elsewhere."""
    public = statement.data_public and (config.data.eval is None or config.data.eval_public)
    reason = "is private data of the run"
    if not public and not run.rows.exists():
        reason = f"cannot be told from private data of the run, as {run.rows} was removed"
    elif not file.resolve().is_relative_to(run.private.resolve()):
        if public or not (numbers := private_among(run.rows, prompts, lines=20)):
            return
        reason += f" ({len(numbers)} prompts, the first of them number {numbers[0]})"
    raise Refused(
        f"--prompts {file}: {reason}, but rows are published with their prompts. Type a file of public prompts; or declare "
        "data.public if everybody may read these, and train again."
    )


def _prompts(config: RunConfig, file: Path | None) -> list[str] | None:
    if file is None:
        if config.data.format == "text":
            return None
        raise ConfigError(
            f"the model answers prompts (data.format {config.data.format}), and those of training are private. Type --prompts "
            "FILE with public prompts, one per line."
        )
    prompts = read_prompts(file)
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    if config.data.format == "text" or len(texts) < len(prompts):
        raise ConfigError(
            f"--prompts {file}: prompts have to be plain text, for a model trained on prompts and completions or on "
            "messages. Type such prompts; or leave them out for a model trained on plain text."
        )
    return texts


def _shares(run: RunDir, config: RunConfig, statement: PrivacyRecord) -> tuple[str | None, Shares]:
    """The released statistic and the share of each combination of control values; None and empty without control columns.

    A run without a guarantee has public training rows here (see ``_output_of``), so they are counted exactly.
    """
    if not (columns := config.data.control):
        return None, {}
    if not statement.guarantee:
        return None, public_shares(run, config.data)
    name = layouts.shares_of(columns)
    counts = statement.statistics.positive(name) if statement.statistics else {}
    if not counts:
        declared = ";".join(f"{column}=VALUE,VALUE" for column in columns)
        raise ConfigError(
            f"{run.root}: texts are asked for by {', '.join(columns)}, and its card has no {name!r}, from which to draw the "
            f"values; the exact shares are private. Type dpllm describe {run.config} --epsilon E --shares {declared!r}, then "
            f"dpllm card {run.root} --describe describe.json."
        )
    return name, {tuple(value.split(layouts.SEPARATOR)): count for value, count in counts.items()}


def _longest(config: RunConfig, generator: generate.Generator, prompts: list[str] | None, shares: Shares) -> int:
    """The default length of a text: as in training, or the room after the longest control line and prompt, if that is less."""
    lines: list[str | None] = [layouts.code_line(config.data.control, values) for values in shares]
    parts = (lines or ([] if prompts else [None]), prompts or ())
    longest = sum(max(map(len, generate.encode_all(generator, part)), default=0) for part in parts)
    free = generate.room(generator, longest)
    return max(1, config.data.max_length if free is None else min(config.data.max_length, free))


def _heads(
    columns: Sequence[str], count: int, prompts: list[str] | None, shares: Shares, seed: int
) -> list[dict[str, str]]:
    """The control codes and the prompt of each row. Drawn before any text, so that filters do not change their shares."""
    codes: list[tuple[str, ...]] = [()] * count
    if shares:
        codes = random.Random(f"{seed} codes").choices(list(shares), list(shares.values()), k=count)
    heads = [dict(zip(columns, values, strict=True)) for values in codes]
    if prompts:
        for number, head in enumerate(heads):
            head["prompt"] = prompts[number % len(prompts)]
    return heads


def _continued(columns: Sequence[str], head: Mapping[str, str]) -> str | None:
    """The text that the model continues; None: it starts without a prompt."""
    line = layouts.code_line(columns, [head[column] for column in columns]) if columns else ""
    return line + head.get("prompt", "") or None


def _settings(request: SynthesisRequest, run: RunDir) -> dict[str, Any]:
    settings = {**asdict(request), "recipe": sha256(run.config), "card": sha256(run.export / BLOCK)}
    settings |= {"prompts": sha256(request.prompts)} if request.prompts else {}
    del settings["attempts"]  # does not change the draws
    return settings | {"software": processes.versions()}


def _draw(
    generator: generate.Generator,
    request: SynthesisRequest,
    columns: Sequence[str],
    heads: Sequence[Mapping[str, str]],
    saved: draft.Draft,
) -> tuple[list[str], dict[str, int]]:
    """Draws until every row has a text. Returns the texts, and the number of dropped texts for each reason.

    Raises:
        ConfigError: Too few texts passed the filters.
    """
    sampling = {name: getattr(request, name) for name in ("temperature", "top_p", "max_new_tokens")}
    filters = draft.filters(keep_unfinished=request.keep_unfinished, min_words=request.min_words)
    texts, dropped = dict[int, str](), Counter[str]()
    for line in saved.lines:
        texts |= {int(number): text for number, text in line["texts"].items()}
        dropped.update(line["dropped"])
    waiting = [number for number in range(request.rows) if number not in texts]
    taken = {(heads[number].get("prompt"), text) for number, text in texts.items()}
    while waiting:
        drawn, batch = len(texts) + dropped.total(), waiting[:BATCH]
        tell("Writing rows", len(texts), request.rows, note=f"{drawn} texts drawn")
        if drawn + len(batch) > request.attempts * request.rows:
            reported = ", ".join(f"{reason}: {count}" for reason, count in dropped.most_common())
            raise ConfigError(
                f"of {drawn} texts {len(texts)} passed the filters, of {request.rows} wanted, so nothing is written; dropped "
                f"({reported}). Type a larger --attempts to go on; or remove {saved.path} and start with other filters, such as "
                "--keep-unfinished, or a larger --max-new-tokens."
            )
        seed = random.Random(f"{saved.facts['seed']} batch {len(saved.lines)}").getrandbits(63)
        prompts = [_continued(columns, heads[number]) for number in batch]
        passed, failed = dict[int, str](), Counter[str]()
        for number, sample in zip(batch, generate.sample(generator, prompts, 1, seed=seed, **sampling), strict=True):
            key = (heads[number].get("prompt"), sample.text)
            reason = draft.why_dropped(sample, filters, key, () if request.keep_duplicates else taken)
            if reason is None:
                passed[number] = sample.text
                taken.add(key)
            else:
                failed[reason] += 1
        saved.add({"texts": passed, "dropped": failed})
        texts |= passed
        dropped += failed
        waiting = [number for number in batch if number not in passed] + waiting[len(batch) :]
    reasons = [*filters, *([] if request.keep_duplicates else [draft.DUPLICATE])]
    return [texts[number] for number in range(request.rows)], {reason: dropped[reason] for reason in reasons}
