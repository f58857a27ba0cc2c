"""Launch files are what accelerate reads and what their first line types; a run that is not what they ask for is refused."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
import yaml
from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser

from dpllm import launch
from dpllm.config import load_config
from dpllm.errors import ConfigError
from dpllm.launch import Asked, asked_for

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "recipes" / "accelerate").glob("*.yaml"))
PROCESSES = {"cpu.yaml": 1, "cpu_2.yaml": 2, "gpu.yaml": 1, "gpu_ddp.yaml": 4, "two_nodes.yaml": 8}
LAUNCH = [sys.executable, "-m", "accelerate.commands.launch"]


def first_line(path: Path) -> list[str]:
    line = path.read_text(encoding="utf-8").splitlines()[0]
    assert line.startswith("# accelerate launch "), line
    return line.removeprefix("# ").split()


def test_all_files_are_here() -> None:
    assert PROCESSES.keys() <= {path.name for path in FILES}


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
    assert asked_for(words, ROOT) == Asked(
        file.num_processes, file.gpu_ids is not None, file.use_cpu, f"the launch file {typed.config_file}"
    )


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_file_for_gpus_says_so(path: Path) -> None:
    """By gpu_ids, without which it would start gloo processes where there is no GPU."""
    assert (load_config_from_file(str(path)).gpu_ids is not None) == (not path.name.startswith("cpu"))


def test_two_machines_take_rank_and_address_on_the_command_line() -> None:
    typed = launch_command_parser().parse_args(first_line(ROOT / "recipes" / "accelerate" / "two_nodes.yaml")[2:])
    assert (typed.machine_rank, typed.main_process_port) == (0, 29500)
    assert re.fullmatch(r"[\d.]+", typed.main_process_ip)


TYPED = {
    "a program": (["python3", "bin/accelerate", "launch", "--num_processes", "3", "t.py"], 3),
    "without python": (["bin/accelerate", "launch", "--num_processes", "3", "t.py"], 3),
    "its own program": (["bin/accelerate-launch", "--num_processes=3", "t.py"], 3),
    "a module": (["python3", "-u", "-m", "accelerate.commands.launch", "--num_processes", "3", "t.py"], 3),
    "a module's file": (["python3", "lib/accelerate/commands/launch.py", "--num-processes", "3", "t.py"], 3),
    "options of the script": (["accelerate", "launch", "--cpu", "t.py", "--num_processes", "9"], None),
    "nothing about processes": (["accelerate", "launch", "--cpu", "t.py"], None),
}


@pytest.mark.parametrize(("command", "number"), TYPED.values(), ids=TYPED)
def test_the_launcher_is_found_however_it_was_called(
    command: list[str], number: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("accelerate.commands.config.config_args.default_config_file", str(tmp_path / "none.yaml"))
    found = asked_for(command, tmp_path)
    assert found is not None
    assert found.num_processes == number


@pytest.mark.parametrize(
    "command",
    [
        ["python3", "bin/torchrun", "--nproc_per_node", "2", "t.py"],
        ["bash", "-c", "accelerate launch --num_processes 2 t.py"],
        ["accelerate", "config"],
        ["accelerate", "launch", "--no_such_option_of_this_version"],
        ["accelerate", "launch", "--config_file", "gone.yaml", "t.py"],
        ["vim", "accelerate-launch-notes.txt"],
        [],
    ],
)
def test_what_is_no_launch_of_accelerate_or_cannot_be_read_is_no_error(command: list[str], tmp_path: Path) -> None:
    assert asked_for(command, tmp_path) is None


def test_the_command_line_wins_over_the_file_and_a_default_file_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("distributed_type: MULTI_GPU\nnum_processes: 4\n")
    assert asked_for(["accelerate", "launch", "--config_file", "mine.yaml", "t.py"], tmp_path) == Asked(
        4, False, False, "the launch file mine.yaml"
    )
    asked = asked_for(["accelerate", "launch", "--config_file", "mine.yaml", "--num_processes", "2", "t.py"], tmp_path)
    assert asked is not None
    assert asked.num_processes == 2
    monkeypatch.setattr("accelerate.commands.config.config_args.default_config_file", str(file))
    asked = asked_for(["accelerate", "launch", "t.py"], tmp_path)
    assert asked is not None
    assert asked.num_processes == 4


def says(monkeypatch: pytest.MonkeyPatch, asked: Asked | None, gpus: int = 0) -> None:
    monkeypatch.setattr(launch, "started_by", lambda: asked)
    monkeypatch.setattr(launch, "_gpus", lambda: gpus)
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def test_fewer_processes_than_asked_for_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    says(monkeypatch, Asked(4, False, True, "the launch file x.yaml"))
    with pytest.raises(ConfigError, match=r"x\.yaml asks for 4 processes, and 1 was .*cpu_2\.yaml --num_processes 4"):
        launch.check(1)
    launch.check(4)
    says(monkeypatch, Asked(4, True, False, "the command line"), gpus=4)
    with pytest.raises(ConfigError, match=r"gpu_ddp\.yaml --num_processes 4"):
        launch.check(2)


@pytest.mark.parametrize("asked", [None, Asked(None, False, True, "")])
def test_nothing_to_compare_is_no_error(asked: Asked | None, monkeypatch: pytest.MonkeyPatch) -> None:
    says(monkeypatch, asked)
    launch.check(1)
    launch.check_devices()


def test_a_file_for_gpus_does_not_train_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    says(monkeypatch, Asked(4, True, False, "the launch file gpu_ddp.yaml"))
    with pytest.raises(ConfigError, match=r"gpu_ddp\.yaml asks for GPUs.*cpu_2\.yaml"):
        launch.check_devices()
    says(monkeypatch, Asked(4, True, True, ""))  # use_cpu was said, too
    launch.check_devices()
    says(monkeypatch, Asked(4, True, False, ""), gpus=4)
    launch.check_devices()
    says(monkeypatch, Asked(2, False, False, "cpu_2.yaml"))
    launch.check_devices()


@pytest.mark.parametrize(("variable", "value"), [("LOCAL_WORLD_SIZE", "3"), ("LOCAL_RANK", "2")])
def test_every_process_of_a_machine_needs_a_gpu_of_its_own(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    says(monkeypatch, None, gpus=2)
    launch.check_devices()
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match="3 processes were started on a machine that shows 2 GPUs"):
        launch.check_devices()
    monkeypatch.setattr(launch, "_gpus", lambda: 0)  # processes on a CPU share it
    launch.check_devices()


def test_a_parent_that_may_not_be_read_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: psutil.Process) -> list[str]:
        raise psutil.AccessDenied(self.pid)

    monkeypatch.setattr(psutil.Process, "cmdline", refused)
    assert launch.started_by() is None


def test_gpus_are_counted_as_torch_sees_them() -> None:
    assert launch._gpus() == (torch.accelerator.device_count() if torch.accelerator.is_available() else 0)


def launched(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    """A real launch, without any process of another one's variables."""
    kept = {name: value for name, value in os.environ.items() if "RANK" not in name and name != "WORLD_SIZE"}
    environment = {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [*LAUNCH, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)


def test_a_real_launch_that_starts_one_process_for_two_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os\nfrom dpllm import launch\nlaunch.check(int(os.environ.get('WORLD_SIZE', '1')))\n")
    done = launched(["--cpu", "--num_processes", "2", str(script)])
    assert done.returncode != 0
    assert "the command line of accelerate launch asks for 2 processes, and 1 was started" in done.stderr


@pytest.mark.full
@pytest.mark.parametrize("file", ["cpu.yaml", "cpu_2.yaml"])
def test_a_real_launch_that_starts_what_its_file_says_is_not(file: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os\nfrom dpllm import launch\nworld = int(os.environ.get('WORLD_SIZE', '1'))\n"
        "launch.check(world)\nlaunch.check_devices()\nassert launch.started_by().num_processes == world\nprint('went', 'on')\n"
    )
    done = launched(["--config_file", f"recipes/accelerate/{file}", str(script)])
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("went on") == PROCESSES[file]


@pytest.mark.full
@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--cpu", "--num_processes", "2"], "asks for 2 processes, and 1 was started"),
        (["--config_file", "recipes/accelerate/gpu.yaml"], "asks for GPUs, and torch sees none"),
        (["--config_file", "recipes/accelerate/gpu_ddp.yaml"], "asks for GPUs, and torch sees none"),
    ],
)
def test_a_run_that_is_not_what_was_asked_for_makes_nothing(arguments: list[str], words: str, tmp_path: Path) -> None:
    run = ["--output_dir", str(tmp_path / "run"), "--privacy.ledger", str(tmp_path / "ledger.sqlite")]
    done = launched([*arguments, "recipes/train.py", "recipes/smoke/clinic.yaml", *run])
    assert done.returncode != 0
    assert words in " ".join((done.stdout + done.stderr).split())
    assert not list(tmp_path.iterdir())
