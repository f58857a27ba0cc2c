"""BLEU of a tuned model's completions of held-out prompts, against their references.

Comes in: finished runs. Goes out: ``private/tasks.json`` of each, which stays private because the evaluation data do. No text is
kept. Scores that exist for exactly these weights are not computed again.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from dpllm.comparison.compare import PROTOCOL, TASKS, cached_tasks
from dpllm.errors import ConfigError
from dpllm.files import write_json
from dpllm.recipe.config import RunConfig
from dpllm.recipe.names import public_name
from dpllm.records import Json
from dpllm.run.directory import Run, RunDir, open_run
from dpllm.text import data
from dpllm.text.prompts import encode

if TYPE_CHECKING:
    from rich.console import Console

    from dpllm.model.loading import ScoringModels

RESAMPLES = 1000


def measure(runs: Sequence[RunDir], rows: int, console: Console | None = None) -> None:
    """Scores the completions of runs on the first ``rows`` evaluation prompts, unless they were scored before.

    The base model is scored once for all runs.

    Raises:
        ConfigError: There are no references, sacrebleu is not installed, or a run exported no weights.
    """
    if not importlib.util.find_spec("sacrebleu"):
        raise ConfigError("--tasks computes BLEU with sacrebleu, which is not installed. Type: pip install sacrebleu")
    opened = [open_run(run) for run in runs]
    cached = [cached_tasks(run.directory, run.record) for run in opened]
    cached = [scores if scores and scores.get("asked") == rows else None for scores in cached]
    base = any(scores and scores["base"] for scores in cached)
    for run, scored in zip(opened, cached, strict=True):
        if scored and base:
            continue
        directory, config = run.directory, run.config
        if config.data.eval is None:
            raise ConfigError(f"{directory.root}: data.eval is not set, so there are no references. Leave --tasks out.")
        if console is not None:
            text = f"{directory.root.name}: what it writes on {public_name(config.data.eval)}"
            console.print(text, markup=False, highlight=False)
        write_json(directory.private / TASKS, _written(run, base, rows))
        (directory.private / TASKS).chmod(0o600)
        base = True


def _written(run: Run, base: bool, rows: int) -> Json:
    """BLEU against all references of each prompt, as ``PROTOCOL`` says; also of the base model, unless ``base`` is true."""
    from dpllm.auditing.run import load_models
    from dpllm.model.reading import generation_config, until_end, write_behind
    from dpllm.run.checkpoint import weight_hashes

    config, directory = run.config, run.directory
    assert config.data.eval is not None
    table = data.load_table(config.data.eval, config.data, config.data.eval_split, directory.private / "cache")
    if table.format != "prompt_completion":
        raise ConfigError(
            f"{public_name(config.data.eval)}: has no prompts with completions, so there are no references for BLEU. "
            "Leave --tasks out."
        )
    references = by_prompt(table, rows)
    models = load_models(run)
    prompts, num_tokens = _encoded(references, models, config)

    def score(model: Any) -> Json:
        beam = generation_config(models.tokenizer, num_tokens, {models.tokenizer.eos_token_id}, beams=PROTOCOL["beams"])
        written = [until_end(tokens, models.tokenizer) for tokens in write_behind(model, beam, prompts)]
        texts = [text.strip() for text in models.tokenizer.batch_decode(written, skip_special_tokens=True)]
        return {"bleu": bleu(texts, list(references.values()))}

    scores = {
        "weights": weight_hashes(run.export_dir),
        "protocol": PROTOCOL,
        "num_tokens": num_tokens,
        "asked": rows,
        "prompts": len(references),
        "references": sum(map(len, references.values())),
        "tuned": score(models.tuned),
        "base": None,
    }
    if not base:
        with models.base() as base_model:
            scores["base"] = score(base_model)
    return scores


def by_prompt(table: data.Table, count: int) -> dict[str, list[str]]:
    """The first ``count`` distinct prompts with all their references; several rows may share a prompt."""
    references: dict[str, list[str]] = {}
    for row in table.rows:
        prompt = row.line + row.parts["prompt"]
        if prompt in references or len(references) < count:
            references.setdefault(prompt, []).append(row.parts["completion"].strip())
    return references


def _encoded(
    references: dict[str, list[str]], models: ScoringModels, config: RunConfig
) -> tuple[list[tuple[int, ...]], int]:
    """The tokens of each prompt, as in training before the first target, and the largest number of new tokens."""
    from dpllm.model.loading import positions

    tokenizer, template = models.tokenizer, config.data.template
    prompts = [
        tuple(encode(tokenizer, prompt, number, "prompt_completion", template))
        for number, prompt in enumerate(references)
    ]
    max_positions, longest = positions(models.tuned) or 2**30, max(map(len, prompts))
    if longest >= max_positions:
        raise ConfigError(
            f"{public_name(config.data.eval or '')}: a prompt has {longest} tokens, and with its completion exceeds the "
            f"{max_positions} that the model reads. Leave --tasks out, or evaluate on shorter prompts."
        )
    return prompts, min(PROTOCOL["num_tokens"], max_positions - longest)


def bleu(texts: Sequence[str], references: Sequence[Sequence[str]]) -> Json:
    """Corpus BLEU as the E2E challenge defines it, without regard to case and without smoothing.

    Returns:
        ``value`` in 0..100, a 95 % ``interval`` by sacrebleu's bootstrap over texts (None for one text), and its ``signature``.

    References:
        Papineni et al. 2002; Post 2018, "A Call for Clarity in Reporting BLEU Scores"; Koehn 2004 for the bootstrap.
    """
    from sacrebleu.metrics import BLEU  # type: ignore[import-not-found,unused-ignore]

    streams = [list(stream) for stream in zip_longest(*references)]
    metric = BLEU(lowercase=True, tokenize="13a", smooth_method="none")
    corpus = metric.corpus_score(list(texts), streams)
    limits = None
    if len(texts) > 1:
        bootstrap = metric.corpus_score(list(texts), streams, n_bootstrap=RESAMPLES)
        limits = [min(100.0, max(0.0, bootstrap._mean - bootstrap._ci)), min(100.0, bootstrap._mean + bootstrap._ci)]
    return {"value": min(100.0, corpus.score), "interval": limits, "signature": str(metric.get_signature())}
