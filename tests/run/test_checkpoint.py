"""A checkpoint is whole or refused, the one before it is kept, neither holds randomness; nor do released projections get lost."""

import hashlib
import io
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dpllm.errors import ConfigError, Refused
from dpllm.files import read_json
from dpllm.run import checkpoint
from dpllm.run.checkpoint import State, load_resume, newest, save_resume, weight_hashes
from dpllm.run.directory import RunDir
from dpllm.run.projections import KeptGroups, Projections, read_projections, read_weights

HEAD = {"hash": "ab" * 32, "count": 3}
FILES = ["optimizer.pt", "state.json", "trainable.safetensors"]


def pair(seed: int, *, names: tuple[str, ...] = ("a", "b")) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    net = nn.ModuleDict({name: nn.Linear(3, 3) for name in names})
    net["a"].bias.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=0.1)
    for parameter in net.parameters():
        parameter.grad = torch.randn_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    return net, optimizer


def save(run: RunDir, seed: int, step: int, **changes: Any) -> None:
    arguments = {"entry": "entry-1", "head": HEAD} | changes
    save_resume(run, *pair(seed), State(step, **arguments))


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Checkpoints of steps 6 and 7, from weights of seeds 1 and 3."""
    run = RunDir(tmp_path / "run")
    run.make()
    save(run, 1, 6)
    save(run, 3, 7)
    return run


def weights(net: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in net.state_dict().items()}


def is_of(net: nn.Module, seed: int) -> bool:
    state, expected = net.state_dict(), pair(seed)[0].state_dict()
    return all(torch.equal(value, state[name]) for name, value in expected.items() if name != "a.bias")


def test_what_is_saved_comes_back(run: RunDir) -> None:
    saved, moments = pair(3)
    net, optimizer = pair(2)
    frozen = net["a"].bias.clone()
    load_resume(run, net, optimizer)
    place, state = newest(run)
    assert (place, state.step, state.entry, state.head) == (run.checkpoints()[0], 7, "entry-1", HEAD)
    for (name, old), new in zip(saved.named_parameters(), net.parameters(), strict=True):
        assert torch.equal(old, new) == (name != "a.bias")
    assert torch.equal(net["a"].bias, frozen)
    assert repr(optimizer.state_dict()) == repr(moments.state_dict())


def damage(path: Path, how: str) -> None:
    content = path.read_bytes()
    if how == "removed":
        path.unlink()
    else:
        flipped = content[:-1] + bytes([content[-1] ^ 1])
        path.write_bytes({"truncated": content[:-10], "edited": flipped, "empty": b"", "longer": content + b" "}[how])


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("how", ["truncated", "edited", "removed", "empty", "longer"])
def test_a_damaged_checkpoint_is_refused_and_the_one_before_it_is_used(run: RunDir, name: str, how: str) -> None:
    last, before = run.checkpoints()
    damage(last / name, how)
    net, optimizer = pair(2)
    load_resume(run, net, optimizer)
    assert (newest(run)[1].step, is_of(net, 1)) == (6, True)
    damage(before / name, how)
    untouched = weights(net)
    with pytest.raises(Refused, match=r"truncated or was edited.*--overwrite"):
        load_resume(run, net, optimizer)
    assert all(torch.equal(value, untouched[key]) for key, value in net.state_dict().items())


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = RunDir(tmp_path_factory.mktemp("whole") / "run")
    run.make()
    save(run, 1, 6)
    assert checkpoint._intact(run.checkpoints()[0]) is not None
    return run.checkpoints()[0]


@settings(max_examples=300, deadline=None, derandomize=True)
@given(name=st.sampled_from(FILES), where=st.floats(0, 1, exclude_max=True), change=st.integers(1, 255))
def test_every_byte_of_every_file_counts(whole: Path, name: str, where: float, change: int) -> None:
    path = whole / name
    content = path.read_bytes()
    place = int(where * len(content))
    path.write_bytes(content[:place] + bytes([content[place] ^ change]) + content[place + 1 :])
    try:
        assert checkpoint._intact(whole) is None
    finally:
        path.write_bytes(content)


@pytest.mark.parametrize("text", ["[]", "7", "{}", '{"digest": 1, "files": 2}', "[" * 100_000, "\ud800"])
def test_a_state_that_is_no_state_is_damaged(run: RunDir, text: str) -> None:
    for place in run.checkpoints():
        (place / "state.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(Refused, match="truncated or was edited"):
        load_resume(run, *pair(2))


def test_without_a_checkpoint_or_with_one_of_other_layers_there_is_nothing_to_load(run: RunDir, tmp_path: Path) -> None:
    with pytest.raises(Refused, match="trains other layers than the recipe"):
        load_resume(run, *pair(2, names=("a", "c")))
    with pytest.raises(ConfigError, match="holds no checkpoint"):
        load_resume(RunDir(tmp_path), *pair(2))


def test_a_checkpoint_holds_no_seed_and_no_generator_state(run: RunDir) -> None:
    for place in run.checkpoints():
        assert sorted(path.name for path in place.iterdir()) == FILES
        fields = {"schema_version", "step", "entry", "head", "lost", "files", "units", "groups", "digest"}
        assert set(read_json(place / "state.json")) == fields
        moments = torch.load(place / "optimizer.pt", weights_only=True)
        assert set(moments) == {"state", "param_groups"}
        assert {key for state in moments["state"].values() for key in state} == {"step", "exp_avg", "exp_avg_sq"}


def test_two_generations_are_kept(run: RunDir) -> None:
    save(run, 4, 9, entry=None, head=None, lost=2)
    assert [path.name for path in run.checkpoints()] == ["step-00000009", "step-00000007"]
    assert sorted(path.name for path in run.resume.iterdir()) == ["step-00000007", "step-00000009"]
    assert [path.name for path in run.private.iterdir()] == ["resume"]
    assert (newest(run)[1].step, newest(run)[1].lost) == (9, 2)


def test_the_generation_that_is_kept_is_an_intact_one(run: RunDir) -> None:
    """Else a second damage would leave nothing, although two checkpoints lie there."""
    damage(run.checkpoints()[0] / "state.json", "truncated")
    save(run, 4, 8)
    assert [path.name for path in run.checkpoints()] == ["step-00000008", "step-00000006"]


def test_a_damaged_checkpoint_of_the_same_step_is_replaced(run: RunDir) -> None:
    damage(run.checkpoints()[0] / "optimizer.pt", "empty")
    (run.checkpoints()[0] / "stray").write_text("x")
    save(run, 4, 7)
    net, optimizer = pair(2)
    load_resume(run, net, optimizer)
    assert (newest(run)[1].step, is_of(net, 4)) == (7, True)
    assert sorted(path.name for path in run.checkpoints()[0].iterdir()) == FILES
    assert [path.name for path in run.checkpoints()] == ["step-00000007", "step-00000006"]
    assert [path.name for path in run.private.iterdir()] == ["resume"]


def test_steps_are_ordered_as_numbers(run: RunDir) -> None:
    (run.checkpoints()[0]).rename(run.resume / "step-100000000")
    assert [path.name for path in run.checkpoints()] == ["step-100000000", "step-00000006"]


def test_what_a_killed_process_left_is_never_loaded_and_goes_at_the_next_save(run: RunDir) -> None:
    shutil.copytree(run.checkpoints()[0], run.private / ".resume.4711")
    shutil.copytree(run.checkpoints()[0], run.resume / "step-00000099.tmp")
    (run.resume / "step-00000098").write_text("no directory")
    for place in run.checkpoints():
        shutil.rmtree(place)
    assert run.checkpoints() == []
    with pytest.raises(ConfigError, match="holds no checkpoint"):
        load_resume(run, *pair(2))
    save(run, 4, 8)
    assert [path.name for path in run.private.iterdir()] == ["resume"]
    assert [path.name for path in run.checkpoints()] == ["step-00000008"]


def test_a_save_that_dies_anywhere_leaves_the_former_checkpoint(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each call that writes fails in turn; whichever it is, the newest whole checkpoint loads."""
    calls = [(safetensors.torch, "save_file"), (torch, "save"), (os, "fsync"), (os, "replace"), (shutil, "rmtree")]
    died = 0
    for module, name in calls:
        real = getattr(module, name)
        for survived in range(9):
            seen: list[int] = []

            def fail(*arguments: Any, real: Any = real, seen: Any = seen, most: int = survived, **more: Any) -> Any:
                seen.append(1)
                if len(seen) > most:
                    raise KeyboardInterrupt
                return real(*arguments, **more)

            monkeypatch.setattr(module, name, fail)
            try:
                save(run, 4, 8)
            except KeyboardInterrupt:
                died += 1
            monkeypatch.setattr(module, name, real)
            net, optimizer = pair(2)
            load_resume(run, net, optimizer)
            place, state = newest(run)
            assert place == run.checkpoints()[0]
            assert is_of(net, {7: 3, 8: 4}[state.step])
            shutil.rmtree(run.private)
            run.make()
            save(run, 1, 6)
            save(run, 3, 7)
    assert died == 9  # one weight file, one of moments, five flushes, one rename, one removal


def test_everything_is_flushed_before_it_has_its_name_and_the_name_after(run: RunDir, monkeypatch: Any) -> None:
    happened: list[str] = []
    fsync, replace = os.fsync, os.replace

    def flush(number: int) -> None:
        kind = "directory" if stat.S_ISDIR(os.fstat(number).st_mode) else "file"
        happened.append(f"{kind} {Path(os.readlink(f'/proc/self/fd/{number}')).name.partition('.resume.')[0] or 'new'}")
        fsync(number)

    def rename(old: Path, new: Path) -> None:
        happened.append(f"rename {Path(new).name}")
        replace(old, new)

    monkeypatch.setattr(os, "fsync", flush)
    monkeypatch.setattr(os, "replace", rename)
    save(run, 4, 8)
    assert sorted(happened[:3]) == [f"file {name}" for name in FILES]
    assert happened[3:] == ["directory new", "rename step-00000008", "directory resume"]


def test_weight_hashes_are_of_the_weight_files_and_the_settings_that_apply_them(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    assert weight_hashes(tmp_path) == {}, "settings without weights"
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in ((1, b"weights"), (2, b"{}"))}
    assert weight_hashes(tmp_path) == {"model.safetensors": digests[1], "config.json": digests[2]}


def test_steps_are_kept_and_a_resumed_run_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "gradient_canaries.npy"
    first = Projections(path, 5, 4)
    first.write(1, np.arange(4.0))
    first.write(2, np.arange(4.0) + 1)
    resumed = Projections(path, 5, 4)
    resumed.write(4, np.arange(4.0) + 2)
    projection_TM = read_projections(path)
    assert projection_TM.shape == (5, 4)
    np.testing.assert_array_equal(projection_TM[[0, 1, 3]], [[0, 1, 2, 3], [1, 2, 3, 4], [2, 3, 4, 5]])
    assert np.isnan(projection_TM[[2, 4]]).all()


def npy(values: np.ndarray) -> bytes:
    content = io.BytesIO()
    np.save(content, values)
    return content.getvalue()


def go_on(path: Path) -> Projections:
    return Projections(path, 5, 4)


@pytest.mark.parametrize(
    ("read", "content"),
    [
        pytest.param(read_projections, None, id="steps: missing"),
        pytest.param(read_projections, b"", id="steps: empty"),
        pytest.param(read_projections, b"no array", id="steps: no array"),
        pytest.param(go_on, b"abc", id="go_on: no array"),  # such a row would fail after its step was charged
        pytest.param(go_on, npy(np.zeros((5, 3), np.float32)), id="go_on: fewer canaries"),
        pytest.param(go_on, npy(np.zeros((4, 4), np.float32)), id="go_on: fewer steps"),
        pytest.param(go_on, npy(np.zeros(4, np.float32)), id="go_on: one dimension"),
        pytest.param(go_on, npy(np.zeros((5, 4))), id="go_on: float64"),
        pytest.param(read_weights, npy(np.full((2, 4), np.nan)), id="weights: nan"),
        pytest.param(read_weights, npy(np.zeros((2, 4), np.float32)), id="weights: float32"),
        pytest.param(read_weights, npy(np.zeros((3, 4))), id="weights: three rows"),
    ],
)
def test_a_missing_damaged_or_foreign_file_is_refused(tmp_path: Path, read: Any, content: bytes | None) -> None:
    path = tmp_path / "canaries.npy"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"canaries\.npy: .*missing or damaged"):
        read(path)


def test_turns_are_read_without_torch(tmp_path: Path) -> None:
    """``dpllm verify`` does, of a run with banded noise."""
    path = tmp_path / "groups.json"
    KeptGroups(3, 2**200 + 1, 50, (0, 7)).write(path)
    code = """
import sys
from pathlib import Path
from dpllm.run.projections import read_turns
turns = read_turns(Path(sys.argv[1]), (0.8, 0.4, 0.2), 40)
assert len(turns.group_M) == 40 and set(turns.group_M) == {0, 1, 2} and turns.starts == (0, 7)
assert "torch" not in sys.modules
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code, str(path)], check=True, env=env)
