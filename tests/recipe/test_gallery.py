"""The gallery: every recipe plans from the shape of its model, says what the planner says, and follows the rules of the docs."""

import importlib
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from dpllm.recipe.config import load_config

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
heads: Any = importlib.import_module("recipe_heads")

GALLERY = heads.gallery()
# Cited, and audited.
BEFORE = {"lora/e2e.yaml", "frozen/e2e.yaml", "baseline/e2e.yaml", "smoke/clinic.yaml", "smoke/synthetic.yaml"}
# Of folders that scripts/get_model makes.
BEFORE |= {"smollm/smollm2-135m-e2e.yaml", "preference/smollm2-135m.yaml", "gemma/gemma-3-270m-e2e.yaml"}
BEFORE |= {"preference/clinic.yaml"}  # of the embedded model
# Parameters, a tied head once, as the models' pages on the Hub count them.
PUBLISHED = {
    "gpt2": 124_439_808, "Llama-3.2-1B": 1_235_814_400, "Llama-3.2-3B": 3_212_749_824, "Llama-3.1-8B": 8_030_261_248,
    "Qwen3-4B-Base": 4_022_468_096, "gemma-3-1b-pt": 999_885_952, "Mistral-7B-v0.3": 7_248_023_552,
    "phi-4": 14_659_507_200, "SmolLM2-360M": 361_821_120, "SmolLM2-1.7B-Instruct": 1_711_376_384,
}  # fmt: skip
# LoRA, units of several rows, no privacy: planned in every run of the tests, and the others under --full.
QUICK = {"lora/webnlg.yaml", "users/llama-3.2-1b.yaml", "baseline/llama-3.2-1b.yaml"}


def label(path: Path) -> str:
    return str(path.relative_to(ROOT / "recipes"))


@pytest.fixture(scope="module")
def remembered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Many recipes share their noise, which is calibrated once."""
    return tmp_path_factory.mktemp("gallery")


@pytest.mark.parametrize(
    "path", [pytest.param(path, marks=[pytest.mark.full] * (label(path) not in QUICK)) for path in GALLERY], ids=label
)
def test_a_recipe_plans_as_its_head_says(path: Path, remembered: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(remembered))
    plan, text = heads.planned(path, remembered), path.read_text(encoding="utf-8")
    assert plan["refusals"] == []
    assert plan["advice"] == []
    assert plan["model"]["memory"]["total"] < 0.9 * 80e9
    assert heads.head(text, plan) == text, "run: python scripts/recipe_heads.py"


@pytest.mark.parametrize("path", GALLERY, ids=label)
def test_the_page_has_the_line_of_the_head(path: Path) -> None:
    page = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    [row] = [line for line in page.splitlines() if line.startswith(f"| `recipes/{label(path)}`")]
    needs = heads.HEAD.search(path.read_text(encoding="utf-8"))[0].split("; ")[1].split(" on one H100")[0]
    assert row.endswith(f"| {needs} |")


def test_every_recipe_is_planned_and_no_shape_is_left_over() -> None:
    recipes = {path for path in (ROOT / "recipes").rglob("*.yaml") if path.parent.name != "accelerate"}
    assert {label(path) for path in recipes - set(GALLERY)} == BEFORE
    assert len(GALLERY) >= 16
    shapes = {path.parent.name for path in (ROOT / "recipes" / "configs").glob("*/config.json")}
    assert shapes == PUBLISHED.keys() == {heads.shape_of(path).name for path in GALLERY}


def test_the_anchor_follows_the_published_protocol() -> None:
    """Li et al. 2021 (arXiv 2110.05679): ten passes, delta 8e-6, C 0.1, the test set; the baseline trains alike."""
    lora, baseline = (load_config(ROOT / "recipes" / name / "e2e.yaml") for name in ("lora", "baseline"))
    assert (lora.privacy.delta, lora.privacy.max_grad_norm) == (8e-6, 0.1)
    assert lora.data.eval_split == "test"
    assert lora.train.batch_size * lora.train.steps == pytest.approx(10 * 42_061, rel=0.01)
    assert lora.train == baseline.train
    assert lora.data.model_copy(update={"public": True}) == baseline.data


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_shape_is_that_of_the_published_model(name: str) -> None:
    shape = transformers.AutoConfig.from_pretrained(ROOT / "recipes" / "configs" / name)
    with torch.device("meta"):
        net: Any = transformers.AutoModelForCausalLM.from_config(shape)
    assert sum(parameter.numel() for parameter in net.parameters()) == PUBLISHED[name]


@pytest.mark.parametrize("path", GALLERY, ids=label)
def test_values_follow_the_rules(path: Path) -> None:
    config = load_config(path)
    train, steps = config.train, config.train.steps
    assert math.log2(train.batch_size).is_integer()
    assert 100 <= steps <= 200
    assert config.privacy.clipping == "automatic" or not config.privacy.enabled
    assert config.audit.canaries is None
    if config.privacy.enabled and config.adapter.method == "lora":
        shape = json.loads((heads.shape_of(path) / "config.json").read_text())
        blocks = shape.get("num_hidden_layers") or shape["n_layer"]
        rule = 1.5 * math.sqrt(config.adapter.r) / (config.adapter.alpha * math.sqrt(steps * blocks))
        assert train.learning_rate == pytest.approx(rule, rel=0.15)


@pytest.mark.parametrize("path", GALLERY, ids=label)
def test_a_recipe_is_short_and_names_both_launch_files(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    assert 25 <= len(lines) <= 40
    assert all(name in "\n".join(lines[:2]) for name in ("gpu_ddp", "gpu_fsdp2"))
