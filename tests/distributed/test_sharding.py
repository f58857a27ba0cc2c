"""A base model cut over two processes trains what a whole one trains: the same losses, sums, updates and files."""

from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_models as tm
import torch
from peft import PeftModel
from programs import LAUNCH, run_program
from remembered import Once
from safetensors.torch import load_file

from dpllm.model import loading

ROOT = Path(__file__).parents[2]
VARIANTS = ("plain", "checkpointed", "low", "tied", "copied")
STEPS = (0, 1)

Results = dict[str, Any]


def worker(*arguments: object) -> None:
    run_program(Path(__file__).with_name("sharding_worker.py"), *arguments)


def compare(place: Path) -> None:
    tiny.model("llama", vocab_size=tm.VOCABULARY).save_pretrained(place / "llama")
    tiny.model("llama", vocab_size=tm.VOCABULARY, initializer_range=0.03).save_pretrained(place / "other")
    tied = {**tm.NO_DROPOUT["gpt2"], "vocab_size": tm.VOCABULARY, "tie_word_embeddings": True}
    tiny.model("gpt2", **tied).save_pretrained(place / "gpt2")
    worker(str(place))


@pytest.fixture(scope="session")
def folder(once: Once) -> Path:
    """What the worker's processes left."""
    return once("sharded", compare)


@pytest.fixture(scope="module")
def runs(folder: Path) -> tuple[Results, Results, Results]:
    """Rank 0 and rank 1 of two with a sharded base, and one process with a whole one."""
    names = ("world2_rank0", "world2_rank1", "world1_rank0")
    return tuple(torch.load(folder / f"{name}.pt", weights_only=True) for name in names)


@pytest.fixture(params=VARIANTS)
def results(runs: tuple[Results, Results, Results], request: pytest.FixtureRequest) -> tuple[Results, Results, Results]:
    first, second, alone = runs
    return first[request.param], second[request.param], alone[request.param]


def close(one: torch.Tensor, other: torch.Tensor, tolerance: float = 1e-6) -> bool:
    return float((one - other).norm()) <= tolerance * float(other.norm())


def test_each_rank_holds_half_of_the_blocks_and_what_trains_whole_and_weights_keep_their_type(results: Any) -> None:
    first, second, alone = results
    assert first["sharded"]
    assert not alone["sharded"]
    assert alone["cut"] == []
    for rank in (first, second):
        # Every frozen weight of both blocks, and 0.5 but for rows that cannot be halved.
        assert all(name in rank["cut"] for name in alone["frozen_in_blocks"])
        assert rank["here"] == pytest.approx(rank["all"] / 2, rel=0.02)
    assert first["here"] + second["here"] == first["all"]
    first, _, alone = results
    assert first["trains"] == alone["trains"]
    assert first["trains_in"] == alone["trains_in"] == ["torch.float32"]
    assert first["dtypes"] == alone["frozen_types"]


def test_untied_ends_are_cut_and_tied_ones_stay_whole(runs: tuple[Results, Results, Results]) -> None:
    first = runs[0]
    ends = {name: [cut for cut in first[name]["cut"] if "embed" in cut or "lm_head" in cut] for name in VARIANTS}
    for name in ("plain", "checkpointed", "low"):
        assert len(ends[name]) == 2
        assert first[name]["frozen"] - first[name]["all"] == 16  # the final norm
    assert ends["tied"] == []
    assert ends["copied"] == []


def test_losses_are_those_of_a_whole_model_and_a_rank_without_rows_adds_nothing(results: Any) -> None:
    first, second, alone = results
    for step in STEPS:
        both = torch.cat([first[f"losses{step}"], second[f"losses{step}"]])
        torch.testing.assert_close(both[: len(alone[f"losses{step}"])], alone[f"losses{step}"], rtol=1e-6, atol=0.0)
    assert [[rank[f"units{step}"] for rank in results] for step in STEPS] == [[4, 3, 7], [2, 0, 2]]
    assert not results[1]["sum1"].any()


@pytest.mark.parametrize("name", ["sum0", "sum1", "unclipped", "again"])
def test_sums_add_up_also_without_privacy_and_after_a_pass_that_failed(results: Any, name: str) -> None:
    first, second, alone = results
    assert close(first[name] + second[name], alone[name])


@pytest.mark.parametrize("name", ["released0", "released1", "weights"])
def test_updates_are_the_same(results: tuple[Results, Results, Results], name: str) -> None:
    first, second, alone = results
    assert torch.equal(first[name], second[name])
    assert close(first[name], alone[name])


def test_self_check_held_out_loss_samples_and_generation_run_through_the_sharded_model(
    results: tuple[Results, Results, Results],
) -> None:
    first, second, alone = results
    assert first["error"] == second["error"]
    assert 0 < first["error"] <= max(2 * alone["error"], 1e-6)
    assert first.get("small", 0) <= 1e-6
    first, second, alone = results
    for when in ("before", "after"):
        assert first[when] == second[when]
        assert first[when] == pytest.approx(alone[when], rel=1e-6)
    assert first["samples"] == second["samples"] == alone["samples"]
    assert all(first["samples"])
    assert torch.equal(torch.cat([first["tokens"], second["tokens"]]), alone["tokens"])


@pytest.mark.parametrize("name", VARIANTS)
def test_what_is_saved_is_what_one_process_saves(folder: Path, name: str) -> None:
    """Rank 0 writes alone: a collective in there would have waited for ever."""
    for file in ("export/adapter_model.safetensors", "private/resume/step-00000002/trainable.safetensors"):
        ours, whole = load_file(folder / f"{name}2" / file), load_file(folder / f"{name}1" / file)
        assert ours.keys() == whole.keys()
        for key, tensor in ours.items():
            assert tensor.shape == whole[key].shape
            assert close(tensor, whole[key]), key
    settings = [(folder / f"{name}{world}" / "export" / "adapter_config.json").read_text() for world in (1, 2)]
    assert settings[0] == settings[1]


@pytest.mark.parametrize("name", ["plain", "copied"])
def test_the_adapter_loads_on_one_process(folder: Path, runs: tuple[Results, Results, Results], name: str) -> None:
    base = tm.recipe(model={"name_or_path": str(folder / ("llama" if name == "plain" else "gpt2"))}).model
    tuned = PeftModel.from_pretrained(loading.load_base(base, tm.CPU), str(folder / f"{name}2" / "export")).eval()
    prompt = torch.tensor([[5, 9, 20]])
    tokens = tuned.generate(
        input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=6, do_sample=False, eos_token_id=None
    )
    assert torch.equal(tokens, runs[0][name]["tokens"])


def test_other_weights_and_weights_used_outside_their_layer_are_refused(runs: tuple[Results, Results, Results]) -> None:
    first, second = (rank["refusals"] for rank in runs[:2])
    assert first == second
    assert "weights" in first["different"]
    assert "process 1" in first["different"]
    assert "outside the layer" in first["outside"]


@pytest.mark.full
def test_every_architecture_on_three_ranks(tmp_path: Path) -> None:
    """And adapters on embedding and head, and layers that train as copies; no size is a multiple of three."""
    worker(str(tmp_path), "families")
    for rank in range(3):
        for name, (difference, error) in torch.load(tmp_path / f"families_rank{rank}.pt", weights_only=True).items():
            assert difference <= 1e-6, name
            assert error <= 1e-5, name


@pytest.mark.full
def test_a_launched_run_exports_what_two_whole_models_do(tmp_path: Path) -> None:
    """Through accelerate launch, on the CPU: distributed_type FSDP against MULTI_GPU, with the same seed."""
    launch = (ROOT / "recipes" / "accelerate" / "gpu_fsdp2.yaml").read_text()
    sharded = launch.replace("num_processes: 4", "num_processes: 2")
    whole = sharded[: sharded.index("fsdp_config:")].replace("distributed_type: FSDP", "distributed_type: MULTI_GPU")
    outcomes = []
    for name, text in (("sharded", sharded), ("whole", whole)):
        (tmp_path / f"{name}.yaml").write_text(text)
        keys = {
            "output_dir": tmp_path / name,
            "privacy.ledger": tmp_path / f"{name}.sqlite",
            "privacy.insecure_seed": 5,
            "train.steps": 2,
            "audit.canaries": "null",  # their coins come from no seed
            "audit.gradient_canaries": 0,
        }
        overrides = [word for key, value in keys.items() for word in (f"--{key}", str(value))]
        run_program(*LAUNCH, tmp_path / f"{name}.yaml", "recipes/train.py", "recipes/smoke/clinic.yaml", *overrides)
        outcomes.append(load_file(tmp_path / name / "export" / "adapter_model.safetensors"))
    assert outcomes[0].keys() == outcomes[1].keys()
    for key, tensor in outcomes[0].items():
        torch.testing.assert_close(tensor, outcomes[1][key], rtol=1e-4, atol=1e-6)
