"""Launch files are what accelerate reads and what their first line types; each process needs a GPU of its own."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from programs import LAUNCH, run_program

from dpllm.errors import ConfigError
from dpllm.model import processes
from dpllm.recipe.config import load_config

ROOT = Path(__file__).parents[2]
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
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    processes.check_devices()
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match="3 processes were started on a machine that shows 2 GPUs"):
        processes.check_devices()
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)  # processes on a CPU share it
    processes.check_devices()


@pytest.mark.full
@pytest.mark.parametrize("file", ["cpu.yaml", "cpu_2.yaml"])
def test_a_real_launch_starts_what_its_file_says(file: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os\nfrom dpllm.model import processes as ranks\nranks.join()\nos.write(1, b'went on\\n')\n"
    )
    assert run_program(*LAUNCH, f"recipes/accelerate/{file}", script).count("went on") == PROCESSES[file]
