r"""Held-out losses of variants of one recipe: runs with the same seeds, and the paired differences from the first variant.

    python scripts/utility.py recipes/smoke/clinic.yaml --output benchmarks/NAME.json --seeds 1 2 3 4 5 --set privacy.epsilon=8 \
        --variant independent --variant banded privacy.noise=banded train.learning_rate=0.03

Runs of one seed begin with the same adapter and plant the same canaries. Whoever knows a run's seed knows its noise, so that
these runs give no guarantee, and their data must be public. ``--half first`` evaluates on the first half of data.eval, to
choose settings, and ``--half second`` on the other, to report them. Losses are in nats per token of completions. With
``--rows N`` the tuned model writes so many texts, behind control codes (if any) as often as evaluation rows have them, and
figures of ``dpllm.releases.quality`` are kept too. Runs that the output holds are kept, and several calls may add to it at once.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import tempfile
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from scipy import stats

from dpllm.card.card import write_card
from dpllm.errors import DpllmError
from dpllm.files import locked, read_json, write_json
from dpllm.model import processes
from dpllm.publish import generate
from dpllm.publish.merge import carded
from dpllm.recipe.config import RunConfig, load_config
from dpllm.recipe.names import is_builtin, without_paths
from dpllm.releases import quality
from dpllm.run.directory import RunDir
from dpllm.run.loop import train
from dpllm.run.promise import Start
from dpllm.text import builtin, layouts
from dpllm.text.data import load_table, value_name

Json = dict[str, Any]
BATCH = 64
FIGURES = (" by ", "with 8 words")


def keys(words: list[str]) -> Json:
    """Changes of a recipe by dotted key, from words such as ``["privacy.epsilon=8"]``."""
    if wrong := next((word for word in words if "=" not in word), None):
        raise SystemExit(f"{wrong!r} sets nothing; type KEY=VALUE, such as privacy.epsilon=8")
    return {key: yaml.safe_load(value) for key, _, value in (word.partition("=") for word in words)}


def read(options: argparse.Namespace, folder: Path, own: Json, seed: int) -> RunConfig:
    """The recipe of one run, evaluated on half of the rows."""
    place = {"output_dir": str(folder / "run"), "privacy.ledger": str(folder / "ledger.sqlite")}
    seeds = {"privacy.insecure_seed": seed, "train.seed": seed}
    changes = keys(options.set) | own | place | seeds | {"data.public": True, "data.eval_public": True}
    config = load_config(options.recipe, changes)
    source = str(config.data.eval)
    path = builtin.path(source) if is_builtin(source) else Path(source)
    if not path.is_file():
        raise SystemExit(
            f"data.eval {source}: no such file, and halves of its rows are evaluated; type --set data.eval=FILE"
        )
    rows = path.read_text(encoding="utf-8").splitlines(keepends=True)
    part = rows[: len(rows) // 2] if options.half == "first" else rows[len(rows) // 2 :]
    (folder / "eval.jsonl").write_text("".join(part), encoding="utf-8")
    return load_config(options.recipe, changes | {"data.eval": str(folder / "eval.jsonl")})


def run(options: argparse.Namespace, name: str, own: Json, seed: int) -> Json:
    """Trains one run and returns its figures."""
    with tempfile.TemporaryDirectory() as folder:
        config = read(options, Path(folder), own, seed)
        record = train(config, Start(), console=Console(quiet=True))
        if record.status != "completed":  # a signal stopped it
            raise SystemExit(
                f"{name!r} of seed {seed} ended {record.status}, and its loss would be that of fewer steps"
            )
        plan = read_json(RunDir(Path(folder) / "run").plan) if config.privacy.enabled else {}
        bands = len(plan.get("coefficients", ())) or 1
        result = {"loss": record.metrics.public["eval_loss_after"]}
        result |= write(RunDir(Path(folder) / "run"), config, options.rows, seed) if options.rows else {}
    return {"variant": name, "changes": without_paths(own), "seed": seed, "bands": bands, **result}


def write(run: RunDir, config: RunConfig, count: int, seed: int) -> Json:
    """Figures of generated texts, all of them kept: what a classifier learns from them, and what they repeat."""
    write_card(run)
    table, columns = load_table(str(config.data.eval), config.data, None, run.private / "cache"), config.data.control
    choice, generator = random.Random(seed), generate.load(run.root)
    codes = [[value_name(row.codes.get(column)) for column in columns] for row in choice.choices(table.rows, k=count)]
    texts: list[str] = []
    for start in range(0, count, BATCH):
        lines = [layouts.code_line(columns, values) if columns else None for values in codes[start : start + BATCH]]
        drawn = generate.sample(generator, lines, 1, max_new_tokens=config.data.max_length, seed=choice.getrandbits(63))
        texts += [sampled.text for sampled in drawn]
    rows = [dict(zip(columns, values, strict=True)) | {"text": text} for values, text in zip(codes, texts, strict=True)]
    public, _ = quality.measure(rows, quality.of_run(run, config, carded(run)))
    figures = {name: value for name, value in public.figures.items() if any(word in name for word in FIGURES)}
    return {"figures": figures}


def show(rows: list[Json], first_variant: str) -> None:
    """Mean and spread of each variant; mean and 95% interval (Student's t) of its difference from the first, seed by seed."""
    losses: dict[str, dict[int, float]] = {}
    for row in rows:
        losses.setdefault(row["variant"], {})[row["seed"]] = row["loss"]
    first = losses.get(first_variant, {})
    for name, of_seed in losses.items():
        gains = [loss - first[seed] for seed, loss in of_seed.items() if seed in first]
        paired = f"; less {first_variant}: {_mean(gains)}" if gains and name != first_variant else ""
        print(f"{name}: {_mean(list(of_seed.values()))} over {len(of_seed)} seeds{paired}")


def _mean(values: list[float]) -> str:
    if len(values) < 2:
        return f"{sum(values):.4f}"
    spread = statistics.stdev(values)
    half = float(stats.t.ppf(0.975, len(values) - 1)) * spread / len(values) ** 0.5
    return f"{statistics.mean(values):.4f} (+- {half:.4f}, spread {spread:.4f})"


def main() -> None:
    """Trains the runs that the output does not hold yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--half", choices=["first", "second"], default="second")
    parser.add_argument("--rows", type=int, default=0, help="texts that the model writes")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE")
    parser.add_argument("--variant", nargs="+", action="append", required=True, metavar=("NAME", "KEY=VALUE"))
    options = parser.parse_args()
    changes = json.loads(json.dumps(without_paths(keys(options.set))))  # as in the output, where keys are strings
    settings = {"recipe": options.recipe.name, "set": changes, "half": options.half} | (
        {"rows": options.rows} if options.rows else {}
    )
    for seed, (name, *words) in itertools.product(options.seeds, options.variant):
        if _is_held(_held(options.output, settings), name, keys(words), seed):
            continue
        row = run(options, name, keys(words), seed)
        print(row, flush=True)
        with locked(options.output.with_suffix(".lock")):  # other calls may add to the same file
            held = _held(options.output, settings)
            machine = {"versions": processes.versions(), "hardware": processes.hardware()}
            if not _is_held(held, name, keys(words), seed):
                runs = sorted([*held, row], key=lambda row: row["seed"])
                write_json(options.output, {"settings": settings, **machine, "runs": runs})
    show(_held(options.output, settings), options.variant[0][0])


def _is_held(held: list[Json], name: str, own: Json, seed: int) -> bool:
    """Whether the output holds this run with the same changes."""
    held_changes = [row["changes"] for row in held if (row["variant"], row["seed"]) == (name, seed)]
    if held_changes and held_changes[0] != without_paths(own):
        raise SystemExit(f"{name!r} of seed {seed} was run with {held_changes[0]}; give the variant another name")
    return bool(held_changes)


def _held(output: Path, settings: Json) -> list[Json]:
    """Runs that the output holds."""
    if not output.exists():
        return []
    results = read_json(output)
    if results["settings"] != settings:
        raise SystemExit(f"{output} holds runs with other settings; name another file, or move it away")
    return list(results["runs"])


if __name__ == "__main__":
    try:
        main()
    except DpllmError as error:
        raise SystemExit(f"scripts/utility.py: {error}") from None
