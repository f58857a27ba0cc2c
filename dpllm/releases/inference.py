"""Generates a data set by votes of private records on each token: nothing is trained, and only the rows are released.

Comes in: the recipe and a request. Goes out: a folder in the layout of ``card.inference``, complete or not at all. Must not know
how a token is drawn (``privacy.clipped_logits``) or how a model is read (``model.reading``).

Guarantee:
    All rows together have the guarantee of one text: ``Ballot.event`` of T draws. Each unit has a slot in one batch. Under
    zero_out, slots follow the order of the units, which does not change if a unit is emptied; under add_or_remove_one, each unit
    draws its batch by an independent coin. A batch votes for one text, at most T times, lost draws included, and never again,
    whether or not the text is kept: batches are disjoint, so texts compose in parallel. The number of texts depends only on texts
    that were drawn, and the end of a text only on its tokens. The prompt of a record depends only on its own unit's rows. The
    event is charged before the first token (Dwork and Roth 2014, proposition 2.1 and section 3.5). The ledger counts each draw
    before it happens, so that of several copies of a draft only one goes on.
"""

from __future__ import annotations

import json
import random
import secrets
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dpllm.card import inference, synthetic
from dpllm.card.synthetic import ROWS, Quality
from dpllm.errors import ConfigError, Refused
from dpllm.files import alone, digest, read_json, scratch, whole_directory, write_whole
from dpllm.ledger import RunRequest
from dpllm.ledger.budgets import Reservation, reserve_all
from dpllm.model import loading, processes
from dpllm.model.reading import Reader, end_tokens
from dpllm.progress import tell
from dpllm.recipe import names
from dpllm.recipe.config import RunConfig
from dpllm.releases.describe import Opened, opened, refuse_adapter, without_evaluation
from dpllm.releases.draft import DUPLICATE, UNFINISHED, Draft, filters, why_dropped
from dpllm.releases.inference_budget import DELTA, FIELD, InferenceRequest, ReleaseQuote, quote
from dpllm.releases.quality import EVALUATION, TRAINING, Comparison, Tell, report
from dpllm.run.base_model import of_base
from dpllm.statement import lineage, state
from dpllm.statement.released import Statistics
from dpllm.statement.run_files import LedgerRecord
from dpllm.text import layouts
from dpllm.text.data import load_table
from dpllm.text.layouts import Row
from dpllm.text.prompts import Sample
from dpllm.text.rendering import joined


def quote_of(config: RunConfig, request: InferenceRequest) -> tuple[ReleaseQuote, Refused | None]:
    """The quote of a request, and the ledger's refusal if there is one; spends nothing."""
    with opened(config, request.delta, config.data.control, max_delta=DELTA, create=False) as source:
        source.refuse_tuned(config)
        quoted = _quote(config, request, source)
        reserved = _reservation(config, quoted)
        return quoted, source.ledger.outlook(source.account, [reserved]).error if source.ledger else None


def _quote(config: RunConfig, request: InferenceRequest, source: Opened) -> ReleaseQuote:
    units = len(source.units) if config.data.public_size is None else config.data.public_size
    return quote(request, units, source.delta, config.data.relation)


def _reservation(config: RunConfig, quoted: ReleaseQuote) -> RunRequest:
    return RunRequest(
        quoted.event,
        quoted.delta,
        quoted.texts * quoted.event.count,
        config.data.unit,
        quoted.relation,
        "synthesize: inference",
        final=config.privacy.final,
        parts=quoted.texts,
    )


def private_of(output: Path) -> Path:
    """The folder for figures that may not be published with the rows."""
    return output.with_name(f"{output.name}-private")


def infer(config: RunConfig, request: InferenceRequest, output: Path, not_measured: Tell | None = None) -> Path:
    """Writes a data set; an interrupted call continues where it stopped.

    Args:
        config: The recipe: data, base model, ledger and card.
        request: Size, epsilon and settings of the data set.
        output: A new folder.
        not_measured: As in ``synthesize``, with ``private_of`` as the private folder; data.eval holds the rows to compare with.

    Raises:
        ConfigError: See ``quote``; the prompt or the statistics are unsuitable; the folder exists, or a draft has other settings.
        BudgetExceeded: The budget does not admit the request; nothing is spent.
        Refused: The base model was tuned on the same data, or cannot be read in batches; or data.eval are training data, or are
            declared public and are private.
    """
    config = config if not_measured else without_evaluation(config)
    if output.exists():
        raise ConfigError(f"{output}: already exists. Type another --output, or remove it.")
    if request.prompt.count(FIELD) != 1 or any("\ud800" <= letter <= "\udfff" for letter in request.prompt):
        raise ConfigError(f"--prompt {request.prompt!r}: must hold {FIELD} exactly once, in place of the record.")
    if bool(config.data.control) != bool(request.describe):
        raise ConfigError(
            "values of data.control are drawn by their released shares, so each needs the other. Type both, such as "
            "--data.control '[visit]' --describe FILE, with a file of dpllm describe; or neither."
        )
    refuse_adapter(config)
    with (
        opened(config, request.delta, config.data.control, max_delta=DELTA, create=True) as source,
        alone(output, output.with_name(f".{output.name}.lock")),
    ):
        if source.table.format == "messages":
            raise ConfigError(
                "rows of messages are conversations, and a prompt shows a record as one text. Use text, or prompts and "
                "completions."
            )
        job = _Job(config, request, source)
        job.load()
        job.reserve(output.with_name(f".{output.name}.draft.jsonl"))
        rows, dropped = job.write()
        quality = report(rows, job.comparison(), private_of(output), not_measured) if not_measured else None
        job.publish(rows, dropped, quality, output)
        job.draft.path.unlink()
    return output


class _Job:
    def __init__(self, config: RunConfig, request: InferenceRequest, source: Opened) -> None:
        source.refuse_tuned(config)
        self.config, self.request, self.source = config, request, source
        self.quote = _quote(config, request, source)
        self.filters = filters(keep_unfinished=request.keep_unfinished, min_words=request.min_words)
        self.released = Statistics.pick(read_json(request.describe)) if request.describe else None
        self.shares = _shares(self.released, config, source, self.quote)
        self.tokenizer: Any = loading.load_tokenizer(config.model, config.data)

    def load(self) -> None:
        """Loads the model and reads every record, so that failures come before anything is spent."""
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = loading.load_base(self.config.model, device).eval()
        loading.check_outliers(self.model)
        loading.check_vocabulary(self.model, self.tokenizer)
        self.ends = end_tokens(self.model, self.tokenizer)
        if not self.ends and UNFINISHED in self.filters:
            raise ConfigError("the model has no end token, so all texts would be dropped. Type --keep-unfinished.")
        lines = [layouts.code_line(self.config.data.control, values) for values in self.shares] or [""]
        longest = max((self._prompts(line)([]) for line in lines), key=len)
        width, new = len(longest) + self.config.data.max_length, self.request.max_new_tokens
        max_positions = loading.positions(self.model)  # public
        if max_positions is not None and width + new > max_positions:
            raise ConfigError(
                f"a prompt of {width} tokens and {new} new ones exceed the {max_positions} positions of the model. Lower "
                "data.max_length or --max-new-tokens."
            )
        for index in range(len(self.source.units)):
            deque(map(self._record, self.source.units[index]), maxlen=0)
        rows = 1 + self.quote.ballot.batch_size * (self.config.data.max_examples_per_unit or 1)
        self.reader = Reader(self.model, width, longest, rows, further=new)  # for all texts
        self.reader.lower_in_company(len(self.tokenizer))

    def reserve(self, path: Path) -> None:
        """Reserves and charges, or continues the draft of an earlier reservation."""
        source, ledger, policy = self.source, self.source.ledger, self.source.policy
        assert ledger is not None
        settings = asdict(self.request) | {"describe": self.released and digest(self.released.to_json())}
        for name in ("keep_unfinished", "min_words", "delta", "batch"):  # they affect no draw, or are resolved below
            del settings[name]
        settings |= {"ballot": asdict(self.quote.ballot), "delta": source.delta, "software": processes.versions()}
        settings |= {"rows of the data": source.table.digest, "units of the data": source.units.digest()}
        unread = {"eval", "eval_split", "eval_public"}  # rows that do not vote
        settings |= {"data": self.config.data.model_dump(mode="json", exclude=unread)}
        settings |= {"model": self.config.model.model_dump(mode="json")}
        request = _reservation(self.config, self.quote)

        def begin() -> dict[str, Any]:
            [claim] = reserve_all(
                ledger, policy.dataset, [request], records=policy.records, derived_from=policy.derived_from
            )
            return {"entry": claim.entry, "codes": secrets.randbits(256), "coins": secrets.randbits(256)}

        self.draft = Draft(path, settings, begin)
        self.draft.add()  # immediately, so the next call does not reserve again
        entry = self.draft.facts["entry"]
        if (run := ledger.run(entry)).state not in ("reserved", "running", "interrupted"):
            raise Refused(
                f"entry {entry} of the ledger is {run.state}, so nothing more is drawn by it. Remove {path}, and pay again."
            )
        self.reservation = Reservation(entry, ledger)
        self.tokens = defaultdict[int, list[int | None]](list)  # text -> drawn tokens; None: a crash lost the token
        for text, token in self.draft.lines:
            self.tokens[text].append(token)
        if run.steps == len(self.draft.lines) + 1:
            last = max(self.tokens, default=0)
            lost = last if self._remaining(last) else last + 1
            self.draft.add([lost, None])
            self.tokens[lost].append(None)
        elif run.steps != len(self.draft.lines):
            raise Refused(
                f"{path}: holds {len(self.draft.lines)} draws of entry {entry}, of which the ledger counts {run.steps}: it is a "
                "copy or an older version, and the same records would vote again. Go on where the latest one is; or remove it, "
                "and pay again."
            )

    def _remaining(self, number: int) -> int:
        """How many draws a text has left."""
        draws = self.tokens[number]
        return self.request.max_new_tokens - len(draws) if self.ends.isdisjoint(draws) else 0

    def _next(self, number: int, draw: Callable[[], int]) -> int:
        """Draws the next token of a text. The ledger counts it before it happens, so that a draw lost by a crash counts too."""
        self.reservation.charge(len(self.draft.lines) + 1)
        token = draw()
        self.draft.add([number, token])
        return token

    def write(self) -> tuple[list[dict[str, str]], dict[str, int]]:
        """Draws texts until there are enough rows or no batch is left; returns rows, and counts of dropped texts by reason."""
        rows: list[dict[str, str]] = []
        dropped = Counter(dict.fromkeys((*self.filters, DUPLICATE), 0))
        columns, names, weights = self.config.data.control, list(self.shares), list(self.shares.values())
        for text, batch in enumerate(self._batches()):
            if len(rows) == self.request.rows:
                break
            values = random.Random(f"{self.draft.facts['codes']} {text}").choices(names, weights)[0] if names else ()
            sample = self._text(text, batch, layouts.code_line(columns, values) if columns else "")
            row = {**dict(zip(columns, values, strict=True)), "text": sample.text}
            reason = why_dropped(sample, self.filters, row, rows)
            if reason is None:
                rows.append(row)
            else:
                dropped[reason] += 1
            tell("Writing rows", len(rows), self.request.rows, note=f"{text + 1} texts drawn")
        if not rows:
            reason = ", ".join(f"{name}: {count}" for name, count in dropped.items())
            raise ConfigError(
                f"the filters dropped all {dropped.total()} texts ({reason}), and no batch votes twice. Type other "
                "filters, such as --keep-unfinished, with the same command: the tokens are kept."
            )
        return rows, dict(dropped)

    def _batches(self) -> Iterator[list[list[Row]]]:
        units, size, texts = self.source.units, self.quote.ballot.batch_size, self.quote.texts
        batch_of = [number // size for number in range(len(units))]
        if self.quote.relation == "add_or_remove_one":
            coin = random.Random(self.draft.facts["coins"])
            batch_of = [coin.randrange(texts) for _ in range(len(units))]
        members: list[list[int]] = [[] for _ in range(texts)]
        for number, batch in enumerate(batch_of):
            if batch < texts:  # the last units are too few for another batch
                members[batch].append(number)
        for numbers in members:
            yield [units[number] for number in numbers]

    def _text(self, number: int, batch: Sequence[Sequence[Row]], line: str) -> Sample:
        tokens = [token for token in self.tokens[number] if token is not None]
        if remaining := self._remaining(number):
            reader, prompts = self.reader, self._prompts(line)
            rows = [prompts([]), *(prompts(self._record(row)) for unit in batch for row in unit)]
            logits = reader.read(rows)
            for token in tokens:
                logits = reader.go_on(token, len(rows))
            while remaining:
                token = self._next(number, lambda: self._draw(logits, list(map(len, batch))))  # noqa: B023
                tokens.append(token)
                remaining = 0 if token in self.ends else remaining - 1
                logits = reader.go_on(token, len(rows)) if remaining else logits
        text = self.tokenizer.decode([token for token in tokens if token not in self.ends], skip_special_tokens=True)
        return Sample(number, None, text.strip(), not self.ends.isdisjoint(tokens))

    def _draw(self, logits_RV: np.ndarray[Any, Any], sizes: Sequence[int]) -> int:
        """Draws a token by the units' votes; ``sizes`` are their numbers of rows, after the first row, of the public prompt."""
        public_V, *unit_logits = np.split(logits_RV.astype(np.float64), np.cumsum([1, *sizes])[:-1])
        votes = [self.quote.ballot.vote(unit_logits_RV, public_V[0]) for unit_logits_RV in unit_logits]
        return self.quote.ballot.draw(votes, public_V[0], secrets.randbelow)

    def _record(self, row: Row) -> list[int]:
        """The tokens of a row in its prompt, cut to data.max_length."""
        data = self.config.data
        if self.source.table.format == "text":
            text = row.parts["text"]
        else:
            text = "".join(joined(row.parts["prompt"], row.parts["completion"], data.template))
        ids = self.tokenizer(row.line + text, add_special_tokens=False, verbose=False)["input_ids"]
        return list(ids[: data.max_length])

    def _prompts(self, line: str) -> Callable[[Sequence[int]], list[int]]:
        """A function from the tokens of a record to those of its prompt, after which the text is drawn."""
        prefix, suffix = self._around()
        start = self.tokenizer(line, add_special_tokens=False)["input_ids"] if line else []
        return lambda record: [*prefix, *record, *suffix, *start]

    def _around(self) -> tuple[list[int], list[int]]:
        tokenizer, prompt = self.tokenizer, self.request.prompt
        if tokenizer.chat_template:
            turn = [{"role": "user", "content": prompt}]
            subject = f"the chat template of {self.config.model.name_or_path}"
            try:
                prompt = str(tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True))
            except Exception as error:  # whatever a template raises
                raise ConfigError(f"{subject} fails: {error}. Use another --model.") from None
            if prompt.count(FIELD) != 1:
                raise ConfigError(
                    f"{subject} does not show a user's turn exactly once, so no record fits in. Use another --model."
                )
        else:
            prompt = (tokenizer.bos_token or "") + prompt + "\n\n"
        prefix, _, suffix = prompt.partition(FIELD)
        encoded = tokenizer([prefix, suffix], add_special_tokens=False)["input_ids"]
        return encoded[0], encoded[1]

    def comparison(self) -> Comparison:
        """The records that voted, and evaluation rows, which did not vote."""
        data = self.config.data
        declared = synthetic.declared_sides(data.public, data.eval_public)
        comparison = Comparison(data, self.tokenizer, declared, self.released, {TRAINING: self.source.table})
        if data.eval is None:
            comparison.missing.append("evaluation rows: data.eval names none")
            return comparison
        with scratch() as cache:
            comparison.read(EVALUATION, partial(load_table, data.eval, data, data.eval_split, cache))
        return comparison

    def publish(
        self, rows: Sequence[dict[str, str]], dropped: dict[str, int], quality: Quality | None, output: Path
    ) -> None:
        """Writes the folder with its card, and closes the reservation."""
        config, source, quoted, policy = self.config, self.source, self.quote, self.source.policy
        columns, model = config.data.control, config.model
        dataset, parent, book = policy.dataset, policy.derived_from, source.ledger
        # Guarantees that the base model states for its own training, on other data.
        base_lineage = lineage.compose_with_base(
            of_base(config), config, dataset=dataset, derived_from=parent, book=book, plan=None
        )
        facts = {
            "rows": len(rows),
            "columns": [*columns, "text"],
            "control": columns,
            "shares": layouts.shares_of(columns) if columns else None,
            "delta": source.delta,
            "unit": config.data.unit,
            "max_examples_per_unit": config.data.max_examples_per_unit,
            "neighbouring_relation": quoted.relation,
            "event": quoted.event,
            "num_units": quoted.units,
            **asdict(quoted.ballot),
            "max_new_tokens": self.request.max_new_tokens,
            "texts": len(rows) + sum(dropped.values()),
            "dropped": dropped,
            "prompt": self.request.prompt,
            "base_model": {"name": names.public_name(model.name_or_path), "revision": model.revision, "covered": False},
            "dataset": names.public_name(source.account),
            "data_public": config.data.public,
            "composed": state.composed(LedgerRecord.pick(self.reservation.to_json(source.delta) or {}), source.delta),
            "lineage": base_lineage,
            "eval_public": config.data.eval_public,
            "quality": quality,
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
            "software": processes.versions(),
            "hardware": processes.hardware(),
        }
        with whole_directory(output) as part:
            write_whole(part / ROWS, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
            inference.write_inference_card(part, config, inference.derive(facts, self.released))
        self.reservation.finish("completed")


def _shares(
    released: Statistics | None, config: RunConfig, source: Opened, quoted: ReleaseQuote
) -> dict[tuple[str, ...], float]:
    """Weights of the combinations of control values, from statistics that the same account paid for."""
    if released is None:
        return {}
    name, ledger, subject = layouts.shares_of(config.data.control), source.ledger, (source.account, config.data.unit)
    counts = released.positive(name)
    paid = {run.reservation.entry for run in ledger.runs(source.account)} if ledger else set()
    is_same = (released.dataset, released.unit, released.neighbouring_relation) == (*subject, quoted.relation)
    if not counts or not is_same or not {release.entry for release in released.releases} <= paid:
        raise ConfigError(
            f"--describe: holds no {name!r} that the ledger charged to {source.account}, by {config.data.unit}. Type dpllm "
            "describe --shares with the same data, unit and ledger first."
        )
    return {tuple(value.split(layouts.SEPARATOR)): count for value, count in counts.items()}
