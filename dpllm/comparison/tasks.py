"""What a tuned model does on held-out rows: losses by example, and BLEU of what it writes against references.

Comes in: finished runs. Goes out: ``private/held_out.json`` and ``private/tasks.json`` of each, from which comparisons take
their intervals. They hold numbers by example of evaluation data, which is why they stay private; no text is kept. A figure that
was computed for exactly these weights is not computed again.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from dpllm.comparison.compared_runs import HELD_OUT, PROTOCOL, TASKS, cached
from dpllm.comparison.text_scores import bleu
from dpllm.errors import ConfigError, DpllmError
from dpllm.files import read_json, write_json
from dpllm.recipe.config import RunConfig
from dpllm.recipe.names import public_name
from dpllm.run.directory import RunDir
from dpllm.statement.run_files import read_run
from dpllm.text import control, data
from dpllm.text.prompts import encode
from dpllm.text.rows import each_row

if TYPE_CHECKING:
    from rich.console import Console

    from dpllm.model.loading import ScoringModels

TOKENS_PER_BATCH = 2**12
Json = dict[str, Any]


def measure(runs: Sequence[RunDir], *, rows: int = 0, losses: bool = True, console: Console | None = None) -> None:
    """Computes what is not known yet of runs that are about to be compared: losses by example, BLEU of what they write.

    The base model is asked once for all of them. BLEU is of the first ``rows`` evaluation prompts. A run for which
    there can be no losses, say because its base model is not at hand, is left as it is, and ``console`` says why.

    Raises:
        ConfigError: ``rows`` without references, or without the package that scores them; or a run that exported no weights.
    """
    if rows and not importlib.util.find_spec("sacrebleu"):
        raise ConfigError("--tasks computes BLEU with sacrebleu, which is not installed. Type: pip install sacrebleu")
    for name in [name for name, asked in ((HELD_OUT, losses), (TASKS, rows > 0)) if asked]:
        known = [cached(run, name, read_run(run)) for run in runs]
        if name == TASKS:
            known = [found if found and found.get("asked") == rows else None for found in known]
        base = any(found and found.get("base") for found in known)
        for run, found in zip(runs, known, strict=True):
            if found and (base or found.get("base")):
                continue
            value = _measured(run, name, rows, not base, console)
            if value is not None:
                write_json(run.private / name, value)
                (run.private / name).chmod(0o600)
                base = base or bool(value["base"])


def _weights(run: RunDir) -> dict[str, str]:
    from dpllm.run.checkpoint import weight_hashes

    return weight_hashes(run.export)


def _measured(run: RunDir, name: str, rows: int, base: bool, console: Console | None) -> Json | None:
    """One file's figures; None where there can be none, and nobody asked for them."""

    def say(text: str) -> None:
        if console is not None:
            console.print(text, markup=False, highlight=False)

    config = run.load_config()
    if config.data.eval is None:
        if name == TASKS:
            raise ConfigError(f"{run.root}: data.eval is not set, so there are no references. Leave --tasks out.")
        return None
    what = "what it writes" if name == TASKS else "losses by example"
    say(f"{run.root.name}: {what} on {public_name(config.data.eval)}")
    try:
        return _written(run, config, base, rows) if name == TASKS else _losses(run, config, base)
    except DpllmError as error:
        if name == TASKS:
            raise
        say(f"No intervals for {run.root.name}: {error}")
        return None


def _losses(run: RunDir, config: RunConfig, base: bool) -> Json:
    """Losses by evaluation example.

    Raises:
        DpllmError: The data are gone or others than at training, the model is, or a score is not finite.
    """
    from dpllm.auditing.run import load_models

    models = load_models(run, config)
    table = _evaluation(run, config)
    units = data.encode_units(each_row(table.rows), table.format, models.tokenizer, config.data, name=table.name)
    if table.format == "preference":  # the chosen answers have a loss
        units = [data.Unit(unit.sequences[::2]) for unit in units]
    expected = read_json(run.private / "summary.json").get("eval_tokens")
    if expected not in (None, sum(sum(sequence.loss_mask) for unit in units for sequence in unit.sequences)):
        raise ConfigError("the evaluation data are no longer those of the run. Restore the file.")
    return {"weights": _weights(run), **_both(models, base, lambda model: _by_example(model, units))}


def _evaluation(run: RunDir, config: RunConfig) -> data.Table:
    assert config.data.eval is not None
    return data.load_table(config.data.eval, config.data, config.data.eval_split, run.private / "cache")


def _both(models: ScoringModels, base: bool, score: Callable[[Any], Json]) -> Json:
    tuned = score(models.tuned)
    if not base:
        return {"tuned": tuned, "base": None}
    with models.base() as base_model:
        return {"tuned": tuned, "base": score(base_model)}


def _by_example(model: Any, units: Sequence[data.Unit]) -> Json:
    """Loss in nats, target tokens and how many of them were ranked first, for each example that has targets."""
    from dpllm.auditing.scores import score

    sequences = [sequence for unit in units for sequence in unit.sequences]
    scores = iter(score(model, sequences, [sequence.loss_mask for sequence in sequences], TOKENS_PER_BATCH))
    found = [[next(scores) for _ in unit.sequences] for unit in units if unit.sequences]
    return {
        "loss": [-sum(float(one.log_prob.sum()) for one in mine) for mine in found],
        "tokens": [sum(len(one.log_prob) for one in mine) for mine in found],
        "correct": [sum(int(one.is_argmax.sum()) for one in mine) for mine in found],
    }


def _written(run: RunDir, config: RunConfig, base: bool, rows: int) -> Json:
    """BLEU of completions against all references of each prompt, see ``PROTOCOL``."""
    from dpllm.auditing.run import load_models
    from dpllm.model.generation import complete, until_end

    table = _evaluation(run, config)
    if table.format != "prompt_completion":
        raise ConfigError(
            f"{public_name(config.data.eval or '')}: has no prompts with completions, so there are no references for BLEU. "
            "Leave --tasks out."
        )
    references = by_prompt(table.rows, rows)
    models = load_models(run, config)
    prompts, num_tokens = _encoded(references, models, config)

    def score(model: Any) -> Json:
        decode: Callable[..., str] = models.tokenizer.decode
        written = complete(model, models.tokenizer, prompts, num_tokens, PROTOCOL["beams"], ends=True)
        texts = [decode(until_end(tokens, models.tokenizer), skip_special_tokens=True).strip() for tokens in written]
        return {"bleu": bleu(texts, list(references.values()))}

    counts = {"asked": rows, "prompts": len(references), "references": sum(map(len, references.values()))}
    return {
        "weights": _weights(run),
        "protocol": PROTOCOL,
        "num_tokens": num_tokens,
        **counts,
        **_both(models, base, score),
    }


def by_prompt(rows: Sequence[Json], count: int) -> dict[str, list[str]]:
    """The first ``count`` different prompts and all references of each: a prompt may stand in several rows."""
    found: dict[str, list[str]] = {}
    for row in rows:
        prompt = row.get(control.LINE, "") + row["prompt"]
        if prompt in found or len(found) < count:
            found.setdefault(prompt, []).append(row["completion"].strip())
    return found


def _encoded(
    references: dict[str, list[str]], models: ScoringModels, config: RunConfig
) -> tuple[list[tuple[int, ...]], int]:
    """Each prompt as the tokens that stand before the first target in training, and how many tokens to write at most."""
    tokenizer, template = models.tokenizer, config.data.template
    prompts = [
        tuple(encode(tokenizer, prompt, number, "prompt_completion", template))
        for number, prompt in enumerate(references)
    ]
    positions = getattr(models.tuned.config, "max_position_embeddings", None) or 2**30
    longest = max(map(len, prompts))
    if longest >= positions:
        raise ConfigError(
            f"{public_name(config.data.eval or '')}: a prompt has {longest} tokens, and with its completion exceeds the "
            f"{positions} that the model reads. Leave --tasks out, or evaluate on shorter prompts."
        )
    return prompts, min(PROTOCOL["num_tokens"], positions - longest)
