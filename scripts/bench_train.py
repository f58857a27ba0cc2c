"""Times whole steps on a recipe's rows: dpllm, dpllm without privacy, and transformers' Trainer with peft.

    python scripts/bench_train.py RECIPE [KEY=VALUE ...] [--trainer-rows 16] [--repetitions 3] [--steps 4] [--output FILE.json]

Every variant lives in a process of its own, holds the same model and adapter, has the same rows (as many of the recipe's as
--rows says, chosen at random), and takes so many steps in turn, repetition by repetition; the first does not count. A step is all
of it: the draw, passes, clipping, noise, the ledger, the update. Trainer accumulates batches of --trainer-rows rows up to
train.batch_size, padded to their longest row, shuffled or by length. Seconds are for each row that trains, as Poisson draws
differ in size. Memory is the peak of the whole process.

Trainer groups rows among some thousands and trains on the longest of them first, so that a few steps of it stand for nothing.
With 1,024 rows a group is four steps of 64, or one of 512: choose --steps so that a repetition holds all rows.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import random
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from _machine import commit, machine, versions
from rich.console import Console
from rich.table import Table

ROWS = "rows.jsonl"
VARIANTS = ("dpllm", "without privacy", "Trainer", "Trainer, grouped by length")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    parser.add_argument("--trainer-rows", type=int, default=16, help="per_device_train_batch_size (default: 16)")
    parser.add_argument("--rows", type=int, default=1024, help="that all train on (default: 1024)")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="of each repetition (default: 4)")
    parser.add_argument(
        "--variants", nargs="+", default=VARIANTS, choices=VARIANTS, help="dpllm among them (default: all)"
    )
    parser.add_argument("--output", help="a JSON file")
    options = parser.parse_args()
    context, running = multiprocessing.get_context("spawn"), {}
    with tempfile.TemporaryDirectory() as folder:
        write_rows(options, Path(folder) / ROWS)
        for variant in options.variants:
            ours, theirs = context.Pipe()
            process = context.Process(target=child, args=(variant, options, folder, theirs), daemon=True)
            process.start()
            ours.recv()  # ready: variants load one after another
            running[variant] = ours
        seconds_of: dict[str, list[float]] = {variant: [] for variant in options.variants}
        for repetition in range(options.repetitions + 1):
            for variant, pipe in running.items():
                pipe.send("go")
                if (seconds := pipe.recv()) and repetition:
                    seconds_of[variant].append(seconds)
        memory = {}
        for variant, pipe in running.items():
            pipe.send("end")
            memory[variant] = pipe.recv()
    report(options, seconds_of, memory)


def write_rows(options: argparse.Namespace, path: Path) -> None:
    """A fixed random selection of the recipe's rows."""
    from dpllm.recipe.config import load_config
    from dpllm.text import data

    config = load_config(options.recipe, dict(override.split("=", 1) for override in options.overrides))
    table = data.load_table(config.data.train, config.data, "train", path.parent)
    rows = random.Random(0).sample(list(table.rows), options.rows)
    path.write_text("".join(json.dumps(row.parts) + "\n" for row in rows), encoding="utf-8")


def report(options: argparse.Namespace, seconds_of: dict[str, list[float]], memory: dict[str, int]) -> None:
    table = Table("", "seconds a row", "dpllm takes of it", "peak memory", "dpllm needs of it", title=options.recipe)
    rows = {}
    for variant in options.variants:
        ratios = [ours / theirs for ours, theirs in zip(seconds_of["dpllm"], seconds_of[variant], strict=True)]
        rows[variant] = {
            "seconds_per_row": statistics.median(seconds_of[variant]),
            "all": seconds_of[variant],
            "ratio": statistics.median(ratios),
            "peak_memory_bytes": memory[variant],
            "memory_ratio": memory["dpllm"] / memory[variant],
        }
        row = rows[variant]
        figures = [f"{row['seconds_per_row']:.4f}", f"{row['ratio']:.3f}", f"{memory[variant] / 1e9:.2f} GB"]
        table.add_row(variant, *figures, f"{row['memory_ratio']:.2f}")
    Console().print(table)
    if options.output:
        record = {"command": vars(options), "commit": commit(), "machine": machine(), "variants": rows}
        record["versions"] = versions("torch", "transformers", "peft", "accelerate")
        Path(options.output).write_text(json.dumps(record, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def child(variant: str, options: argparse.Namespace, folder: str, pipe: Connection) -> None:
    """Runs one variant: reports that it is ready, then on each request the seconds per row."""
    from dpllm.model import memory
    from dpllm.recipe.config import load_config

    total = (options.repetitions + 1) * options.steps
    overrides = dict(override.split("=", 1) for override in options.overrides)
    fixed = {"train.steps": total, "train.epochs": None, "output_dir": f"{folder}/{variant.split(',')[-1]}"}
    fixed |= {"audit.canaries": None, "audit.gradient_canaries": 0, "data.eval": None, "train.checkpoint_every": None}
    fixed |= {"privacy.enabled": variant == "dpllm", "privacy.ledger": f"{folder}/ledger.sqlite", "data.public": True}
    fixed |= {"train.seed": 0, "privacy.derived_from": None, "data.train": f"{folder}/{ROWS}"}
    config = load_config(options.recipe, {**overrides, **fixed})
    (trained_by_trainer if variant.startswith("Trainer") else trained_by_dpllm)(variant, options, config, pipe)
    pipe.recv()
    pipe.send(memory.peak_memory())


def trained_by_dpllm(variant: str, options: argparse.Namespace, config: Any, pipe: Connection) -> None:
    from dpllm.model import processes
    from dpllm.run.loop import _next_batches, prepare
    from dpllm.run.promise import Start

    state = processes.join()
    prepared = prepare(config, Start(), state, Console(quiet=True))
    pipe.send("ready")
    step = 0
    with contextlib.closing(prepared.reservation):
        for _ in range(options.repetitions + 1):
            pipe.recv()
            begun, rows = time.perf_counter(), 0
            for _ in range(options.steps):
                batches, canaries = _next_batches(prepared, state)
                prepared.reservation.charge(step + 1)
                prepared.engine.step(batches, canaries)
                rows += sum(len(batch.rows) for batch in batches)
                step += 1
            pipe.send((time.perf_counter() - begun) / max(1, rows))


def trained_by_trainer(variant: str, options: argparse.Namespace, config: Any, pipe: Connection) -> None:
    import torch
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from dpllm.model import loading
    from dpllm.text import data
    from dpllm.text.tokens import encode_units

    tokenizer = loading.load_tokenizer(config.model)
    table = data.load_table(config.data.train, config.data, "train", Path(config.output_dir))
    units = encode_units([[row] for row in table.rows], table.format, tokenizer, config.data)
    rows = [row for unit in units for row in unit.sequences]
    examples = [
        {
            "input_ids": list(row.input_ids),
            "labels": [token if learned else -100 for token, learned in zip(row.input_ids, row.loss_mask, strict=True)],
            "length": len(row.input_ids),
        }
        for row in rows
    ]
    model = loading.build(config, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    micro, per_step = options.trainer_rows, config.train.batch_size
    if per_step % micro:
        raise SystemExit(f"train.batch_size {per_step} is no multiple of --trainer-rows {micro}")

    def collate(batch: list[dict[str, Any]]) -> dict[str, Any]:
        longest, pad = max(len(row["input_ids"]) for row in batch), tokenizer.pad_token_id or 0
        fill = {"input_ids": pad, "labels": -100}
        padded = {key: [row[key] + [value] * (longest - len(row[key])) for row in batch] for key, value in fill.items()}
        mask = [[1] * len(row["input_ids"]) + [0] * (longest - len(row["input_ids"])) for row in batch]
        return {name: torch.tensor(value) for name, value in {**padded, "attention_mask": mask}.items()}

    class Clock(TrainerCallback):
        begun = 0.0

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step % options.steps == 0:
                pipe.recv()
                self.begun = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step % options.steps == 0:
                pipe.send((time.perf_counter() - self.begun) / (options.steps * per_step))

    sampling = "group_by_length" if "grouped" in variant else "random"
    arguments = TrainingArguments(
        output_dir=config.output_dir,
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=per_step // micro,
        max_steps=config.train.steps,
        learning_rate=config.train.learning_rate,
        train_sampling_strategy=sampling,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        gradient_checkpointing=config.model.gradient_checkpointing,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=examples, data_collator=collate, callbacks=[Clock()])
    pipe.send("ready")
    trainer.train()


if __name__ == "__main__":
    main()
