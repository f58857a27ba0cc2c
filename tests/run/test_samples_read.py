"""Prompts of samples: which are refused before anything is spent, and what a model in training is afterwards."""

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from tiny_models import recipe
from torch import nn

from dpllm.errors import ConfigError, DataError
from dpllm.run.screen import TOKENS, Samples


def of(tmp_path: Path, **sections: Any) -> Samples:
    data = {"train": str(tmp_path / "train.jsonl"), "eval": str(tmp_path / "held"), "format": "text", "max_length": 128}
    config = recipe(data={**data, **sections.pop("data", {})}, **sections)
    return Samples.of(config, tiny.tokenizer(), main=True)


@pytest.mark.parametrize(
    ("train", "words"),
    [
        ({"sample_every": 2}, "Set train.sample_prompts too"),
        ({"sample_prompts": "train.jsonl"}, "not declared public"),
        ({"sample_prompts": "../{here}/train.jsonl"}, "not declared public"),
        ({"sample_prompts": "held/some.txt"}, "not declared public"),
        ({"sample_prompts": "nowhere.txt"}, "nowhere.txt: cannot be read"),
        ({"sample_prompts": ["Anna " * 200]}, "prompt 1 has "),
    ],
)
def test_prompts_that_cannot_be_used_are_refused(tmp_path: Path, train: dict[str, Any], words: str) -> None:
    if isinstance(named := train.get("sample_prompts"), str):
        train = {"sample_prompts": str(tmp_path / named.format(here=tmp_path.name))}
    with pytest.raises((ConfigError, DataError), match=words):
        of(tmp_path, train={"steps": 4, **train})


def test_the_files_of_a_glob_and_of_a_list_and_links_to_them_are_private_too(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    tiny.write_rows(kept / "train.jsonl", [{"prompt": "Anna"}])
    (tmp_path / "soft.jsonl").symlink_to(kept / "train.jsonl")
    (tmp_path / "hard.jsonl").hardlink_to(kept / "train.jsonl")
    within = tmp_path / "within"
    within.mkdir()
    (within / "a.jsonl").symlink_to(kept / "train.jsonl")
    whole = str(kept / "train.jsonl")
    for source in (str(kept / "*.jsonl"), str(tmp_path / "**" / "train.jsonl"), ["builtin:clinic", whole], str(within)):
        for prompts in (kept / "train.jsonl", tmp_path / "soft.jsonl", tmp_path / "hard.jsonl"):
            with pytest.raises(ConfigError, match="not declared public"):
                of(tmp_path, data={"train": source, "eval": None}, train={"steps": 4, "sample_prompts": str(prompts)})


def test_a_file_that_is_declared_public_may_be_named(tmp_path: Path) -> None:
    tiny.write_rows(tmp_path / "train.jsonl", [{"prompt": "Anna"}, {"messages": [{"role": "user", "content": "Who?"}]}])
    settings = {"steps": 4, "sample_prompts": str(tmp_path / "train.jsonl")}
    assert of(tmp_path, data={"public": True}, train=settings).prompts == ("Anna", "Who?")


@pytest.mark.parametrize(("every", "steps"), [(None, [7]), (3, [3, 6, 7])])
def test_when_texts_are_written(every: int | None, steps: list[int]) -> None:
    asked = Samples(("a",), ((1,),), every, 100)
    assert [step for step in range(1, 8) if asked.due(step, 7)] == steps
    assert not Samples((), (), every, 100).due(7, 7)


class Counting(nn.Module):
    """Says the number after the last one; notes in which mode it was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.dropout = nn.Dropout(0.5)
        self.asked: list[tuple[bool, bool]] = []

    def forward(self, input_ids: torch.Tensor, **_: Any) -> Any:
        self.asked.append((self.training or self.dropout.training, torch.is_grad_enabled()))
        logits = self.weight + nn.functional.one_hot(input_ids + 1, 500).float()
        return type("Output", (), {"logits": self.dropout(logits)})


class Numbers:
    eos_token_id = 9

    @staticmethod
    def decode(ids: list[int], **_: Any) -> str:
        return " ".join(map(str, ids))


def test_a_model_is_afterwards_as_it_was() -> None:
    model, asked = Counting().train(), Samples(("a", "b"), ((5,), (100, 101)), None, 1000)
    before = torch.get_rng_state()
    longest = " ".join(map(str, range(102, 102 + TOKENS)))
    assert asked.write(model, Numbers(), contextlib.nullcontext) == ["6 7 8", longest]
    assert torch.equal(torch.get_rng_state(), before)
    assert set(model.asked) == {(False, False)}
    assert model.training
    assert model.dropout.training
    assert model.weight.grad is None
    short = replace(asked, longest=4)  # no longer than a row of training
    assert short.write(model, Numbers(), contextlib.nullcontext)[1] == "102 103"
