"""What the model writes during training, from public prompts.

Comes in: prompts that the recipe declares public, the model between two steps. Goes out: texts, the same on every rank. Nothing
of the run follows from them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dpllm.errors import ConfigError
from dpllm.files import resolved
from dpllm.model import processes
from dpllm.privacy.loss import Autocast, in_eval_mode
from dpllm.recipe.config import DataConfig, RunConfig
from dpllm.text.prompts import encode, read_prompts
from dpllm.text.sources import expand

TOKENS = 64  # of a text, at most


@dataclass(frozen=True)
class Samples:
    """The prompts of a recipe, and when the model writes behind them."""

    prompts: tuple[str, ...]  # as they may be told
    ids: tuple[tuple[int, ...], ...]  # as the model reads them
    every: int | None  # steps between two texts of a prompt; None: only after the last step
    longest: int  # tokens of a prompt and its text, at most

    @classmethod
    def of(cls, config: RunConfig, tokenizer: Any, *, main: bool) -> Samples:
        """Reads them, on the ``main`` rank; ``data.format`` is known, and with messages a prompt is a user's turn.

        Raises:
            ConfigError: The file is one of private data, a prompt leaves no room for a text below ``data.max_length``, or there
                is none although ``train.sample_every`` is set.
            DataError: The file cannot be read, or holds something else.
        """
        named, most = config.train.sample_prompts, config.data.max_length
        if config.train.sample_every is not None and not named:
            raise ConfigError("train.sample_every is set without prompts. Set train.sample_prompts too, or remove it.")
        if isinstance(named, str) and _is_private(resolved(named), config.data):
            raise ConfigError(
                "train.sample_prompts names data not declared public, but prompts are printed and go to trackers. Name a file "
                "of public prompts."
            )
        read = read_prompts(Path(named)) if isinstance(named, str) and main else named or []
        prompts = processes.shared(read)  # a file need lie on rank 0's machine alone
        assert config.data.format != "auto"
        how = config.data.format, config.data.template
        found = [tuple(encode(tokenizer, prompt, number, *how)) for number, prompt in enumerate(prompts)]
        for number, ids in enumerate(found, start=1):
            if len(ids) >= most:
                raise ConfigError(
                    f"train.sample_prompts: prompt {number} has {len(ids)} tokens, and data.max_length {most} leaves no room "
                    "for the model's text. Shorten the prompt."
                )
        words = (prompt if isinstance(prompt, str) else str(prompt[-1].get("content", "")) for prompt in prompts)
        return cls(tuple(words), tuple(found), config.train.sample_every, most)

    def due(self, step: int, total: int) -> bool:
        """Whether texts are written after step ``step`` of ``total``, counted from 1."""
        return bool(self.ids) and (step == total or (self.every is not None and step % self.every == 0))

    def write(self, model: Any, tokenizer: Any, autocast: Autocast) -> list[str]:
        """One text behind each prompt, by the likeliest token each time.

        All ranks make the same forward passes, because a sharded model is gathered by all of them in each.

        Guarantee:
            The texts are a function of the weights after a step and of public prompts. The Plan's epsilon covers the weights
            after every step, so the texts are post-processing and spend nothing. Model, random state and hooks are afterwards
            as they were: no random number is drawn, no gradient is computed, dropout is off meanwhile.
        """
        device = next(model.parameters()).device
        texts = []
        with in_eval_mode(model):
            for prompt in self.ids:
                ids = list(prompt)
                for _ in range(min(TOKENS, self.longest - len(prompt))):
                    ids_1T = torch.tensor([ids], device=device)
                    with autocast():  # without a cache: it has another class in every family, and a text is short
                        output = model(input_ids=ids_1T, attention_mask=torch.ones_like(ids_1T), use_cache=False)
                    ids.append(int(output.logits[0, -1].argmax()))
                    if ids[-1] == tokenizer.eos_token_id and not processes.several():
                        break
                new = ids[len(prompt) :]
                end = new.index(tokenizer.eos_token_id) if tokenizer.eos_token_id in new else len(new)
                texts.append(tokenizer.decode(new[:end], skip_special_tokens=True))
        return texts


def _is_private(path: Path, data: DataConfig) -> bool:
    """Whether a file is one of the data that the recipe does not declare public, by whatever name or link."""
    sources = [(data.train, data.public), (data.eval, data.eval_public)]
    private = [source for source, public in sources if source is not None and not public]
    for place in (Path(name) for source in private for name in expand(source)):
        if path.is_relative_to(resolved(place)):
            return True
        files = place.rglob("*") if place.is_dir() else [place]
        if path.exists() and any(file.samefile(path) for file in files if file.is_file()):
            return True
    return False
