"""vLLM is asked for what was ordered, through a stand-in of the part of its interface that is used; the real one was not run."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import tiny
from transformers import GenerationConfig

from dpllm.errors import ConfigError
from dpllm.publish.generate import load, sample
from dpllm.publish.vllm_engine import Served
from dpllm.recipe.config import ModelConfig

END = 1


@dataclass
class Params:
    """vllm.SamplingParams."""

    temperature: float
    top_p: float
    max_tokens: int
    stop_token_ids: list[int] | None
    seed: int


class StandIn:
    """vllm.LLM: writes 5, 6 and so on, and ends the text of every second prompt."""

    started: dict[str, Any]
    asked: tuple[Any, ...]

    def __init__(self, **settings: Any) -> None:
        StandIn.started = settings

    def generate(
        self, prompts: list[dict[str, list[int]]], params: list[Params], *, lora_request: Any, use_tqdm: bool
    ) -> list[Any]:
        StandIn.asked = (prompts, params, lora_request)
        return [
            SimpleNamespace(
                outputs=[
                    SimpleNamespace(
                        token_ids=list(range(5, 5 + one.max_tokens)), finish_reason="length" if n % 2 else "stop"
                    )
                ]
            )
            for n, one in enumerate(params)
        ]


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    top, lora, request = (ModuleType(name) for name in ("vllm", "vllm.lora", "vllm.lora.request"))
    top.LLM, top.SamplingParams = StandIn, Params  # type: ignore[attr-defined]
    request.LoRARequest = lambda name, number, path: (name, number, path)  # type: ignore[attr-defined]
    for module in (top, lora, request):
        monkeypatch.setitem(sys.modules, module.__name__, module)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_model(tmp_path_factory.mktemp("models") / "base")


@pytest.fixture
def export(tmp_path: Path, base: Path) -> Path:
    """An adapter of rank 12, as far as its settings say so."""
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(base).save_pretrained(tmp_path)
    (tmp_path / "adapter_config.json").write_text(f'{{"r": 12, "base_model_name_or_path": "{base}"}}')
    (tmp_path / "adapter_model.safetensors").touch()
    return tmp_path


def test_what_it_is_asked_for(vllm: None, export: Path, base: Path) -> None:
    generator = load(export, engine="vllm")
    found = sample(generator, ["Anna bought", None], 2, max_new_tokens=3, temperature=0.7, top_p=0.9, seed=4)
    assert StandIn.started == {
        "model": str(base), "tokenizer": str(export), "revision": None,
        "enable_lora": True, "max_lora_rank": 16, "generation_config": "vllm",
    }  # fmt: skip
    prompts, params, lora = StandIn.asked
    ids = generator.tokenizer("Anna bought")["input_ids"]
    assert [one["prompt_token_ids"] for one in prompts] == [ids, ids, [0], [0]]
    assert lora == ("tuned", 1, str(export))
    assert {(one.temperature, one.top_p, one.max_tokens) for one in params} == {(0.7, 0.9, 3)}
    assert all(END in (one.stop_token_ids or ()) for one in params)
    assert len({one.seed for one in params}) == 4
    text = generator.tokenizer.decode([5, 6, 7], skip_special_tokens=True)
    assert [(one.text, one.ended) for one in found] == [(text, True), (text, False)] * 2
    sample(generator, ["Anna bought", None], 2, max_new_tokens=3, seed=4)
    assert [one.seed for one in StandIn.asked[1]] == [one.seed for one in params]
    sample(generator, ["Anna bought"], 1, max_new_tokens=3, temperature=0)
    assert (StandIn.asked[1][0].temperature, StandIn.asked[1][0].top_p) == (0.0, 1.0)


def test_whole_weights_need_no_adapter(vllm: None, base: Path) -> None:
    served = Served.start(None, base)
    served.write(GenerationConfig(max_new_tokens=1, do_sample=False), [[0]], 1)
    assert StandIn.asked[2] is None
    assert "enable_lora" not in StandIn.started


def test_it_says_what_it_cannot_do(vllm: None, export: Path, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = export / "adapter_config.json"
    settings.write_text(settings.read_text().replace("12", "513"))
    with pytest.raises(ConfigError, match="rank 512 at most"):
        Served.start(ModelConfig(name_or_path=str(base)), export)
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ConfigError, match=r"pip install 'dpllm\[vllm\]'"):
        Served.start(ModelConfig(name_or_path=str(base)), export)
