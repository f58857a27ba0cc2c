"""Launch files are what accelerate reads; what of a recipe, such a file or a model cannot be sharded; without processes."""

import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import tiny_models as tm
import torch
import yaml
from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env
from programs import LAUNCH, run_program

from dpllm.errors import ConfigError, Refused
from dpllm.model import adapters, loading, processes, sharding
from dpllm.recipe.config import RunConfig, load_config

ROOT = Path(__file__).parents[2]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The environment that gpu_fsdp2.yaml makes, and several processes, without starting them."""
    file = str(ROOT / "recipes" / "accelerate" / "gpu_fsdp2.yaml")
    words = launch_command_parser().parse_args(["--config_file", file, "recipes/train.py"])
    arguments, _, _ = _validate_launch_command(words)
    for key, value in prepare_multi_gpu_env(arguments).items():
        if key.startswith(("FSDP_", "ACCELERATE_")):
            monkeypatch.setenv(key, value)
    monkeypatch.setattr(processes, "several", lambda: True)
    return monkeypatch


def lora(**sections: Any) -> RunConfig:
    return tm.recipe(**{"adapter": tm.LORA, **sections})


def test_nothing_is_sharded_unless_several_processes_are_asked_to(launched: Any, monkeypatch: Any) -> None:
    assert sharding.requested()
    sharding.check(lora())
    launched.setattr(processes, "several", lambda: False)
    with pytest.raises(ConfigError, match="one process"):
        sharding.check(lora())
    monkeypatch.delenv("ACCELERATE_USE_FSDP", raising=False)
    assert not sharding.requested()
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "false")
    assert not sharding.requested()


@pytest.mark.parametrize(
    ("sections", "words"),
    [({"adapter": tm.FROZEN}, "adapter.method frozen"), ({"model": {"quantization": "4bit"}}, "quantization")],
)
def test_recipes_that_cannot_be_sharded_are_refused_before_anything_is_loaded(
    launched: pytest.MonkeyPatch, sections: dict[str, Any], words: str
) -> None:
    def load(*_: Any, **__: Any) -> None:
        raise AssertionError("something was loaded")

    launched.setattr(loading, "load_base", load)
    with pytest.raises(Refused, match=words):
        loading.build(lora(**sections), tm.CPU)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("FSDP_RESHARD_AFTER_FORWARD", "FULL_SHARD", "fsdp_config"),
        ("FSDP_VERSION", "1", "fsdp_version"),
        ("FSDP_OFFLOAD_PARAMS", "true", "fsdp_offload_params"),
        ("FSDP_RESHARD_AFTER_FORWARD", "false", "fsdp_reshard_after_forward"),
        ("FSDP_ACTIVATION_CHECKPOINTING", "true", "gradient_checkpointing: true"),
        ("FSDP_AUTO_WRAP_POLICY", "SIZE_BASED_WRAP", "decoder block"),
        ("FSDP_AUTO_WRAP_POLICY", "NO_WRAP", "decoder block"),
        ("FSDP_TRANSFORMER_CLS_TO_WRAP", "LlamaDecoderLayer", "layer_cls_to_wrap"),
        ("FSDP_IGNORED_MODULES", "lm_head", "fsdp_ignored_modules"),
        ("ACCELERATE_USE_PARALLELISM_CONFIG", "true", "use_parallelism_config"),
    ],
)
def test_wishes_of_the_launch_file_that_cannot_be_held_are_refused(
    launched: pytest.MonkeyPatch, key: str, value: str, words: str
) -> None:
    launched.setenv(key, value)
    with pytest.raises((Refused, ConfigError), match=words):
        sharding.check(lora())


def shared(layers: Any) -> None:
    layers[1].mlp.up_proj.weight = layers[0].mlp.up_proj.weight


def packed(layers: Any) -> None:
    layers[1].mlp.up_proj.weight = torch.nn.Parameter(torch.zeros((24, 16), dtype=torch.uint8), requires_grad=False)


@pytest.mark.usefixtures("launched")
@pytest.mark.parametrize(("change", "words"), [(shared, "share weights"), (packed, "quantised")])
def test_blocks_that_cannot_be_cut_are_refused(change: Any, words: str) -> None:
    net = tm.build("llama", adapter={**tm.LORA, "target_modules": ["q_proj"]})
    name, layers = adapters.blocks(net)
    change(layers)
    with pytest.raises(Refused, match=words):
        sharding.shard(net, name, tm.CPU)


@pytest.fixture
def alone(launched: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Nothing that needs other ranks."""
    launched.setattr(sharding, "_place", lambda module, device: 0)
    launched.setattr(sharding, "fully_shard", lambda module, **_: None)
    launched.setattr(sharding, "init_device_mesh", lambda *_: None)
    launched.setattr(sharding.distributed, "get_world_size", lambda: 2)
    launched.setattr(processes, "check_equal", lambda facts: None)
    return launched


@pytest.mark.parametrize("where", ["_place", "_try"])
def test_a_part_that_does_not_fit_is_an_error_that_says_so(alone: pytest.MonkeyPatch, where: str) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError

    alone.setattr(sharding, where, full)
    net = tm.build("llama")
    with pytest.raises(ConfigError, match="do not fit"):
        sharding.shard(net, adapters.blocks(net)[0], tm.CPU)


def test_one_unit_after_the_other_is_moved_and_cut(alone: pytest.MonkeyPatch) -> None:
    """A device never holds more than one whole unit beside its shards."""
    net = tm.build("llama")
    layers = list(adapters.blocks(net)[1])
    done: list[tuple[str, Any]] = []
    alone.setattr(sharding, "_place", lambda module, device: done.append(("placed", module)) or 0)
    alone.setattr(sharding, "fully_shard", lambda module, **_: done.append(("cut", module)))
    alone.setattr(sharding, "_try", lambda *_: None)
    sharding.shard(net, adapters.blocks(net)[0], tm.CPU)
    units = [*layers, net.get_input_embeddings(), net.get_output_embeddings(), net]
    assert done == [event for unit in units for event in (("placed", unit), ("cut", unit))]


def test_weights_wait_on_the_cpu_in_the_type_of_their_device(tmp_path: Path) -> None:
    tiny.model("llama").to(torch.bfloat16).save_pretrained(tmp_path)
    base = tm.recipe(model={"name_or_path": str(tmp_path)}).model
    waiting = loading.load_base(base, torch.device("meta"), stay_on_cpu=True)
    assert {(p.device.type, p.dtype) for p in waiting.parameters()} == {("cpu", torch.bfloat16)}


def test_every_rank_reads_the_base_itself(launched: pytest.MonkeyPatch) -> None:
    """Under fsdp_cpu_ram_efficient_loading transformers may leave the weights of all ranks but one empty."""
    launched.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "true")
    seen = []

    def load(*_: Any, stay_on_cpu: bool, **__: Any) -> None:
        seen.append((os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"], stay_on_cpu))
        raise KeyboardInterrupt

    launched.setattr(loading, "load_base", load)
    with pytest.raises(KeyboardInterrupt):
        loading.build(lora(), tm.CPU)
    assert seen == [("false", True)]


FILES = sorted((ROOT / "recipes" / "accelerate").glob("*.yaml"))
PROCESSES = {"cpu.yaml": 1, "cpu_2.yaml": 2, "gpu.yaml": 1, "gpu_ddp.yaml": 4, "two_nodes.yaml": 8}


def first_line(path: Path) -> list[str]:
    line = path.read_text(encoding="utf-8").splitlines()[0]
    assert line.startswith("# accelerate launch "), line
    return line.removeprefix("# ").split()


def test_all_files_are_here_and_two_machines_take_rank_and_address_on_the_command_line() -> None:
    assert PROCESSES.keys() <= {path.name for path in FILES}
    typed = launch_command_parser().parse_args(first_line(ROOT / "recipes" / "accelerate" / "two_nodes.yaml")[2:])
    assert (typed.machine_rank, typed.main_process_port) == (0, 29500)
    assert re.fullmatch(r"[\d.]+", typed.main_process_ip)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_accelerate_reads_the_file_and_knows_every_key(path: Path) -> None:
    keys = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert keys.keys() <= ClusterConfig.__dataclass_fields__.keys()
    file = load_config_from_file(str(path))  # raises for a key that it does not know
    assert file.num_processes == keys["num_processes"] == PROCESSES.get(path.name, keys["num_processes"])
    assert file.num_processes % file.num_machines == 0  # accelerate rounds down, and starts fewer


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_first_line_launches_a_recipe_with_this_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    words = first_line(path)
    typed = launch_command_parser().parse_args(words[2:])
    assert Path(typed.config_file) == path.relative_to(ROOT)
    assert typed.training_script == "recipes/train.py"
    load_config(ROOT / typed.training_script_args[0])
    settings, file, _ = _validate_launch_command(typed)  # what accelerate would start
    assert settings.num_processes == file.num_processes


@pytest.mark.parametrize(("variable", "value"), [("LOCAL_WORLD_SIZE", "3"), ("LOCAL_RANK", "2")])
def test_every_process_of_a_machine_needs_a_gpu_of_its_own(variable: str, value: str, monkeypatch: Any) -> None:
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    processes.check_devices()
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match="3 processes were started on a machine that shows 2 GPUs"):
        processes.check_devices()
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")  # as cpu.yaml says; processes on a CPU share it
    processes.check_devices()
    monkeypatch.delenv("ACCELERATE_USE_CPU")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    processes.check_devices()


@pytest.mark.parametrize(
    ("cuda", "other", "use_cpu", "cpu"),
    [
        (True, True, "", False),
        (True, True, "true", True),
        (False, True, "", True),  # an Apple GPU has no float64
        (False, False, "", True),
    ],
)
def test_a_run_is_on_a_cuda_gpu_or_on_the_cpu(
    cuda: bool, other: bool, use_cpu: str, cpu: bool, monkeypatch: Any
) -> None:
    asked: list[bool] = []

    def state(*, cpu: bool, timeout: Any) -> Any:
        asked.append(cpu)
        return SimpleNamespace(num_processes=1)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: int(cuda))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: other)
    monkeypatch.setattr(processes, "PartialState", state)
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("ACCELERATE_USE_CPU", use_cpu or "false")
    processes.join()
    assert asked == [cpu]


@pytest.mark.full
@pytest.mark.parametrize("file", ["cpu.yaml", "cpu_2.yaml"])
def test_a_real_launch_starts_what_its_file_says(file: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os\nfrom dpllm.model import processes as ranks\nranks.join()\nos.write(1, b'went on\\n')\n"
    )
    assert run_program(*LAUNCH, f"recipes/accelerate/{file}", script).count("went on") == PROCESSES[file]
