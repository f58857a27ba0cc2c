"""What a run says and writes: a bar, lines in a log, samples; and no private figure where somebody keeps or publishes it."""

import contextlib
import io
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import tiny_models as tm
import torch
from rich.console import Console
from tiny_models import recipe
from torch import nn

from dpllm.errors import ConfigError, DataError
from dpllm.privacy.engine import STEP
from dpllm.progress import heard_by, tell
from dpllm.recipe.config import RunConfig
from dpllm.run import screen
from dpllm.run.directory import RunDir
from dpllm.run.promise import Decision
from dpllm.run.record import INTERRUPTED, grown, may_publish_cost, may_publish_figures, may_publish_weights
from dpllm.run.screen import TOKENS, Samples
from dpllm.text.data import load_table


def test_a_terminal_whose_output_is_kept_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """wandb's callback records the console, and a usual Tee says that it is the terminal it writes to."""
    terminal = Terminal()
    monkeypatch.setattr(screen.sys, "__stdout__", terminal)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    assert screen.only_seen(Console(file=terminal))
    assert not screen.only_seen(Console(file=Terminal()))  # another stream, say a Tee
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=object()))
    assert not screen.only_seen(Console(file=terminal))
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=None))
    terminal.write = print  # type: ignore[method-assign, assignment]
    assert not screen.only_seen(Console(file=terminal))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def said(monkeypatch, file, *, public, pace=1.0) -> str:
    """What is said of 300 steps of ``pace`` seconds and 100 tokens each."""
    now = [1000.0]
    monkeypatch.setattr(screen.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(screen.sys, "__stdout__", file)
    console = Console(file=file, width=80)
    with screen.Screen(console, public=public) as shown:
        shown.begin_steps(300, 0)
        for step in range(1, 301):
            shown.step(step, "epsilon <= 3.21 of 8.00", 100, 1.23456)
            now[0] += pace
    return file.getvalue()


@pytest.mark.parametrize("force", [None, "1"])
def test_a_log_gets_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch, force: str | None) -> None:
    if force:
        monkeypatch.setenv("FORCE_COLOR", force)
    lines = said(monkeypatch, io.StringIO(), public=True).splitlines()
    assert not any("loss" in line for line in lines)  # also of public rows: it carries no noise
    assert len(lines) == 20  # every fifteenth of 300 steps
    assert all(line.isprintable() for line in lines)
    assert lines[1].startswith("step 30 of 300, epsilon <= 3.21 of 8.00, 0:04:30 left, 100 tokens/s, ")
    assert lines[-1].startswith("step 300 of 300")
    assert "left" not in lines[-1]  # what comes behind the last step takes its own time


@pytest.mark.parametrize("force", [None, "1"])
def test_a_log_keeps_no_speed_and_no_memory_of_private_rows(monkeypatch: pytest.MonkeyPatch, force: str | None) -> None:
    if force:  # rich then takes every file for a terminal
        monkeypatch.setenv("FORCE_COLOR", force)
    fast, slow = (said(monkeypatch, io.StringIO(), public=False, pace=pace) for pace in (1.0, 7.0))
    assert fast == slow  # neither what is said nor when
    assert fast.splitlines()[1] == "step 30 of 300, epsilon <= 3.21 of 8.00"


def test_the_operator_sees_them_at_a_terminal_on_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    shown = said(monkeypatch, Terminal(), public=False)
    assert "\x1b[" in shown
    last = next(line for line in reversed(shown.splitlines()) if "300/300" in line)
    for part in ("epsilon <= 3.21 of 8.00", "300/300", "100 tokens/s", "GB"):
        assert part in last
    assert "loss 1.235 (private)" in shown


def test_a_terminal_that_redraws_nothing_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    lines = said(monkeypatch, Terminal(), public=False).splitlines()
    assert (len(lines), "loss 1.235 (private)" in lines[1]) == (20, True)


@pytest.mark.parametrize("widgets", [True, False])
def test_a_notebook_redraws_where_it_can_and_keeps_no_private_figure(monkeypatch: Any, widgets: bool) -> None:
    monkeypatch.setattr(screen.importlib.util, "find_spec", lambda name: object() if widgets else None)
    console = Console(file=io.StringIO())
    console.is_jupyter = True
    monkeypatch.setattr(screen, "LONG", -1.0)
    with screen.Screen(console) as made:
        assert (made.bar is not None) is widgets
        assert not made._shows_cost
        for what, public in (("Self-check", True), (STEP, False), ("Tokenising", False)):
            made(what, 1, 2, "37 units", public)
            shown = [task.description for task in made.bar.tasks] if made.bar else []
            assert (what in shown) is (public and widgets)


def shown(monkeypatch, file, what, *, public, pace=3.0, public_rows=False) -> str:
    """What is shown of something in ten parts of ``pace`` seconds and 100 units each."""
    now = [1000.0]
    monkeypatch.setattr(screen.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(screen.sys, "__stdout__", file)
    console = Console(file=file, width=100)
    with screen.Screen(console, public=public_rows) as made, heard_by(made):
        for part in range(10):
            tell(what, 100 * part, 1000, note=f"{part} units", public=public)
            if made.bar:
                made.bar.refresh()
            now[0] += pace
    tell(what, 0, 1)  # nobody listens any more
    return file.getvalue()


def test_a_log_says_now_and_then_what_takes_long_if_that_is_public(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["200 of 1000 done after 6 s", "900 of 1000 done after 27 s"]
    result = shown(monkeypatch, io.StringIO(), "Self-check", public=True).splitlines()
    assert result == [f"Self-check: {line}" for line in lines]
    result = shown(monkeypatch, io.StringIO(), "Evaluating", public=False, public_rows=True).splitlines()
    assert result == [f"Evaluating: {line}" for line in lines]
    assert (
        shown(monkeypatch, io.StringIO(), STEP, public=False, public_rows=True) == ""
    )  # steps have lines of their own
    assert shown(monkeypatch, io.StringIO(), "Self-check", public=True, pace=0.1) == ""
    for what in ("Tokenising", "Evaluating", STEP):
        assert shown(monkeypatch, io.StringIO(), what, public=False) == ""


def test_a_terminal_shows_how_far_something_and_a_long_step_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    result = shown(monkeypatch, Terminal(), "Tokenising", public=False)
    assert "Tokenising" in result
    assert "9 units, 900 of 1,000, 0:00:03 left" in result
    monkeypatch.setenv("TERM", "xterm")
    result = shown(monkeypatch, Terminal(), STEP, public=False)
    assert "9 units, 900 of 1,000, 33 tokens/s, 0:00:03 left" in result
    assert "0 of 1,000" not in result.replace("900 of", "").replace("00 of", "")
    assert STEP not in shown(monkeypatch, Terminal(), STEP, public=False, pace=0.1)


def record(**changes: Any) -> Any:
    values = {"metrics": SimpleNamespace(public={}), "guarantee": SimpleNamespace(holds=True, reason=None)}
    values |= {"ledger": SimpleNamespace(dataset="notes"), "status": "completed"}
    return SimpleNamespace(**{**values, "steps_taken": 4, "steps_planned": 4, "steps_lost": 0, **changes})


def ended(run: RunDir, **changes: Any) -> Any:
    plan, config = SimpleNamespace(epsilon=3.0, delta=1e-5), SimpleNamespace(data=SimpleNamespace(eval="rows.jsonl"))
    return SimpleNamespace(directory=run, record=record(**changes), plan=plan, config=config)


def text_of(result: dict[str, Any]) -> str:
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(screen.summary_table(result))
    return console.export_text()


def test_the_summary_says_epsilon_and_what_to_type_next_and_names_are_no_markup(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "runs[" / "x]")
    run.make()
    assert "runs[/x]" in text_of(screen.summary(ended(run))).replace("\n", "")
    run = RunDir(tmp_path / "a run")
    run.make()
    result = screen.summary(ended(run))
    assert (result["epsilon"], result["delta"], result["eval_loss_after"]) == (3.0, 1e-5, None)
    assert result["private_figures"] == str(run.private / "summary.json")
    assert result["next"] == [f"dpllm card '{run.root}'"]  # nothing was planted that could be audited
    run.canaries.write_text("{}")
    assert screen.summary(ended(run))["next"][0] == f"dpllm audit '{run.root}'"
    assert "epsilon 3.000 at delta 1e-05" in text_of(result)


def test_the_summary_says_what_becomes_of_held_out_loss(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.make()
    finished = ended(run)
    assert "private: " in text_of(screen.summary(finished))
    finished.config.data.eval = None
    assert "not measured: data.eval is not set" in text_of(screen.summary(finished))


def test_the_summary_of_a_run_without_a_guarantee_states_no_epsilon(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.make()
    metrics = SimpleNamespace(public={"eval_loss_before": 2.0, "eval_loss_after": 1.5})
    refused = SimpleNamespace(holds=False, reason="the noise has a seed")
    result = screen.summary(ended(run, metrics=metrics, guarantee=refused, status="interrupted"))
    assert "epsilon" not in text_of(result)
    assert "none: the noise has a seed" in text_of(result)
    assert "2.0000 before, 1.5000 after" in text_of(result)
    assert result["next"][0] == f"dpllm train {run.config} --overwrite"
    run.resume.mkdir()
    assert screen.summary(ended(run, status="interrupted"))["next"][0].endswith("--resume")


def test_the_lengths_that_plan_tells_are_those_of_the_recipes_own_chat_template(tmp_path: Path) -> None:
    """The base model has none, as most have; by it no row could be counted."""
    base = tiny.save_model(tmp_path / "base", chat_template=None)
    chat = [{"role": "user", "content": "Who? " * 30}, {"role": "assistant", "content": "Anna"}]
    rows = tiny.write_rows(tmp_path / "rows.jsonl", [{"messages": chat}] * 5)
    data = {"train": str(rows), "public": True, "max_length": 16, "chat_template": tiny.CHAT}
    config, shown = tm.recipe(model={"name_or_path": str(base)}, data=data), io.StringIO()
    table = load_table(str(rows), config.data, "train", tmp_path)
    screen.tell_lengths_of_some(config, table, Console(file=shown))
    assert "no row has a token left to learn" in " ".join(shown.getvalue().split())


def publishing(public: bool, eval_public: bool, privacy: dict[str, Any]) -> RunConfig:
    return tm.recipe(data={"eval": "b.jsonl", "public": public, "eval_public": eval_public}, privacy=privacy)


@pytest.mark.parametrize("eval_public", [True, False])
@pytest.mark.parametrize(
    ("public", "privacy", "released"),
    [
        (False, {}, True), (True, {}, True), (False, {"insecure_seed": 1}, False),
        (True, {"insecure_seed": 1}, True), (False, {"enabled": False}, False), (True, {"enabled": False}, True),
    ],
)  # fmt: skip
def test_samples_and_figures_of_public_rows_are_private_where_the_weights_are(
    public: bool, eval_public: bool, privacy: dict[str, Any], released: bool
) -> None:
    """They are computed through weights that saw private rows without a guarantee."""
    asked = publishing(public, eval_public, privacy)
    run: Any = SimpleNamespace(config=asked, decision=Decision(asked))
    assert may_publish_weights(run) is released
    assert may_publish_figures(run) is (released and eval_public)


@pytest.mark.parametrize(
    ("public", "eval_public", "evaluation", "released"),
    [
        (True, True, "b.jsonl", True),
        (True, False, None, True),
        (True, False, "b.jsonl", False),
        (False, True, "b.jsonl", False),
    ],
)
def test_time_and_memory_are_told_of_public_rows_alone(
    public: bool, eval_public: bool, evaluation: str | None, released: bool
) -> None:
    asked = publishing(public, eval_public, {})
    asked = asked.model_copy(update={"data": asked.data.model_copy(update={"eval": evaluation})})
    assert may_publish_cost(asked) is released


def test_deviations_of_a_resumed_run_only_grow() -> None:
    """An attempt that was interrupted may have shown what the one after it, with another recipe, does not."""
    assert grown(["two", "new"], ["one", "two", INTERRUPTED]) == ["two", "new", "one"]
    assert grown(["two", INTERRUPTED], [INTERRUPTED]) == ["two", INTERRUPTED]


def of(tmp_path: Path, **sections: Any) -> Samples:
    data = {"train": str(tmp_path / "train.jsonl"), "eval": str(tmp_path / "held"), "format": "text", "max_length": 128}
    config = recipe(data={**data, **sections.pop("data", {})}, **sections)
    return Samples.of(config, tiny.tokenizer(), main=True)


@pytest.mark.parametrize(
    ("train", "words"),
    [
        ({"sample_every": 2}, "Set train.sample_prompts too"),
        ({"sample_prompts": "train.jsonl"}, "not declared public"),
        ({"sample_prompts": "../{here}/train.jsonl"}, "not declared public"),
        ({"sample_prompts": "held/some.txt"}, "not declared public"),
        ({"sample_prompts": "nowhere.txt"}, "nowhere.txt: cannot be read"),
        ({"sample_prompts": ["Anna " * 200]}, "prompt 1 has "),
    ],
)
def test_prompts_that_cannot_be_used_are_refused(tmp_path: Path, train: dict[str, Any], words: str) -> None:
    if isinstance(named := train.get("sample_prompts"), str):
        train = {"sample_prompts": str(tmp_path / named.format(here=tmp_path.name))}
    with pytest.raises((ConfigError, DataError), match=words):
        of(tmp_path, train={"steps": 4, **train})


def test_the_files_of_a_glob_and_of_a_list_and_links_to_them_are_private_too(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    tiny.write_rows(kept / "train.jsonl", [{"prompt": "Anna"}])
    (tmp_path / "soft.jsonl").symlink_to(kept / "train.jsonl")
    (tmp_path / "hard.jsonl").hardlink_to(kept / "train.jsonl")
    within = tmp_path / "within"
    within.mkdir()
    (within / "a.jsonl").symlink_to(kept / "train.jsonl")
    whole = str(kept / "train.jsonl")
    for source in (str(kept / "*.jsonl"), str(tmp_path / "**" / "train.jsonl"), ["builtin:clinic", whole], str(within)):
        for prompts in (kept / "train.jsonl", tmp_path / "soft.jsonl", tmp_path / "hard.jsonl"):
            with pytest.raises(ConfigError, match="not declared public"):
                of(tmp_path, data={"train": source, "eval": None}, train={"steps": 4, "sample_prompts": str(prompts)})


def test_a_file_that_is_declared_public_may_be_named(tmp_path: Path) -> None:
    tiny.write_rows(tmp_path / "train.jsonl", [{"prompt": "Anna"}, {"messages": [{"role": "user", "content": "Who?"}]}])
    settings = {"steps": 4, "sample_prompts": str(tmp_path / "train.jsonl")}
    assert of(tmp_path, data={"public": True}, train=settings).prompts == ("Anna", "Who?")


@pytest.mark.parametrize(("every", "steps"), [(None, [7]), (3, [3, 6, 7])])
def test_when_texts_are_written(every: int | None, steps: list[int]) -> None:
    asked = Samples(("a",), ((1,),), every, 100)
    assert [step for step in range(1, 8) if asked.due(step, 7)] == steps
    assert not Samples((), (), every, 100).due(7, 7)


class Counting(nn.Module):
    """Says the number after the last one; notes in which mode it was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.dropout = nn.Dropout(0.5)
        self.asked: list[tuple[bool, bool]] = []

    def forward(self, input_ids: torch.Tensor, **_: Any) -> Any:
        self.asked.append((self.training or self.dropout.training, torch.is_grad_enabled()))
        logits = self.weight + nn.functional.one_hot(input_ids + 1, 500).float()
        return type("Output", (), {"logits": self.dropout(logits)})


class Numbers:
    eos_token_id = 9

    @staticmethod
    def decode(ids: list[int], **_: Any) -> str:
        return " ".join(map(str, ids))


def test_a_model_is_afterwards_as_it_was() -> None:
    model, asked = Counting().train(), Samples(("a", "b"), ((5,), (100, 101)), None, 1000)
    before = torch.get_rng_state()
    longest = " ".join(map(str, range(102, 102 + TOKENS)))
    assert asked.write(model, Numbers(), contextlib.nullcontext) == ["6 7 8", longest]
    assert torch.equal(torch.get_rng_state(), before)
    assert set(model.asked) == {(False, False)}
    assert model.training
    assert model.dropout.training
    assert model.weight.grad is None
    short = replace(asked, longest=4)  # no longer than a row of training
    assert short.write(model, Numbers(), contextlib.nullcontext)[1] == "102 103"
