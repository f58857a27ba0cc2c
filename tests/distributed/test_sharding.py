"""A base model cut over two processes trains what a whole one trains: the same losses, sums, updates and files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_models as tm
import torch
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env
from safetensors.torch import load_file

from dpllm import model, ranks, sharding
from dpllm.config import RunConfig
from dpllm.errors import ConfigError, Refused

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
VARIANTS = ("plain", "checkpointed", "low", "tied", "copied")
STEPS = (0, 1)
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(ROOT), str(HERE.parent)]),
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
}

Results = dict[str, Any]


def worker(*arguments: str) -> None:
    command = [sys.executable, str(HERE / "sharding_worker.py"), *arguments]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the worker's processes left."""
    place = tmp_path_factory.mktemp("sharded")
    tiny.model("llama", vocab_size=tm.VOCABULARY).save_pretrained(place / "llama")
    tiny.model("llama", vocab_size=tm.VOCABULARY, initializer_range=0.03).save_pretrained(place / "other")
    tied = {**tm.NO_DROPOUT["gpt2"], "vocab_size": tm.VOCABULARY, "tie_word_embeddings": True}
    tiny.model("gpt2", **tied).save_pretrained(place / "gpt2")
    worker(str(place))
    return place


@pytest.fixture(scope="module")
def runs(folder: Path) -> tuple[Results, Results, Results]:
    """Rank 0 and rank 1 of two with a sharded base, and one process with a whole one."""
    first, second, alone = (
        torch.load(folder / f"world{world}_rank{rank}.pt", weights_only=True)
        for rank, world in ((0, 2), (1, 2), (0, 1))
    )
    return first, second, alone


@pytest.fixture(params=VARIANTS)
def results(runs: tuple[Results, Results, Results], request: pytest.FixtureRequest) -> tuple[Results, Results, Results]:
    first, second, alone = runs
    return first[request.param], second[request.param], alone[request.param]


def close(one: torch.Tensor, other: torch.Tensor, tolerance: float = 1e-6) -> bool:
    return float((one - other).norm()) <= tolerance * float(other.norm())


def test_each_rank_holds_half_of_the_blocks(results: tuple[Results, Results, Results]) -> None:
    first, second, alone = results
    assert first["sharded"]
    assert not alone["sharded"]
    assert alone["cut"] == []
    for rank in (first, second):
        # Every frozen weight of both blocks, and 0.5 but for rows that cannot be halved.
        assert all(name in rank["cut"] for name in alone["frozen_in_blocks"])
        assert rank["here"] == pytest.approx(rank["all"] / 2, rel=0.02)
    assert first["here"] + second["here"] == first["all"]


def test_untied_ends_are_cut_and_tied_ones_stay_whole(runs: tuple[Results, Results, Results]) -> None:
    first = runs[0]
    ends = {name: [cut for cut in first[name]["cut"] if "embed" in cut or "lm_head" in cut] for name in VARIANTS}
    for name in ("plain", "checkpointed", "low"):
        assert len(ends[name]) == 2
        assert first[name]["frozen"] - first[name]["all"] == 16  # the final norm
    assert ends["tied"] == []
    assert ends["copied"] == []


def test_what_trains_is_whole_and_frozen_weights_keep_their_type(results: tuple[Results, Results, Results]) -> None:
    first, _, alone = results
    assert first["trains"] == alone["trains"]
    assert first["trains_in"] == alone["trains_in"] == ["torch.float32"]
    assert first["dtypes"] == alone["frozen_types"]


def test_losses_are_those_of_a_whole_model(results: tuple[Results, Results, Results]) -> None:
    first, second, alone = results
    for step in STEPS:
        both = torch.cat([first[f"losses{step}"], second[f"losses{step}"]])
        torch.testing.assert_close(both[: len(alone[f"losses{step}"])], alone[f"losses{step}"], rtol=1e-6, atol=0.0)


def test_clipped_sums_add_up(results: tuple[Results, Results, Results]) -> None:
    first, second, alone = results
    for step in STEPS:
        assert close(first[f"sum{step}"] + second[f"sum{step}"], alone[f"sum{step}"])
        assert first[f"units{step}"] + second[f"units{step}"] == alone[f"units{step}"]
    assert (first["units0"], second["units0"]) == (4, 3)


def test_a_rank_without_rows_takes_part_and_adds_nothing(results: tuple[Results, Results, Results]) -> None:
    _, second, _ = results
    assert second["units1"] == 0
    assert not second["sum1"].any()


def test_updates_are_the_same(results: tuple[Results, Results, Results]) -> None:
    first, second, alone = results
    for step in STEPS:
        assert torch.equal(first[f"released{step}"], second[f"released{step}"])
        assert close(first[f"released{step}"], alone[f"released{step}"])
    assert torch.equal(first["weights"], second["weights"])
    assert close(first["weights"], alone["weights"])


def test_the_self_check_runs_through_the_sharded_model(results: tuple[Results, Results, Results]) -> None:
    first, second, alone = results
    assert first["error"] == second["error"]
    assert 0 < first["error"] <= max(2 * alone["error"], 1e-6)
    assert first.get("small", 0) <= 1e-6


def test_a_run_without_privacy_sums_the_same(results: tuple[Results, Results, Results]) -> None:
    first, second, alone = results
    assert close(first["unclipped"] + second["unclipped"], alone["unclipped"])


def test_after_a_pass_that_failed_the_next_is_right(results: tuple[Results, Results, Results]) -> None:
    first, second, alone = results
    assert close(first["again"] + second["again"], alone["again"])


def test_held_out_loss_with_unequal_and_empty_shares(results: tuple[Results, Results, Results]) -> None:
    first, second, alone = results
    for when in ("before", "after"):
        assert first[when] == second[when]
        assert first[when] == pytest.approx(alone[when], rel=1e-6)


def test_generation(results: tuple[Results, Results, Results]) -> None:
    first, second, alone = results
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
    from peft import PeftModel

    base = tm.recipe(model={"name_or_path": str(folder / ("llama" if name == "plain" else "gpt2"))}).model
    tuned = PeftModel.from_pretrained(model.load_base(base, tm.CPU), str(folder / f"{name}2" / "export")).eval()
    prompt = torch.tensor([[5, 9, 20]])
    tokens = tuned.generate(
        input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=6, do_sample=False, eos_token_id=None
    )
    assert torch.equal(tokens, runs[0][name]["tokens"])


def test_ranks_with_different_weights_are_refused(runs: tuple[Results, Results, Results]) -> None:
    first, second, _ = runs
    for rank in (first, second):
        assert "weights" in rank["refusals"]["different"]
        assert "process 1" in rank["refusals"]["different"]


def test_a_model_that_uses_weights_outside_their_layer_is_refused(runs: tuple[Results, Results, Results]) -> None:
    first, second, _ = runs
    assert "outside the layer" in first["refusals"]["outside"]
    assert first["refusals"] == second["refusals"]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The environment that gpu_fsdp2.yaml makes, and several processes, without starting them."""
    file = str(ROOT / "recipes" / "accelerate" / "gpu_fsdp2.yaml")
    words = launch_command_parser().parse_args(["--config_file", file, "recipes/train.py"])
    arguments, _, _ = _validate_launch_command(words)
    for key, value in prepare_multi_gpu_env(arguments).items():
        if key.startswith(("FSDP_", "ACCELERATE_")):
            monkeypatch.setenv(key, value)
    monkeypatch.setattr(ranks, "several", lambda: True)
    return monkeypatch


def lora(**sections: Any) -> RunConfig:
    return tm.recipe(**{"adapter": tm.LORA, **sections})


def test_the_launch_file_asks_for_what_is_held(launched: pytest.MonkeyPatch) -> None:
    assert sharding.requested()
    sharding.check(lora())


def test_nothing_is_sharded_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ACCELERATE_USE_FSDP", raising=False)
    assert not sharding.requested()
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "false")
    assert not sharding.requested()


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"adapter": tm.FROZEN}, "adapter.method frozen"),
        ({"model": {"quantization": "4bit"}}, "quantization"),
        ({"privacy": {"grad_sample_mode": "opacus_ghost"}}, "opacus_ghost"),
    ],
)
def test_recipes_that_cannot_be_sharded_are_refused_before_anything_is_loaded(
    launched: pytest.MonkeyPatch, sections: dict[str, Any], words: str
) -> None:
    def load(*_: Any, **__: Any) -> None:
        raise AssertionError("something was loaded")

    launched.setattr(model, "load_base", load)
    with pytest.raises(Refused, match=words):
        model.build(lora(**sections), tm.CPU)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("FSDP_VERSION", "1", "fsdp_version"),
        ("FSDP_OFFLOAD_PARAMS", "true", "fsdp_offload_params"),
        ("FSDP_RESHARD_AFTER_FORWARD", "false", "fsdp_reshard_after_forward"),
        ("FSDP_ACTIVATION_CHECKPOINTING", "true", "gradient_checkpointing: true"),
        ("FSDP_AUTO_WRAP_POLICY", "SIZE_BASED_WRAP", "decoder block"),
        ("FSDP_AUTO_WRAP_POLICY", "NO_WRAP", "decoder block"),
        ("FSDP_IGNORED_MODULES", "lm_head", "fsdp_ignored_modules"),
        ("ACCELERATE_USE_PARALLELISM_CONFIG", "true", "use_parallelism_config"),
    ],
)
def test_wishes_of_the_launch_file_that_cannot_be_held_are_refused(
    launched: pytest.MonkeyPatch, key: str, value: str, words: str
) -> None:
    launched.setenv(key, value)
    with pytest.raises(Refused, match=words):
        sharding.check(lora())


def test_a_launch_file_that_accelerate_cannot_read_is_an_error(launched: pytest.MonkeyPatch) -> None:
    launched.setenv("FSDP_RESHARD_AFTER_FORWARD", "FULL_SHARD")
    with pytest.raises(ConfigError, match="fsdp_config"):
        sharding.check(lora())


def test_one_process_has_nobody_to_share_with(launched: pytest.MonkeyPatch) -> None:
    launched.setattr(ranks, "several", lambda: False)
    with pytest.raises(ConfigError, match="one process"):
        sharding.check(lora())


def test_another_layer_class_is_refused(launched: pytest.MonkeyPatch) -> None:
    net = tm.build("llama")
    launched.setenv("FSDP_TRANSFORMER_CLS_TO_WRAP", "GPT2Block")
    with pytest.raises(Refused, match="LlamaDecoderLayer"):
        sharding.shard(net, model.blocks(net)[0], tm.CPU)


def test_blocks_that_share_weights_are_refused(launched: pytest.MonkeyPatch) -> None:
    net = tm.build("llama", adapter={**tm.LORA, "target_modules": ["q_proj"]})
    layers = model.blocks(net)[1]
    layers[1].mlp.up_proj.weight = layers[0].mlp.up_proj.weight
    with pytest.raises(Refused, match="share weights"):
        sharding.shard(net, model.blocks(net)[0], tm.CPU)


def test_quantised_files_are_refused(launched: pytest.MonkeyPatch) -> None:
    net = tm.build("llama", adapter={**tm.LORA, "target_modules": ["q_proj"]})
    packed = torch.zeros((24, 16), dtype=torch.uint8)
    model.blocks(net)[1][1].mlp.up_proj.weight = torch.nn.Parameter(packed, requires_grad=False)
    with pytest.raises(Refused, match="quantised"):
        sharding.shard(net, model.blocks(net)[0], tm.CPU)


@pytest.mark.parametrize("before", [None, "true", "false"])
def test_the_environment_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch, before: str | None) -> None:
    name = "FSDP_CPU_RAM_EFFICIENT_LOADING"
    monkeypatch.delenv(name, raising=False)
    if before is not None:
        monkeypatch.setenv(name, before)
    with sharding.loading():
        assert os.environ[name] == "false"
    assert os.environ.get(name) == before


@pytest.fixture
def alone(launched: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Nothing that needs other ranks."""
    launched.setattr(sharding, "_place", lambda module, device: 0)
    launched.setattr(sharding, "_shard", lambda module, mesh, whole: None)
    launched.setattr(sharding, "init_device_mesh", lambda *_: None)
    launched.setattr(sharding.distributed, "get_world_size", lambda: 2)
    launched.setattr(ranks, "check_equal", lambda facts: None)
    return launched


@pytest.mark.parametrize("where", ["_place", "_try"])
def test_a_part_that_does_not_fit_is_an_error_that_says_so(alone: pytest.MonkeyPatch, where: str) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError

    alone.setattr(sharding, where, full)
    net = tm.build("llama")
    with pytest.raises(ConfigError, match="do not fit"):
        sharding.shard(net, model.blocks(net)[0], tm.CPU)


def test_one_unit_after_the_other_is_moved_and_cut(alone: pytest.MonkeyPatch) -> None:
    """A device never holds more than one whole unit beside its shards."""
    net = tm.build("llama")
    layers = list(model.blocks(net)[1])
    done: list[tuple[str, Any]] = []
    alone.setattr(sharding, "_place", lambda module, device: done.append(("placed", module)) or 0)
    alone.setattr(sharding, "_shard", lambda module, mesh, whole: done.append(("cut", module)))
    alone.setattr(sharding, "_try", lambda *_: None)
    sharding.shard(net, model.blocks(net)[0], tm.CPU)
    units = [*layers, net.get_input_embeddings(), net.get_output_embeddings(), net]
    assert done == [event for unit in units for event in (("placed", unit), ("cut", unit))]


def test_weights_wait_on_the_cpu_in_the_type_of_their_device(tmp_path: Path) -> None:
    tiny.model("llama").to(torch.bfloat16).save_pretrained(tmp_path)
    base = tm.recipe(model={"name_or_path": str(tmp_path)}).model
    waiting = model.load_base(base, torch.device("meta"), stay_on_cpu=True)
    assert {(p.device.type, p.dtype) for p in waiting.parameters()} == {("cpu", torch.bfloat16)}


def test_every_rank_reads_the_base_itself(launched: pytest.MonkeyPatch) -> None:
    """Under fsdp_cpu_ram_efficient_loading transformers may leave the weights of all ranks but one empty."""
    launched.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "true")
    seen = []

    def load(*_: Any, stay_on_cpu: bool, **__: Any) -> None:
        seen.append((os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"], stay_on_cpu))
        raise KeyboardInterrupt

    launched.setattr(model, "load_base", load)
    with pytest.raises(KeyboardInterrupt):
        model.build(lora(), tm.CPU)
    assert seen == [("false", True)]


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
    sharded = launch.replace("gpu_ids: all\n", "").replace("num_processes: 4", "num_processes: 2")
    whole = sharded[: sharded.index("fsdp_config:")].replace("distributed_type: FSDP", "distributed_type: MULTI_GPU")
    found = []
    for name, text in (("sharded", sharded), ("whole", whole)):
        (tmp_path / f"{name}.yaml").write_text(text)
        launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(tmp_path / f"{name}.yaml")]
        keys = {
            "output_dir": tmp_path / name,
            "privacy.ledger": tmp_path / f"{name}.sqlite",
            "privacy.insecure_seed": 5,
            "train.steps": 2,
            "audit.canaries": "null",  # their coins come from no seed
        }
        overrides = [word for key, value in keys.items() for word in (f"--{key}", str(value))]
        command = [*launcher, "recipes/train.py", "recipes/smoke/clinic.yaml", *overrides]
        done = subprocess.run(
            command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stderr[-2000:]
        found.append(load_file(tmp_path / name / "export" / "adapter_model.safetensors"))
    assert found[0].keys() == found[1].keys()
    for key, tensor in found[0].items():
        torch.testing.assert_close(tensor, found[1][key], rtol=1e-4, atol=1e-6)
