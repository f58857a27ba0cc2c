"""What an earlier start showed is believed only where nothing that decides how rows round has changed since."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_models as tm
import torch
from rich.console import Console
from tiny_models import LORA, Toy

from dpllm.errors import RoundsByCompany
from dpllm.files import write_json
from dpllm.model import environment, processes, sharding
from dpllm.privacy import selfcheck
from dpllm.privacy.clipping import PerUnitClipper
from dpllm.privacy.schedule import Shape
from dpllm.run import selfcheck_cache
from dpllm.run.mechanism import check_rows

SHAPES = Shape(8, 6), Shape(32, 4)
MORE = {"vocabulary": 64, "pad_id": 0, "precision": "None"}
DIGESTS = {Shape(8, 6): "one", Shape(32, 4): "two"}
KEY = "0" * 64


def key(net: Any = None, shapes: Any = SHAPES, **more: Any) -> str | None:
    config = more.pop("config", tm.recipe())
    return selfcheck_cache.key_of(config, net or tm.build("llama", LORA), shapes, **{**MORE, **more})


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


# --- the key -----------------------------------------------------------------------------------------------------------


def of_model(change: Callable[[Any], object]) -> Callable[[pytest.MonkeyPatch], str | None]:
    def changed(patch: pytest.MonkeyPatch) -> str | None:
        net = tm.build("llama", LORA)
        change(net)
        return key(net)

    return changed


def one_bit(net: Any) -> None:
    weight = next(p for p in net.parameters() if not p.requires_grad)
    weight.data.view(-1).view(torch.int32)[0] ^= 1


def with_switch(owner: Any, name: str, value: Any) -> Callable[[pytest.MonkeyPatch], str | None]:
    return lambda patch: (patch.setattr(owner, name, value), key())[1]


def with_variable(name: str) -> Callable[[pytest.MonkeyPatch], str | None]:
    return lambda patch: (patch.setenv(name, "7"), key())[1]


def with_threads(patch: pytest.MonkeyPatch) -> str | None:
    torch.set_num_threads(torch.get_num_threads() + 1)
    return key()


def deterministic(patch: pytest.MonkeyPatch) -> str | None:
    torch.use_deterministic_algorithms(True)
    try:
        return key()
    finally:
        torch.use_deterministic_algorithms(False)


CHANGES: dict[str, Callable[[pytest.MonkeyPatch], str | None]] = {
    "a bit of a frozen weight": of_model(one_bit),
    "configuration": of_model(lambda net: net.config.__dict__.update(rope_scaling_note=1)),
    "what trains": of_model(lambda net: next(net.parameters()).requires_grad_(True)),
    "attention": of_model(lambda net: setattr(net.config, "_attn_implementation", "eager")),
    "checkpointing": lambda _: key(tm.build("llama", LORA, checkpointing="other")),
    "mode": of_model(lambda net: net.eval()),
    "dtype": of_model(lambda net: net.to(torch.bfloat16)),
    "layout": of_model(lambda net: setattr((p := next(net.parameters())), "data", p.data.t().contiguous().t())),
    "a layer": of_model(lambda net: net.add_module("more", torch.nn.Identity())),
    "rank": lambda _: key(config=tm.recipe(adapter={"method": "lora", "r": 3})),
    "clipping": lambda _: key(config=tm.recipe(privacy={"clipping": "automatic"})),
    "longest row": lambda _: key(config=tm.recipe(data={"max_length": 31})),
    "autocast": lambda _: key(precision="torch.bfloat16"),
    "rows": lambda _: key(shapes=(Shape(8, 6), Shape(32, 5))),
    "lengths": lambda _: key(shapes=(Shape(16, 6), Shape(32, 4))),
    "padding": lambda _: key(pad_id=1),
    "vocabulary": lambda _: key(vocabulary=63),
    "dpllm": with_switch(selfcheck_cache, "_dpllm", lambda: "another"),
    "versions": with_switch(environment, "versions", lambda: {"torch": "0"}),
    "build of torch": with_switch(torch.__config__, "show", lambda: "another BLAS"),
    "instruction set": with_switch(torch.backends.cpu, "get_cpu_capability", lambda: "AVX9"),
    "processor": with_switch(selfcheck_cache, "_processor", lambda: "another"),
    "variable of a kernel": with_variable("MKL_CBWR"),
    "variable of threads": with_variable("OMP_SCHEDULE"),
    "variable of the loader": with_variable("LD_PRELOAD_64"),
    "packages of kernels": with_switch(selfcheck_cache, "_kernel_packages", lambda: ["nvidia-cublas 13"]),
    "threads": with_threads,
    "number of processes": with_variable("WORLD_SIZE"),
    "oneDNN": with_switch(torch.backends.mkldnn, "enabled", False),
    "deterministic": deterministic,
}


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("name", CHANGES)
def test_another_key_where_anything_differs_that_rounding_may_depend_on(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = key()
    assert before is not None
    assert before == key()
    after = CHANGES[name](monkeypatch)
    assert after is not None
    assert after != before


def test_the_source_of_a_models_class_is_part_of_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before, hashed = key(), selfcheck_cache.sha256
    monkeypatch.setattr(selfcheck_cache, "sha256", lambda path: path.name == "modeling_llama.py" or hashed(path))
    assert key() != before


class Elsewhere(torch.nn.Linear):
    """Somebody's own layer."""


def replaced(net: Any) -> None:
    layer = net.base_model.model.model.norm
    layer.forward = type(layer).forward.__get__(layer)


FOREIGN: dict[str, Callable[[Any], object]] = {
    "a class": lambda net: net.add_module("own", Elsewhere(2, 2)),
    "a hook": lambda net: net.register_forward_hook(lambda *_: None),
    "a hook before": lambda net: net.base_model.register_forward_pre_hook(lambda *_: None),
    "a hook on gradients": lambda net: net.register_full_backward_hook(lambda *_: None),
    "a forward": replaced,
    "an attention": lambda net: setattr(net.config, "_attn_implementation", "somebody/kernels"),
}


@pytest.mark.parametrize("what", FOREIGN)
def test_code_from_elsewhere_has_no_key(what: str) -> None:
    net = tm.build("llama", LORA)
    FOREIGN[what](net)
    assert key(net) is None


def test_a_method_put_on_a_class_has_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = type(tm.build("llama", LORA).base_model.model.model.norm)
    before = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, x: before(self, x))
    assert key() is None


def test_a_wrapper_that_carries_the_name_of_what_it_wraps_has_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    from functools import wraps

    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from transformers.models.llama import modeling_llama

    def wrapped(inner: Any) -> Any:
        return wraps(inner)(lambda *some, **named: inner(*some, **named))

    kind = type(tm.build("llama", LORA).base_model.model.model.norm)
    for owner, name in ((kind, "forward"), (modeling_llama, "apply_rotary_pos_emb")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, wrapped(getattr(owner, name)))
            assert key() is None
    with monkeypatch.context() as patch:
        patch.setitem(ALL_ATTENTION_FUNCTIONS, "sdpa", wrapped(ALL_ATTENTION_FUNCTIONS["sdpa"]))
        assert key() is None
    assert key() is not None


def test_toys_and_sharded_models_have_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    assert key(Toy()) is None
    monkeypatch.setattr(sharding, "requested", lambda: True)
    assert key() is None


# --- what is kept ------------------------------------------------------------------------------------------------------


def kept() -> Path:
    selfcheck_cache.keep(KEY, DIGESTS)
    return selfcheck_cache.folder() / f"{KEY}.json"


def test_a_pass_is_kept_for_its_owner_alone() -> None:
    path = kept()
    assert selfcheck_cache.read(KEY) == DIGESTS
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert selfcheck_cache.read("1" * 64) is None
    assert selfcheck_cache.read(None) is None
    selfcheck_cache.keep(None, DIGESTS)
    assert os.listdir(path.parent) == [path.name]


def linked(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut short": lambda path: path.write_text(path.read_text()[:40]),
    "empty": lambda path: path.write_text(""),
    "no text": lambda path: path.write_bytes(b"\xff\xfe\x00"),
    "a list": lambda path: path.write_text("[1]"),
    "deep": lambda path: path.write_text("[" * 100_000),
    "another key": lambda path: write_json(path, {"key": "1" * 64, "digests": {"6 x 8": "one"}}, mode=0o600),
    "no digests": lambda path: write_json(path, {"key": KEY, "digests": {}}, mode=0o600),
    "numbers": lambda path: write_json(path, {"key": KEY, "digests": {"6 x 8": 1}}, mode=0o600),
    "no shape": lambda path: write_json(path, {"key": KEY, "digests": {"6 by 8": "one"}}, mode=0o600),
    "no rows": lambda path: write_json(path, {"key": KEY, "digests": {"0 x 8": "one"}}, mode=0o600),
    "writable by others": lambda path: path.chmod(0o666),
    "readable by others": lambda path: path.chmod(0o644),
    "in a folder of all": lambda path: path.parent.chmod(0o777),
    "a link": linked,
    "a pipe": a_pipe,
    "a directory": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_damaged_or_could_be_somebody_elses_is_not_there(damage: str) -> None:
    DAMAGES[damage](kept())
    assert selfcheck_cache.read(KEY) is None


def test_what_another_user_wrote_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    kept()
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    assert selfcheck_cache.read(KEY) is None


def test_a_folder_of_others_is_not_written_to() -> None:
    selfcheck_cache.folder().mkdir(parents=True)
    selfcheck_cache.folder().chmod(0o777)
    selfcheck_cache.keep(KEY, DIGESTS)
    assert not list(selfcheck_cache.folder().iterdir())


def test_a_full_disk_costs_a_check_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(selfcheck_cache, "write_json", full)
    selfcheck_cache.keep(KEY, DIGESTS)
    assert selfcheck_cache.read(KEY) is None


# --- the check ---------------------------------------------------------------------------------------------------------


def start(net: Any, *, fresh: bool = False, rows: int = 6) -> tuple[tuple[Shape, ...], Any, int]:
    """One start: the shapes, what was found, and how many batches were run in them."""
    engine, counted = tm.make_engine(net), []
    add = PerUnitClipper.add

    def counting(self: Any, losses: Any, batch: Any, *rest: Any) -> Any:
        counted.append(batch)
        return add(self, losses, batch, *rest)

    def shapes(rows: int) -> tuple[Shape, ...]:
        return Shape(8, rows), Shape(32, min(4, rows))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PerUnitClipper, "add", counting)
        found = check_rows(
            engine,
            tm.VOCABULARY,
            shapes,
            rows,
            pad_id=0,
            kept=selfcheck_cache.Kept(lambda some: key(net, some), fresh),
            console=Console(quiet=True),
        )
    return *found, len(counted) - 1  # one compares with brute-force autograd


def test_the_second_start_runs_one_batch_and_compares_with_autograd_again() -> None:
    shapes, whole, passes = start(tm.build("llama", LORA))
    assert (whole.known, passes) == (False, 6)
    assert list(whole.digests) == [*SHAPES] == [*shapes]
    again, cached, passes = start(tm.build("llama", LORA))
    assert (again, cached.known, passes) == (shapes, True, 1)
    assert cached.digests == whole.digests
    assert 0 < cached.error < 1e-4
    assert start(tm.build("llama", LORA), fresh=True)[1:] == (whole, 6)


def test_other_bits_run_the_whole_check() -> None:
    net = tm.build("llama", LORA)
    _, whole, _ = start(net)
    selfcheck_cache.keep(key(net), {**whole.digests, Shape(8, 6): "0" * 32})
    _, found, passes = start(net)
    assert (found.known, passes, found.digests) == (False, 6, whole.digests)


def rounds_in(monkeypatch: pytest.MonkeyPatch, least: dict[int, int]) -> None:
    """Kernels that round by company in batches of at least so many rows of a length."""
    inner = selfcheck._check_company

    def company(subject: Any, run: Any, *some: Any) -> None:
        if run.args[2].rows >= least.get(run.args[2].length, 99):
            raise RoundsByCompany("a kernel rounds a row differently, so that one unit would change the others")
        inner(subject, run, *some)

    monkeypatch.setattr(selfcheck, "_check_company", company)


@pytest.mark.parametrize(
    ("least", "rows"), [({8: 2, 32: 2}, [1, 1]), ({32: 4}, [6, 2]), ({8: 5}, [4, 4]), ({8: 3, 32: 3}, [2, 2])]
)
def test_a_kernel_that_rounds_by_company_gets_fewer_rows_at_that_length(
    least: dict[int, int], rows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is kept is the pass with fewer rows; it is found again under the rows that were asked for."""
    rounds_in(monkeypatch, least)
    for known in (False, True):
        shapes, found, passes = start(tm.build("llama", LORA))
        assert [shape.rows for shape in shapes] == rows
        assert found.known is known
        assert passes == 1 or not known
    assert [*selfcheck_cache.read(key(tm.build("llama", LORA)))] == [*shapes]


def test_ranks_whose_verdicts_differ_check_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of another machine may come from a run with other partners, which had fewer rows."""
    net = tm.build("llama", LORA)
    _, whole, _ = start(net)
    others = {Shape(8, 6): whole.digests[Shape(8, 6)], Shape(32, 1): "0" * 32}
    monkeypatch.setattr(processes, "shared", lambda mine: others)  # rank 0's, seen from rank 1
    shapes, found, passes = start(net)
    assert (shapes, found.known, passes) == (SHAPES, False, 6)


def test_a_rank_without_a_verdict_takes_part_in_what_the_others_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broadcast that one rank leaves out is a run that hangs."""
    asked: list[Any] = []
    monkeypatch.setattr(processes, "shared", lambda mine: asked.append(mine) or mine)
    start(tm.build("llama", LORA))
    start(tm.build("llama", LORA))
    assert [bool(mine) for mine in asked] == [False, True]


def test_another_ranks_refusal_ends_what_this_one_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    net = tm.build("llama", LORA)
    start(net)
    places = iter([1, 2])
    monkeypatch.setattr(processes, "least", lambda mine: min(mine, next(places)))  # the other rank's second shape
    shapes, found, _ = start(net)
    assert shapes == (Shape(8, 6), Shape(32, 2))
    assert [*found.digests] == [*shapes]
    assert not found.known


def test_experts_are_computed_one_by_one() -> None:
    shapes, _, _ = start(tm.build("mixtral", {**LORA, "target_modules": ["q_proj"]}))
    assert [shape.rows for shape in shapes] == [1, 1]


def test_a_refusal_ends_what_is_known_of_other_shapes() -> None:
    """Experts have one row; a verdict that names more of them shows nothing of that one, though its first batch agrees."""
    net = tm.build("mixtral", {**LORA, "target_modules": ["q_proj"]})
    _, whole, _ = start(net)
    selfcheck_cache.keep(key(net), {Shape(8, 1): whole.digests[Shape(8, 1)], Shape(32, 4): "0" * 32})
    shapes, found, _ = start(net)
    assert [shape.rows for shape in shapes] == [1, 1]
    assert (found.known, found.digests) == (False, whole.digests)


def test_a_wrong_engine_is_found_though_a_verdict_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    from dpllm.errors import Refused

    start(tm.build("llama", LORA))
    inner = selfcheck._brute_force
    monkeypatch.setattr(selfcheck, "_brute_force", lambda *some: (inner(*some)[0] * 1.01, *inner(*some)[1:]))
    with pytest.raises(Refused, match="norms are off"):
        start(tm.build("llama", LORA))
