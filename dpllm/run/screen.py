"""What a run prints: a progress bar on a terminal or in a notebook, lines in a log, sample texts, a final table.

Comes in: steps, epsilon in words, numbers of tokens; public prompts; run.json. Goes out: text on a console, and the model's
completions of the prompts, the same on every rank. Speed and memory of a step depend on the units drawn and on the longest row: a
terminal shows them, a log or notebook only if the data are public. The loss carries no noise, so only a terminal shows it. Which
steps get a line in a log depends on their number alone.
"""

from __future__ import annotations

import contextlib
import importlib.util
import shlex
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

import torch
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from dpllm.errors import ConfigError, DpllmError
from dpllm.files import resolved
from dpllm.model import memory, processes
from dpllm.model.loading import load_tokenizer
from dpllm.privacy.engine import STEP
from dpllm.privacy.loss import Autocast, in_eval_mode
from dpllm.recipe.config import DataConfig, RunConfig
from dpllm.run.directory import Run
from dpllm.text import data
from dpllm.text.data import each_row
from dpllm.text.prompts import encode, read_prompts
from dpllm.text.sources import expand
from dpllm.text.tokens import Lengths, iter_units

LINES = 20  # in a log, approximately
LONG = 5.0  # seconds after which a log says what is running, and a terminal shows progress within a step
LATER = 4  # factor until a log says so again
TOKENS = 64  # maximum of a sample text


def only_seen(console: Console) -> bool:
    """Whether printed text is shown on a terminal and stored nowhere, as far as this can be known.

    A log is not a terminal; nor is a stream of a program that copies its input, or one that wandb records.
    """
    file = console.file
    copied = file not in (sys.__stdout__, sys.__stderr__) or "write" in getattr(file, "__dict__", {})
    return file.isatty() and not copied and getattr(sys.modules.get("wandb"), "run", None) is None


def tell_lengths(lengths: Lengths, config: RunConfig, console: Console) -> None:
    """Warns of truncated or dropped rows; if they are private, on a terminal only."""
    if (words := lengths.warning(config.data)) and (config.data.public or only_seen(console)):
        console.print(f"Beware: {words}", markup=False, highlight=False, soft_wrap=True)


def tell_lengths_of_some(config: RunConfig, table: data.Table, console: Console) -> None:
    """The same for about a thousand rows, before the others are tokenised; silent without a tokenizer."""
    sample, lengths = each_row(table.rows[:: len(table.rows) // 1000 + 1]), Lengths()
    with contextlib.suppress(DpllmError):
        tokenizer = load_tokenizer(config.model, config.data)
        for _ in iter_units(sample, table.format, tokenizer, config.data, lengths=lengths):
            pass
        tell_lengths(lengths, config, console)


class Screen:
    """Shows how far a run is, and what takes long before, between and within steps; use it in a ``with`` statement.

    On a terminal, and in a notebook for public figures: a bar of steps, and below it a line for the current task. In a log: a
    line for some of the steps, and one for public tasks, or tasks on public rows, that take longer than ``LONG``.
    """

    def __init__(self, console: Console, *, public: bool = False) -> None:
        """Shows nothing yet; with ``public`` rows, times, speed and memory may be shown anywhere."""
        self._console, self._shows_cost = console, public or only_seen(console)
        at_terminal = console.is_interactive and console.file.isatty()  # FORCE_COLOR makes a log a terminal of rich's
        notebook = console.is_jupyter and importlib.util.find_spec("ipywidgets") is not None
        columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[cost]}")
        self.bar = Progress(*columns, console=console) if at_terminal or notebook else None
        self._steps: TaskID | None = None
        self._total, self._first, self._first_ended, self._tokens = 0, 0, 0.0, 0
        self._task: TaskID | None = None
        self._what, self._begun, self._silent = "", 0.0, LONG

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        if self.bar:
            self.bar.stop()

    def __call__(self, what: str, done: int, total: int, note: str, public: bool) -> None:
        """See ``progress.tell``."""
        now = time.monotonic()
        if what != self._what or (total and not done):
            self.end()
            self._what, self._begun, self._silent = what, now, LONG
        seconds = now - self._begun
        if self.bar and (public or self._shows_cost) and (what != STEP or seconds > LONG):
            cost = [note, f"{done:,} of {total:,}"] if total else [note]
            if done and seconds > 1:
                rate = f"{done / seconds:,.0f} tokens/s" if what == STEP else ""
                cost += [rate, f"{timedelta(seconds=round(seconds / done * (total - done)))} left"]
            if self._task is None:
                self._task = self.bar.add_task("", cost="")
                self.bar.start()
            self.bar.update(self._task, description=what, total=total or None, completed=done, cost=_listed(*cost))
        elif not self.bar and (public or self._shows_cost) and what != STEP and seconds > self._silent:
            self._silent = LATER * seconds
            words = (
                f"{done} of {total} done after {seconds:.0f} s" if total else _listed(note, f"after {seconds:.0f} s")
            )
            self._console.print(f"{what}: {words}", markup=False, highlight=False)

    def end(self) -> None:
        """Ends the line of the current task."""
        if self.bar and self._task is not None:
            self.bar.remove_task(self._task)
        self._task, self._what = None, ""

    def begin_steps(self, total: int, done: int) -> None:
        """Starts the bar at ``done`` of ``total`` steps."""
        self._total, self._first = total, done
        if self.bar:
            self._steps = self.bar.add_task("", total=total, completed=done, cost=f"{done}/{total}")
            self.bar.start()

    def step(self, step: int, words: str, tokens: int, loss: float | None = None) -> None:
        """Shows step ``step``, from 1, of ``tokens`` positions with padding; ``words`` give epsilon, ``loss`` is private."""
        self.end()
        now = time.monotonic()
        if not self._first_ended:  # preparation and the warm-up of the first step are not representative
            self._first, self._first_ended, tokens = step, now, 0
        self._tokens += tokens
        cost = self._cost(step, now) if self._shows_cost else ""
        shown_loss = f"loss {loss:.3f} (private)" if loss is not None and only_seen(self._console) else ""
        if self.bar and self._steps is not None:
            of = f"{step}/{self._total}"
            words = "\n".join(filter(None, (words, shown_loss)))  # on separate lines, to fit 80 columns
            self.bar.update(self._steps, completed=step, description=words, cost=_listed(of, cost))
        elif step % max(1, self._total // LINES) == 0 or step == self._total:
            line = _listed(f"step {step} of {self._total}", words, shown_loss, cost)
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _cost(self, step: int, now: float) -> str:
        done, seconds = step - self._first, now - self._first_ended
        parts: list[str] = []
        if done and seconds:
            if step < self._total:
                parts = [f"{timedelta(seconds=round(seconds / done * (self._total - step)))} left"]
            parts.append(f"{self._tokens / seconds:,.0f} tokens/s")
        if (held := memory.peak_memory()) is not None:
            parts.append(f"{held / 1e9:.2f} GB")
        return ", ".join(parts)


def _listed(*parts: str) -> str:
    return ", ".join(filter(None, parts))


@dataclass(frozen=True)
class Samples:
    """The prompts of a recipe, and when the model completes them."""

    prompts: tuple[str, ...]  # as printed
    ids: tuple[tuple[int, ...], ...]  # as the model reads them
    every: int | None  # steps between two completions; None: only after the last step
    longest: int  # maximum tokens of a prompt and its completion

    @classmethod
    def of(cls, config: RunConfig, tokenizer: Any, *, main: bool) -> Samples:
        """Reads the prompts on the ``main`` rank; ``data.format`` is resolved, and with messages a prompt is a user's turn.

        Raises:
            ConfigError: The file holds private data, a prompt leaves no room for a completion within ``data.max_length``, or
                ``train.sample_every`` is set without prompts.
            DataError: The file cannot be read, or does not hold prompts.
        """
        named, max_tokens = config.train.sample_prompts, config.data.max_length
        if config.train.sample_every is not None and not named:
            raise ConfigError("train.sample_every is set without prompts. Set train.sample_prompts too, or remove it.")
        if isinstance(named, str) and _is_private(resolved(named), config.data):
            raise ConfigError(
                "train.sample_prompts names data not declared public, but prompts are printed. Name a file of public "
                "prompts."
            )
        read = read_prompts(Path(named)) if isinstance(named, str) and main else named or []
        prompts = processes.shared(read)  # the file is needed only on rank 0's machine
        assert config.data.format != "auto"
        layout = config.data.format, config.data.template
        encoded = [tuple(encode(tokenizer, prompt, number, *layout)) for number, prompt in enumerate(prompts)]
        for number, ids in enumerate(encoded, start=1):
            if len(ids) >= max_tokens:
                raise ConfigError(
                    f"train.sample_prompts: prompt {number} has {len(ids)} tokens, and data.max_length {max_tokens} leaves no "
                    "room for a completion. Shorten the prompt."
                )
        words = (prompt if isinstance(prompt, str) else str(prompt[-1].get("content", "")) for prompt in prompts)
        return cls(tuple(words), tuple(encoded), config.train.sample_every, max_tokens)

    def due(self, step: int, total: int) -> bool:
        """Whether the model completes the prompts after step ``step`` of ``total``, counted from 1."""
        return bool(self.ids) and (step == total or (self.every is not None and step % self.every == 0))

    def write(self, model: Any, tokenizer: Any, autocast: Autocast) -> list[str]:
        """Completes each prompt by greedy decoding.

        All ranks make the same forward passes, because all of them gather a sharded model in each.

        Guarantee:
            The texts are a function of the weights after a step and of public prompts. The Plan's epsilon covers the weights
            after every step, so the texts are post-processing and cost nothing. Model, random state and hooks are unchanged
            afterwards: no random number is drawn, no gradient is computed, and dropout is off meanwhile.
        """
        device = next(model.parameters()).device
        texts = []
        with in_eval_mode(model):
            for prompt in self.ids:
                ids = list(prompt)
                for _ in range(min(TOKENS, self.longest - len(prompt))):
                    ids_1T = torch.tensor([ids], device=device)
                    with autocast():  # no cache: its class differs between families, and the texts are short
                        output = model(input_ids=ids_1T, attention_mask=torch.ones_like(ids_1T), use_cache=False)
                    ids.append(int(output.logits[0, -1].argmax()))
                    if ids[-1] == tokenizer.eos_token_id and not processes.several():
                        break
                new = ids[len(prompt) :]
                end = new.index(tokenizer.eos_token_id) if tokenizer.eos_token_id in new else len(new)
                texts.append(tokenizer.decode(new[:end], skip_special_tokens=True))
        return texts


def _is_private(path: Path, data: DataConfig) -> bool:
    """Whether a file is among the data not declared public, under any name or link."""
    sources = [(data.train, data.public), (data.eval, data.eval_public)]
    private = [source for source, public in sources if source is not None and not public]
    for place in (Path(name) for source in private for name in expand(source)):
        if path.is_relative_to(resolved(place)):
            return True
        files = place.rglob("*") if place.is_dir() else [place]
        if path.exists() and any(file.samefile(path) for file in files if file.is_file()):
            return True
    return False


def summary(ended: Run) -> dict[str, Any]:
    """What ``dpllm train`` prints at the end, in public and released values; private losses are None."""
    record, run, plan = ended.record, ended.directory, ended.plan
    public, root = record.metrics.public, shlex.quote(str(run.root))
    held_out = ended.config.data.eval is not None
    follow = [f"dpllm audit {root}"] * run.canaries.exists() + [f"dpllm card {root}"]
    if record.status != "completed":
        option = "--resume" if run.resume.exists() else "--overwrite"
        follow = [f"dpllm train {shlex.quote(str(run.config))} {option}", *follow]
    return {
        "run": str(run.root),
        "status": record.status,
        "steps_taken": record.steps_taken,
        "steps_planned": record.steps_planned,
        "steps_lost": record.steps_lost,
        "guarantee": record.guarantee.holds,
        "reason": record.guarantee.reason,
        "epsilon": plan.epsilon if plan else None,
        "delta": plan.delta if plan else None,
        "eval_loss_before": public.get("eval_loss_before"),
        "eval_loss_after": public.get("eval_loss_after"),
        **{name: value for name, value in public.items() if "reward" in name},
        "private_figures": str(run.private / "summary.json") if held_out and not public else None,
        "dataset": record.ledger.dataset if record.ledger else None,
        "export": str(run.export),
        "private": str(run.private),
        "next": follow,
    }


def summary_table(public: dict[str, Any]) -> Table:
    """The result of ``summary`` as a table."""
    title = Text(f"{public['status']}: {public['run']}")
    table = Table(show_header=False, box=box.SIMPLE, title=title, title_justify="left")
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    holds, lost, private = public["guarantee"], public["steps_lost"], public["private_figures"]
    losses = [(when, public[f"eval_loss_{when}"]) for when in ("before", "after")]
    shown = ", ".join(f"{loss:.4f} {when}" for when, loss in losses if loss is not None)
    won = [
        f"{public[key]:.1%} {when}" for when in ("before", "after") if public.get(key := f"eval_reward_accuracy_{when}")
    ]
    unseen = f"private: {private}" if private else "not measured: data.eval is not set"
    lost_steps = f"; {lost} more were charged and lost" if lost else ""
    promise = f"epsilon {public['epsilon']:.3f} at delta {public['delta']:g}" if holds else f"none: {public['reason']}"
    rows = {
        "steps": f"{public['steps_taken'] - lost} of {public['steps_planned']}{lost_steps}",
        "guarantee": promise,
        "held-out loss": f"{shown} (nats per token)" if shown else unseen,
        "reward accuracy": ", ".join(won) or None,
        "charged to": public["dataset"],
        "to publish": f"{public['export']}/",
        "to keep private": f"{public['private']}/",
        "next": "\n".join(public["next"]),
    }
    for name, words in rows.items():
        if words is not None:
            table.add_row(name, Text(words))
    return table
