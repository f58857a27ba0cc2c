"""The page on several GPUs says what its script computes, and the script counts what the planner counts on real models."""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from programs import run_program
from torch.utils.flop_counter import FlopCounterMode

from dpllm.privacy import loss
from dpllm.run.footprint import tally

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
scaling: Any = importlib.import_module("scaling")

SHAPES = {
    "wide": scaling.Shape(3, 256, 1024, 4, 2, 512),
    "many heads": scaling.Shape(2, 512, 1376, 8, 8, 1024, tied=True),
    "1B, of two blocks": scaling.Shape(2, 2048, 8192, 32, 8, 128_256, tied=True),
}


def skeleton(shape: Any, checkpointing: bool) -> Any:
    config = transformers.LlamaConfig(
        num_hidden_layers=shape.blocks,
        hidden_size=shape.width,
        intermediate_size=shape.inner,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        vocab_size=shape.vocabulary,
        tie_word_embeddings=shape.tied,
    )
    with torch.device("meta"):
        model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.requires_grad_(False)
        adapter = LoraConfig(r=scaling.RANK, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(model, adapter, autocast_adapter_dtype=False)
    model.train()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def hidden_of(model: Any, rows: int, length: int, *seen: int) -> torch.Tensor:
    """What goes into the head. A mask of four dimensions is taken as it is; whether another is all ones, shapes do not say."""
    with torch.device("meta"):
        ids_RT = torch.zeros((rows, length), dtype=torch.long)
        mask = torch.ones((rows, *seen, length), dtype=torch.bool)
    hidden_RTd: torch.Tensor = model.get_base_model().model(input_ids=ids_RT, attention_mask=mask, use_cache=False)[0]
    return hidden_RTd


def kept_by(shape: Any, rows: int, length: int, checkpointing: bool) -> int:
    """Bytes that the blocks keep for the backward pass, as the planner counts them."""
    model = skeleton(shape, checkpointing)
    with tally() as seen:
        hidden_RTd = hidden_of(model, rows, length)
        kept = seen.live
    del hidden_RTd  # until here it held them
    return kept


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_flops_are_those_that_a_real_model_computes(name: str, checkpointing: bool) -> None:
    shape, rows, length = SHAPES[name], 2, 128
    model = skeleton(shape, checkpointing)
    with FlopCounterMode(display=False) as counter:
        model.get_output_embeddings()(hidden_of(model, rows, length, 1, length)).sum().backward()
    # A fused kernel computes the weights of attention once more in its backward pass, and here they are kept.
    again = 2 * shape.blocks * rows * length * length * shape.width
    result = counter.get_total_flops() + again
    said = rows * length * scaling.flops_per_token(shape, length, checkpointing=checkpointing)
    # Below: the first block's input needs no gradient, a part of two blocks.
    assert said == pytest.approx(result, rel=0.06)
    assert said >= 0.999 * result


@pytest.mark.parametrize("name", SHAPES)
def test_activations_are_those_that_a_real_model_keeps(name: str) -> None:
    shape, rows, length = SHAPES[name], 2, 128
    results = {on: scaling.memory(shape, length, rows, checkpointing=on)["activations"] for on in (False, True)}
    kept = kept_by(shape, rows, length, False)
    assert results[False] == pytest.approx(kept, rel=0.1)
    kept = kept_by(shape, rows, length, True)
    last = rows * length * scaling.LAST * shape.width
    one_block = (results[False] - last) / shape.blocks  # recomputed in the backward pass, which `kept` does not see
    assert results[True] - one_block == pytest.approx(kept, rel=0.1)
    assert results[True] < results[False]


@pytest.mark.parametrize("name", SHAPES)
def test_parameters_are_counted(name: str) -> None:
    shape = SHAPES[name]
    parameters = list(skeleton(shape, False).parameters())
    trainable = sum(parameter.numel() for parameter in parameters if parameter.requires_grad)
    assert shape.trainable == trainable
    assert shape.parameters == pytest.approx(sum(p.numel() for p in parameters) - trainable, rel=0.001)  # but for norms


@pytest.mark.parametrize(
    ("name", "billions"), [("1B", 1.24), ("3B", 3.21), ("8B", 8.03), ("13B", 13.0), ("32B", 32.8), ("70B", 70.6)]
)
def test_the_models_have_their_published_sizes(name: str, billions: float) -> None:
    assert scaling.SHAPES[name].parameters / 1e9 == pytest.approx(billions, rel=0.01)


def test_the_page_shows_the_first_table_of_the_script_whose_constants_are_the_engines() -> None:
    assert 6 * loss.CHUNK["cuda"] == scaling.CHUNK
    page = (ROOT / "docs" / "howto" / "several-gpus.md").read_text(encoding="utf-8")
    assert scaling.tables().split("\n\n")[0] in page


def test_rows_that_fit_fit_and_one_more_does_not() -> None:
    for shape in scaling.SHAPES.values():
        for shards in (1, 8):
            rows = scaling.rows_that_fit(shape, 512, checkpointing=True, shards=shards)
            counts = (scaling.memory(shape, 512, r, checkpointing=True, shards=shards) for r in (rows, rows + 1))
            sizes = [sum(count.values()) for count in counts]
            limit = scaling.GPU_MEMORY * scaling.MEMORY_SHARE
            assert sizes[1] > limit
            assert sizes[0] <= limit or rows == 0


def test_the_page_compares_with_the_steps_that_were_measured() -> None:
    """The lines of --check for the file that the section names."""
    page = (ROOT / "benchmarks" / "NOTES.md").read_text(encoding="utf-8")
    section = page.split("\n### Forecast of steps\n")[1].split("\n### ")[0]
    file = ROOT / next(word.strip("`),;.") for word in section.split() if "benchmarks/step-" in word)
    lines = scaling.check(json.loads(file.read_text(encoding="utf-8")))
    assert lines
    assert [line for line in lines if line not in section] == []


def run(script: str, *arguments: str) -> None:
    run_program(ROOT / "scripts" / script, "--shape", "tiny", *arguments)


def measured(folder: Path, *arguments: str) -> Any:
    file = folder / "step.json"
    case = ["--methods", "lora", "--lengths", "16", "--checkpointing", "off", "--variants", "dpllm", "--no-memory"]
    run("bench_step.py", *case, *arguments, "--device", "cpu", "--output", str(file))
    return json.loads(file.read_text())


@pytest.mark.full
def test_a_measured_step_comes_with_tokens_per_second_and_its_physical_limit(tmp_path: Path) -> None:
    report = measured(tmp_path, "--repetitions", "2")
    (result,) = report["results"]
    tokens = result["rows"] * result["length"] * report["settings"]["physical_batches"]
    shape = scaling.Shape(2, 32, 48, 2, 2, 64)
    assert result["flops"] == tokens * scaling.flops_per_token(shape, 16, checkpointing=False)
    assert result["limit_s"] == result["flops"] / result["matrix_flops_per_s"]
    for values in result["variants"].values():
        assert values["tokens_per_s"] == pytest.approx(tokens / values["median_s"])
        assert result["limit_s"] < min(values["cpu_time_s"])
    assert len(scaling.check(report)) == 2


@pytest.mark.full
def test_a_step_that_is_out_of_time_is_measured_once(tmp_path: Path) -> None:
    (result,) = measured(tmp_path, "--repetitions", "5", "--limit", "0")["results"]
    assert [len(values["time_s"]) for values in result["variants"].values()] == [1, 1]


@pytest.mark.full
def test_two_processes_are_measured_against_one(tmp_path: Path) -> None:
    file = tmp_path / "processes.json"
    run("bench_processes.py", "--rows", "2", "--length", "16", "--repetitions", "2", "--output", str(file))
    report = json.loads(file.read_text())
    assert [len(times) for times in report["times"].values()] == [2, 2]
    assert report["speed_up"] > 0
    assert list(tmp_path.iterdir()) == [file]
