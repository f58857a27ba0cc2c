"""A data set that private records vote for, token by token: no training, and nothing but the rows leaves.

Comes in: the recipe, what is asked for. Goes out: a folder as ``card.inference`` lays it out, whole or not at all. Must not
know how a token is drawn (``privacy.voting``), nor read a model (``model.reading``).

Guarantee:
    All rows together have the guarantee of one text: ``Ballot.event`` of T draws. Each unit has a slot in one batch. Under
    zero_out slots follow the order of the units, which a unit that is replaced by nothing does not change; under
    add_or_remove_one a coin of its own picks the batch. A batch votes for one text, T times at most, lost draws included, and
    never again, whatever becomes of the text: batches are disjoint, so that texts compose in parallel. How many texts are begun
    follows from texts that are drawn, and the end of a text from its tokens. What a record reads as follows from its own unit's
    rows. It is charged before the first token (Dwork and Roth 2014, proposition 2.1 and section 3.5).
"""

from __future__ import annotations

import json
import random
import secrets
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dpllm.card import inference, synthetic
from dpllm.card.synthetic import ROWS, Quality
from dpllm.errors import ConfigError, Refused
from dpllm.files import alone, digest, read_json, scratch, whole_directory, write_whole
from dpllm.ledger import RunRequest
from dpllm.model import environment, loading
from dpllm.model.reading import Reader
from dpllm.publish import filters
from dpllm.publish.draft import Draft
from dpllm.publish.generate import Sample
from dpllm.publish.ordered import DELTA, FIELD, FILTERS, Offer, Order, offer, with_base
from dpllm.publish.quality import EVALUATION, TRAINING, Beside, Tell, report
from dpllm.recipe import names
from dpllm.recipe.config import RunConfig
from dpllm.run.describe import Opened, opened, refuse_adapter, without_evaluation
from dpllm.run.payment import Payment
from dpllm.statement import state
from dpllm.statement.fields import Lineage
from dpllm.statement.released import Statistics
from dpllm.statement.run_files import LedgerRecord
from dpllm.text import control
from dpllm.text.layouts import joined
from dpllm.text.rows import Row

Told = Callable[[int, int], None]
"""Called after each text with the rows that are taken so far, and the texts begun."""


def offer_of(config: RunConfig, order: Order) -> tuple[Offer, Lineage | None, Refused | None]:
    """What an order would be, also with the models before, and what the ledger would say; spends nothing."""
    with opened(config, order.delta, config.data.control, most=DELTA, create=False) as source:
        made = _offer(config, order, source)
        request = _request(config, order, made)
        before = with_base(order, made, config, source.policy, source.ledger)
        return made, before, source.ledger.outlook(source.account, [request]).error if source.ledger else None


def _offer(config: RunConfig, order: Order, source: Opened) -> Offer:
    if config.data.public_size is None:
        return offer(order, len(source.units), source.delta, "zero_out")
    return offer(order, config.data.public_size, source.delta, "add_or_remove_one")


def _request(config: RunConfig, order: Order, made: Offer) -> RunRequest:
    event = made.ballot.event(order.tokens)
    final = config.privacy.final
    return RunRequest(event, made.delta, 1, config.data.unit, made.relation, "synthesize: inference", final=final)


def private_of(output: Path) -> Path:
    """Where figures go that may not be published with the rows."""
    return output.with_name(f"{output.name}-private")


def infer(
    config: RunConfig,
    order: Order,
    output: Path,
    told: Told = lambda taken, begun: None,
    not_measured: Tell | None = None,
) -> Path:
    """Writes a data set; what was interrupted goes on where it stopped.

    Args:
        config: The recipe: data, base model, ledger and card.
        order: What is asked for.
        output: A new folder.
        told: Progress.
        not_measured: As in ``synthesize``, with ``private_of`` the folder; data.eval has the rows to compare with.

    Raises:
        ConfigError: See ``offer``; an unsuitable prompt or statistics; a folder that holds something, or a draft of another call.
        BudgetExceeded: The ledger has no room; nothing is spent.
        Refused: The base model was tuned on the same data, and no total can be stated; or it cannot be read in batches; or
            data.eval are training data, or declared public and are not.
    """
    config = config if not_measured else without_evaluation(config)
    if output.exists():
        raise ConfigError(f"{output}: already exists. Type another --output, or remove it.")
    if order.prompt.count(FIELD) != 1 or any("\ud800" <= letter <= "\udfff" for letter in order.prompt):
        raise ConfigError(f"--prompt {order.prompt!r}: has to say once, with {FIELD}, where a record stands.")
    if bool(config.data.control) != bool(order.describe):
        raise ConfigError(
            "texts are asked for by data.control as often as released shares say, so the two belong together. Type both, such as "
            "--data.control '[visit]' --describe FILE, as dpllm describe writes it; or neither."
        )
    refuse_adapter(config)
    tests = filters.tests(**{**FILTERS, **order.filters})
    with (
        opened(config, order.delta, config.data.control, most=DELTA, create=True) as source,
        alone(output, output.with_name(f".{output.name}.lock")),
    ):
        if source.table.format == "messages":
            raise ConfigError(
                "rows of messages are conversations, and a record stands in a prompt as one text. Use text, or prompts and "
                "completions."
            )
        job = _Job(config, order, source)
        job.load(tests)
        job.pay(output.with_name(f".{output.name}.draft.jsonl"))
        rows, dropped = job.write(tests, told)
        quality = report(rows, job.beside(), private_of(output), not_measured) if not_measured else None
        _publish(job, rows, dropped, quality, output)
        job.draft.path.unlink()
    return output


class _Job:
    """One data set in the making."""

    def __init__(self, config: RunConfig, order: Order, source: Opened) -> None:
        self.config, self.order, self.source = config, order, source
        self.made = _offer(config, order, source)
        self.released = Statistics.pick(read_json(Path(order.describe))) if order.describe else None
        self.shares = _shares(self.released, config, source, self.made)
        self.before = with_base(order, self.made, config, source.policy, source.ledger)
        self.tokenizer: Any = loading.load_tokenizer(config.model, config.data)
        self.tokens = defaultdict[int, list[int | None]](list)  # drawn so far, by text; None: a crash lost it

    def pay(self, path: Path) -> None:
        """Reserves and charges, or goes on with what was paid for."""
        order, source, ledger = self.order, self.source, self.source.ledger
        assert ledger is not None
        asked = {**asdict(order), "describe": self.released and digest(self.released.to_json())}
        settings = {name: value for name, value in asked.items() if name not in ("filters", "delta", "batch", "clip")}
        settings |= {"ballot": asdict(self.made.ballot), "delta": source.delta, "software": environment.versions()}
        settings["lineage"] = digest(self.before.to_json()) if self.before else None
        settings |= {"rows of the data": source.table.digest, "units of the data": source.units.digest()}
        for part in ("model", "data"):
            for name, value in getattr(self.config, part).model_dump(mode="json").items():
                if not name.startswith("eval"):  # rows that nobody votes with
                    settings[f"{part}.{name}"] = value
        request = _request(self.config, order, self.made)

        def begin() -> dict[str, Any]:
            whose = source.policy
            claim = ledger.reserve(whose.dataset, request, records=whose.records, derived_from=whose.derived_from)
            return {"entry": claim.entry, "codes": secrets.randbits(256), "coins": secrets.randbits(256)}

        self.draft = Draft(path, settings, begin, self._take)
        self.draft.add()  # at once: what is reserved is not reserved again
        entry = self.draft.facts["entry"]
        if (one := ledger.run(entry)).state not in ("reserved", "running", "interrupted"):
            raise Refused(
                f"entry {entry} of the ledger is {one.state}, so nothing more is drawn by it. Remove {path}, and pay anew."
            )
        if not one.steps:
            ledger.charge(entry, 1)
        self.payment = Payment(entry, ledger)

    def _take(self, line: Sequence[int]) -> None:
        """A line of the draft: the number of a text of which a token is about to be drawn; then the same with the token."""
        if len(line) == 1:
            self.tokens[line[0]].append(None)
        else:
            self.tokens[line[0]][-1] = line[1]

    def _next(self, number: int, draw: Callable[[], int]) -> int:
        """The next token of a text. That it is drawn is on the disk before it is, and what a crash loses counts as drawn."""
        self.draft.add([number])
        token = draw()
        self.draft.add([number, token])
        return token

    def write(self, tests: Mapping[str, filters.Test], told: Told) -> tuple[list[dict[str, str]], Counter[str]]:
        """Texts until there are enough rows, or no batch is left."""
        rows: list[dict[str, str]] = []
        dropped: Counter[str] = Counter(dict.fromkeys((*tests, filters.DUPLICATE), 0))
        columns = self.config.data.control
        names, weights = list(self.shares), list(self.shares.values())
        for text, batch in enumerate(self._batches()):
            if len(rows) == self.order.rows:
                break
            chosen = random.Random(f"{self.draft.facts['codes']} {text}").choices(names, weights)[0] if names else ()
            sample = self._text(text, batch, control.line(columns, chosen) if columns else "")
            why = next((name for name, drops in tests.items() if drops(sample)), None)
            row = {**dict(zip(columns, chosen, strict=True)), "text": sample.text}
            why = filters.DUPLICATE if why is None and row in rows else why
            if why is None:
                rows.append(row)
            else:
                dropped[why] += 1
            told(len(rows), len(rows) + dropped.total())
        if not rows:
            why = ", ".join(f"{name}: {many}" for name, many in dropped.items())
            raise ConfigError(
                f"the filters dropped all of {dropped.total()} texts ({why}), and no batch votes twice. Type other filters, such "
                "as --keep-unfinished, with the same command: the tokens are kept."
            )
        return rows, dropped

    def _batches(self) -> Iterator[list[list[Row]]]:
        """The units of each text: by their order, or each by a coin of its own."""
        size, units = self.made.ballot.batch_size, self.source.units
        if self.made.relation == "zero_out":
            for start in range(0, self.made.texts * size, size):
                yield [units[number] for number in range(start, start + size)]
            return
        coin = random.Random(self.draft.facts["coins"])
        places = [coin.randrange(self.made.texts) for _ in range(len(units))]
        for text in range(self.made.texts):
            yield [units[number] for number, place in enumerate(places) if place == text]

    def _text(self, number: int, batch: Sequence[Sequence[Row]], line: str) -> Sample:
        """One text: what is drawn already, and the rest."""
        before = list(self.tokens[number])
        most, tokens = self.order.tokens, [token for token in before if token is not None]
        left = most - len(before) if self.ends.isdisjoint(tokens) else 0
        if left:
            reader, prompts, first = self.reader, self._prompts(line), []
            for unit in batch:
                first.append([prompts(self._record(row)) for row in unit])
            rows = [prompts([]), *(row for unit in first for row in unit)]
            logits = reader.read(rows)
            for token in tokens:
                logits = reader.go_on(token, len(rows))
            while left:
                token = self._next(number, lambda: self._draw(logits, [len(unit) for unit in first]))  # noqa: B023
                tokens.append(token)
                left = 0 if token in self.ends else left - 1
                logits = reader.go_on(token, len(rows)) if left else logits
        text = self.tokenizer.decode([token for token in tokens if token not in self.ends], skip_special_tokens=True)
        return Sample(number, None, text.strip(), not self.ends.isdisjoint(tokens))

    def _draw(self, logits_RV: np.ndarray[Any, Any], sizes: Sequence[int]) -> int:
        logits_RV, start, votes = logits_RV.astype(np.float64), 1, []
        for size in sizes:
            votes.append(self.made.ballot.vote(logits_RV[start : start + size], logits_RV[0]))
            start += size
        return self.made.ballot.draw(votes, logits_RV[0], secrets.randbelow)

    def _record(self, row: Row) -> list[int]:
        """A row as a prompt shows it, cut to data.max_length tokens."""
        data = self.config.data
        text = (
            row["text"]
            if self.source.table.format == "text"
            else "".join(joined(row["prompt"], row["completion"], data.template))
        )
        ids: list[int] = self.tokenizer(row.get(control.LINE, "") + text, add_special_tokens=False, verbose=False)[
            "input_ids"
        ]
        return ids[: data.max_length]

    def _prompts(self, line: str) -> Callable[[Sequence[int]], list[int]]:
        """From the tokens of a record to those of its prompt, behind which the text is drawn."""
        before, after = self._around()
        start = self.tokenizer(line, add_special_tokens=False)["input_ids"] if line else []
        return lambda record: [*before, *record, *after, *start]

    def _around(self) -> tuple[list[int], list[int]]:
        tokenizer, prompt = self.tokenizer, self.order.prompt
        if tokenizer.chat_template:
            turn = [{"role": "user", "content": prompt}]
            wrong = f"the chat template of {self.config.model.name_or_path}"
            try:
                prompt = str(tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True))
            except Exception as error:  # of a template, which is a program
                raise ConfigError(f"{wrong} fails: {error}. Use another --model.") from None
            if prompt.count(FIELD) != 1:
                raise ConfigError(
                    f"{wrong} does not show a user's turn once, where a record stands. Use another --model."
                )
        else:
            prompt = (tokenizer.bos_token or "") + prompt + "\n\n"
        before, _, after = prompt.partition(FIELD)
        encoded = tokenizer([before, after], add_special_tokens=False)["input_ids"]
        return encoded[0], encoded[1]

    def beside(self) -> Beside:
        """The records themselves, and rows that did not vote."""
        data = self.config.data
        declared = synthetic.declared_sides(data.public, data.eval_public)
        found = Beside(data, self.tokenizer, declared, self.released, {TRAINING: self.source.table})
        with scratch() as cache:
            found.read(EVALUATION, cache)
        return found

    def load(self, tests: Collection[str]) -> None:
        """The model, and all that may fail, before anything is spent on what it could not read."""
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = loading.load_base(self.config.model, device).eval()
        loading.check_outliers(self.model)
        loading.check_vocabulary(self.model, self.tokenizer)
        own = self.model.generation_config.eos_token_id
        self.ends = {*(own if isinstance(own, list) else [own]), self.tokenizer.eos_token_id} - {None}
        if not self.ends and filters.UNFINISHED in tests:
            raise ConfigError("the model has no end token, so that all texts would be dropped. Type --keep-unfinished.")
        lines = [control.line(self.config.data.control, values) for values in self.shares] or [""]
        longest = max((self._prompts(line)([]) for line in lines), key=len)
        width, most = len(longest) + self.config.data.max_length, loading.positions(self.model)  # public
        if most is not None and width + self.order.tokens > most:
            raise ConfigError(
                f"a prompt of {width} tokens and {self.order.tokens} new ones exceed the {most} that the model reads. "
                "Lower data.max_length or --tokens."
            )
        for place in range(len(self.source.units)):
            deque(map(self._record, self.source.units[place]), maxlen=0)
        rows = 1 + self.made.ballot.batch_size * (self.config.data.max_examples_per_unit or 1)
        self.reader = Reader(self.model, width, longest, rows, further=self.order.tokens)  # for all texts
        self.reader.lower_in_company(len(self.tokenizer))


def _shares(
    released: Statistics | None, config: RunConfig, source: Opened, made: Offer
) -> dict[tuple[str, ...], float]:
    """How often each combination of control values is asked for, of statistics that the same account paid for."""
    if released is None:
        return {}
    name, ledger = control.shares_of(config.data.control), source.ledger
    counts = released.positive(name)
    paid = {run.reservation.entry for run in ledger.runs(source.account)} if ledger else set()
    same = (released.dataset, released.unit, released.neighbouring_relation) == (
        source.account,
        config.data.unit,
        made.relation,
    )
    if not counts or not same or not {one.entry for one in released.releases} <= paid:
        raise ConfigError(
            f"--describe: holds no {name!r} that the ledger knows of {source.account}, by {config.data.unit}. Type dpllm "
            "describe --shares with the same data, unit and ledger first."
        )
    return {tuple(value.split(control.SEPARATOR)): count for value, count in counts.items()}


def _publish(
    job: _Job, rows: Sequence[dict[str, str]], dropped: Counter[str], quality: Quality | None, output: Path
) -> None:
    """The folder, with its card."""
    config, order, source = job.config, job.order, job.source
    columns, model = config.data.control, config.model
    held = LedgerRecord.pick(job.payment.to_json(source.delta) or {})
    facts = {
        "rows": len(rows),
        "columns": [*columns, "text"],
        "control": columns,
        "shares": control.shares_of(columns) if columns else None,
        "delta": source.delta,
        "unit": config.data.unit,
        "max_examples_per_unit": config.data.max_examples_per_unit,
        "neighbouring_relation": job.made.relation,
        "event": job.made.ballot.event(order.tokens),
        "num_units": job.made.units,
        **asdict(job.made.ballot),
        "max_new_tokens": order.tokens,
        "texts": len(rows) + dropped.total(),
        "dropped": dict(dropped),
        "prompt": order.prompt,
        "base_model": {"name": names.public_name(model.name_or_path), "revision": model.revision, "covered": False},
        "dataset": names.public_name(source.account),
        "data_public": config.data.public,
        "composed": state.composed(held, source.delta),
        "lineage": job.before,
        "eval_public": config.data.eval_public,
        "quality": quality,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "software": environment.versions(),
        "hardware": environment.hardware(),
    }
    with whole_directory(output) as part:
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        write_whole(part / ROWS, lines)
        inference.write_inference_card(part, config, inference.derive(facts, job.released))
    assert source.ledger is not None
    job.payment.finish("completed")
