"""Samples text from a tuned model: post-processing, which costs no further epsilon.

Comes in: a run directory, an export or a merged model, and prompts. Goes out: samples. Must not read training text or anything in
``private/``.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import PeftModel

from dpllm.errors import ConfigError
from dpllm.files import BLOCK, read_json
from dpllm.model import loading, reading
from dpllm.recipe.config import ModelConfig
from dpllm.records import Json
from dpllm.run.directory import Run, RunDir, open_run
from dpllm.text.layouts import Format
from dpllm.text.prompts import Prompt, Sample, encode


@dataclass(frozen=True)
class Generator:
    """A tuned model that is loaded for sampling.

    Attributes:
        model: A transformers model, with a PEFT adapter if the run trained one.
        format: How prompts are encoded: with messages, text is a user's turn in the tokenizer's chat template.
        template: The recipe's data.template.
        unprotected: Why the model gives no guarantee, from its card or record; None if it gives one.
    """

    model: Any
    tokenizer: Any
    format: Format
    template: str | None
    unprotected: str | None


def load(path: Path, *, base: str | None = None, chat: bool | None = None) -> Generator:
    """Loads a tuned model for sampling.

    Args:
        path: A run directory, its ``export``, or a directory that ``dpllm merge`` wrote.
        base: Name or directory of the adapter's base model; None: the one that the run, or else the adapter, names.
        chat: Whether prompts are turns of a conversation; None: prompts are encoded as in the run's training, or for an
            export as its card says.

    Raises:
        ConfigError: There is no model, its base cannot be found, or the run's files have changed.
        Refused: A weight is not finite.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    run = open_run(RunDir(path), released=True) if RunDir(path).config.exists() else None
    config, export = (run.config, run.export_dir) if run else (None, path)
    if not any(export.glob("*.safetensors")):
        raise ConfigError(
            f"{path}: holds no weights to sample from. Type a finished run, its export, or what dpllm merge wrote."
        )
    tokenizer = _loaded(transformers.AutoTokenizer, export)
    block = read_json(export / BLOCK) if (export / BLOCK).exists() else None
    if (export / "adapter_config.json").exists():
        model = _base(export, run, base, block)
        tuned: Any = PeftModel.from_pretrained(loading.load_base(model, device), str(export)).eval()
    else:
        dtype: Any = "auto" if device.type == "cuda" else torch.float32
        tuned = _loaded(transformers.AutoModelForCausalLM, export, dtype=dtype).to(device).eval()
    loading.check_finite(tuned, str(export))
    template = config.data.template if config else (block or {}).get("template")
    template = template if isinstance(template, str) else None
    fmt: Format = "prompt_completion" if template and not config else "text"
    if config and config.data.format != "auto":
        fmt = config.data.format
    if chat is not None and (chat or fmt == "messages"):
        fmt = "messages" if chat else "text"
    return Generator(tuned, tokenizer, fmt, template, _unprotected(run, block))


def sample(
    generator: Generator,
    prompts: Sequence[Prompt | None] | None,
    num: int,
    *,
    max_new_tokens: int = 64,
    temperature: float = 1.0,
    top_p: float = 1.0,
    seed: int | None = None,
) -> list[Sample]:
    """Samples ``num`` continuations of every prompt, in batches.

    Args:
        generator: From ``load``.
        prompts: None: texts start without a prompt.
        num: Texts for each prompt, >= 1.
        max_new_tokens: At most this many tokens each, >= 1; an end token ends a text.
        temperature: 0 for greedy decoding, or from 1e-6.
        top_p: Nucleus sampling: only the likeliest tokens that together have this probability, in (0, 1].
        seed: The same seed gives the same samples, for the same prompts on one kind of device; None: a secret random seed.

    Returns:
        The samples, grouped by prompt in the order of the prompts.

    Raises:
        ConfigError: A value is out of range, a prompt and its new tokens exceed what the model reads, or the model cannot
            start without a prompt.
        DataError: The chat template rejects a prompt's messages, or a prompt is not text.
    """
    # At a temperature below one in a million, a logit divided by it may be infinite.
    warm = temperature == 0 or 1e-6 <= temperature < math.inf
    if min(num, max_new_tokens) < 1 or not warm or not 0 < top_p <= 1:
        raise ConfigError(
            f"num {num}, max-new-tokens {max_new_tokens}, temperature {temperature:g} and top-p {top_p:g} are out of range: the "
            "first two are at least 1, temperature 0 or from 1e-6, top-p up to 1."
        )
    if seed is not None and not 0 <= seed < 2**63:
        raise ConfigError(f"seed {seed}: is out of torch's range. Type one from 0 to {2**63 - 1}.")
    each_prompt: list[Prompt | None] = [None] if prompts is None else list(prompts)
    encoded = encode_all(generator, each_prompt)
    longest = max(map(len, encoded), default=0)
    free = room(generator, longest)
    if free is not None and max_new_tokens > free:
        raise ConfigError(
            f"a prompt of {longest} tokens and {max_new_tokens} new ones exceed the {longest + free} that the model reads. Type "
            "a smaller --max-new-tokens, or a shorter prompt."
        )
    tokenizer, ends = generator.tokenizer, reading.end_tokens(generator.model, generator.tokenizer)
    config = reading.generation_config(tokenizer, max_new_tokens, ends, temperature=temperature, top_p=top_p)
    device = next(generator.model.parameters()).device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(secrets.randbits(63) if seed is None else seed)
        written = reading.write_behind(generator.model, config, [ids for ids in encoded for _ in range(num)])
    joint = "" if generator.format == "text" else " "  # between prompt and completion, see layouts.joined
    samples = []
    for n, ids in enumerate(written):
        text = tokenizer.decode(ids, skip_special_tokens=True).removeprefix(joint)
        samples.append(Sample(n // num, each_prompt[n // num], text, not ends.isdisjoint(ids)))
    return samples


def encode_all(generator: Generator, prompts: Sequence[Prompt | None]) -> list[list[int]]:
    """Token ids of each prompt; None: a text without a prompt. Raises what ``encode`` raises."""
    reading = generator.format, generator.template
    return [encode(generator.tokenizer, prompt, number, *reading) for number, prompt in enumerate(prompts)]


def room(generator: Generator, longest: int) -> int | None:
    """The largest number of new tokens after a prompt of ``longest`` tokens; None: no limit."""
    positions = loading.positions(generator.model)
    return None if positions is None else positions - longest


def _loaded(kind: Any, export: Path, **arguments: Any) -> Any:
    try:
        return kind.from_pretrained(export, trust_remote_code=False, **arguments)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"{export}: its files cannot be read without code of their own, or are damaged ({type(error).__name__}), and a "
            "model's own code is never run. Type another model."
        ) from None


def _base(export: Path, run: Run | None, base: str | None, block: Json | None) -> ModelConfig:
    if run is not None:
        model, commit = run.config.model, run.record.model.commit
        name, revision = base or model.name_or_path, None if base else commit or model.revision
        return model.changed({"name_or_path": name, "revision": revision})
    base_name = base or read_json(export / "adapter_config.json").get("base_model_name_or_path")
    if not isinstance(base_name, str):
        raise ConfigError(
            f"{export}: the adapter does not name its base model. Name it there, or type dpllm generate RUN --base NAME."
        )
    stated, revision = (block or {}).get("base_model"), None
    if base is None and isinstance(stated, dict) and stated.get("name") == base_name:
        revision = stated.get("revision")
    try:
        base_model = ModelConfig(name_or_path=base_name, revision=revision)
        loading.load_tokenizer(base_model)
    except ConfigError:
        raise ConfigError(
            f"{export}: its base model {base_name!r} was not found; an adapter stores only the last part of a local path. Write "
            "its place there, or type dpllm generate RUN --base with its Hub id or directory."
        ) from None
    return base_model


def _unprotected(run: Run | None, block: Json | None) -> str | None:
    if block is not None and block.get("guarantee") is not True:
        return str(block.get("reason", "its card gives no reason"))
    if run is not None:
        guarantee = run.record.guarantee
        return None if guarantee.holds else guarantee.reason or "its record gives no reason"
    return "no privacy statement lies beside it" if block is None else None
