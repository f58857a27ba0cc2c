"""Every guard is found, whatever else is wrong, and what can be computed beside a refusal is."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny
from commands import give_budget, sections

from dpllm.errors import BudgetExceeded, ConfigError, DataError
from dpllm.recipe.config import RunConfig
from dpllm.run.promise import Start, decide, plan_of
from dpllm.run.subject import read_subject

ROWS = 50


def recipe(root: Path, **changes: Any) -> RunConfig:
    value = sections(root)
    for key, new in changes.items():
        section, _, name = key.partition("__")
        value[section] = {**value[section], name: new} if name else new
    return RunConfig.model_validate(value)


def messages(config: RunConfig) -> list[str]:
    return [str(error) for error in decide(config, Start()).refusals]


def test_a_good_recipe_meets_no_guard(tmp_path: Path) -> None:
    config = recipe(tmp_path)
    seen = decide(config, Start())
    assert (seen.refusals, seen.exit_code) == ((), 0)
    assert seen.plan == plan_of(config, ROWS)
    assert seen.ledger is None  # there is none yet
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.jsonl"]


def test_rows_that_are_kept_for_training_are_in_no_repr(tmp_path: Path) -> None:
    """A traceback or a notebook prints values."""
    seen = decide(recipe(tmp_path), Start(), cache=tmp_path / "cache")
    assert seen.subject.rows is not None
    assert "rows=" not in repr(seen)
    shared = seen.without_rows()
    assert shared.subject.rows is None


@pytest.mark.parametrize(
    ("changes", "missing", "message"),
    [
        ({"telemetry": {"trackers": ["tensorboard", "mlflow"]}}, "mlflow", "telemetry.trackers needs"),
        ({"model__quantization": "4bit"}, "bitsandbytes", "model.quantization needs"),
    ],
)
def test_a_package_that_is_not_installed_is_refused_before_anything_is_reserved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: Any, missing: str, message: str
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)  # as if it were not installed
    config = recipe(tmp_path, **changes)
    (result,) = decide(config, Start()).refusals
    assert isinstance(result, ConfigError)
    assert message in str(result)
    assert f"{missing}, which is not installed" in str(result)
    assert decide(config).refusals == (), "without a run, no package is needed"


def test_numbers_and_prompts_that_cannot_be_are_refused_by_plan_too(tmp_path: Path) -> None:
    config = recipe(tmp_path, train__sample_prompts=str(tmp_path / "none.txt"))
    assert any("none.txt" in str(refusal) for refusal in decide(config, Start()).refusals)
    refusals = messages(recipe(tmp_path, data__public_size=10**13, train__batch_size=1))
    assert len(refusals) == 1
    assert "sampling_rate is 1e-13" in refusals[0]


@pytest.mark.parametrize("kept", ["tokenizer_config.json", "chat_template.jinja", "additional", "none"])
def test_chats_need_a_template(tmp_path: Path, kept: str) -> None:
    """Wherever transformers finds one."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text("{}" if kept != "tokenizer_config.json" else '{"chat_template": "a"}')
    if kept == "chat_template.jinja":
        (folder / kept).write_text("a")
    if kept == "additional":
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "default.jinja").write_text("a")
    config = recipe(tmp_path, model__name_or_path=str(folder))
    assert messages(config) == [], "text needs none"
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    tiny.write_rows(tmp_path / "rows.jsonl", [{"messages": turns}] * ROWS)
    refusals = messages(config)
    assert len(refusals) == (kept == "none")
    assert all("has no chat template" in message for message in refusals)


@pytest.mark.parametrize(
    ("declared", "delta", "refusal_text"),
    [
        (2, 0.49, "data.public_size 2 is wrong"),
        (2, "auto", "data.public_size 2 is wrong"),
        (ROWS // 2 - 1, 1e-4, "data.public_size 24 is wrong"),
        (ROWS // 2, 0.03, "privacy.delta 0.03 is not below 1/N of the units in data.train"),
        (ROWS // 2, 1 / ROWS, "privacy.delta 0.02 is not below 1/N of the units in data.train"),
        (ROWS // 2, 0.019, None),
        (ROWS // 2, "auto", None),
        (20 * ROWS, "auto", None),
    ],
)
def test_a_declared_size_that_hides_most_of_the_data_is_refused_without_telling_their_number(
    tmp_path: Path, declared: int, delta: Any, refusal_text: str | None
) -> None:
    """At 2 declared beside 400 units, a delta of .49 stood on the card."""
    config = recipe(tmp_path, data__public_size=declared, privacy__delta=delta, train__batch_size=2)
    refusals = messages(config)
    assert [message[: len(refusal_text or "")] for message in refusals] == [refusal_text] * (refusal_text is not None)
    assert not any(re.search(rf"\b{ROWS}\b", message) for message in refusals)


def test_all_guards_are_found_at_once(tmp_path: Path) -> None:
    config = recipe(tmp_path, privacy__delta=0.5, adapter={"method": "lora", "dropout": 0.1}, train__batch_size=51)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("")
    refusals = messages(config)
    for words in ("Set adapter.dropout: 0", "already holds a run", "train.batch_size 51", "privacy.delta 0.5"):
        assert [message for message in refusals if words in message], words
    assert len(refusals) == 4
    assert decide(config, Start()).exit_code == 3  # a refusal outweighs a wrong directory


def test_a_run_above_its_target_is_computed_and_refused(tmp_path: Path) -> None:
    config = recipe(tmp_path, privacy__epsilon=0.1)
    seen = decide(config, Start())
    assert [type(error).__name__ for error in seen.refusals] == ["Refused"]
    assert seen.plan.epsilon > seen.plan.target_epsilon == 0.1
    assert seen.plan.epsilon == decide(recipe(tmp_path), Start()).plan.epsilon  # type: ignore[union-attr]


def test_delta_is_judged_even_if_the_batch_is_too_large(tmp_path: Path) -> None:
    assert len(messages(recipe(tmp_path, train__batch_size=51, privacy__delta=0.02))) == 2
    assert len(messages(recipe(tmp_path, train__batch_size=51, privacy__delta=0.0199))) == 1
    assert decide(recipe(tmp_path, train__batch_size=51), Start()).subject.num_units == ROWS


def test_data_that_cannot_be_read_leave_the_rest_to_be_judged(tmp_path: Path) -> None:
    dropout = {"method": "lora", "dropout": 0.1}
    config = recipe(tmp_path, data={"train": str(tmp_path / "absent.jsonl")}, adapter=dropout)
    seen = decide(config, Start())
    assert (seen.schedule, seen.plan, seen.subject) == (None, None, None)
    assert [error.exit_code for error in seen.refusals] == [3, 2]
    with pytest.raises(DataError, match="no such file"):
        read_subject(config)


def test_no_privacy_on_private_data_is_refused_and_scheduled(tmp_path: Path) -> None:
    seen = decide(recipe(tmp_path, privacy__enabled=False), Start())
    assert ["not declared public" in str(error) for error in seen.refusals] == [True]
    assert seen.plan is None
    assert seen.schedule is not None
    assert messages(recipe(tmp_path, privacy__enabled=False, data__public=True)) == []


def test_the_ledger_says_what_it_holds_and_would_hold(tmp_path: Path) -> None:
    config = recipe(tmp_path, privacy__delta=1e-3)
    give_budget(tmp_path, 5.0)
    seen = decide(config, Start())
    assert (seen.ledger.used, seen.refusals) == (0.0, ())
    assert 0 < (seen.ledger.used_after or 0) < 1
    last = decide(recipe(tmp_path, privacy__delta=1e-3, privacy__final=True), Start()).ledger
    assert (last.final, last.used, last.spent) == (True, None, 0.0)
    assert last.after == pytest.approx(seen.plan.epsilon, abs=1e-6)


def test_a_budget_refuses_with_the_words_of_the_ledger(tmp_path: Path) -> None:
    config = recipe(tmp_path)
    give_budget(tmp_path, 0.01)
    before = (tmp_path / "ledger.sqlite").read_bytes()
    seen = decide(config, Start())
    assert seen.exit_code == 3
    assert [type(error) for error in seen.refusals] == [BudgetExceeded]
    assert str(seen.refusals[0]) == seen.ledger.refusal
    assert seen.plan is not None  # and what the refused run would cost
    assert (tmp_path / "ledger.sqlite").read_bytes() == before


def test_a_run_above_its_budget_is_refused_or_lowered_where_the_recipe_says_so(tmp_path: Path) -> None:
    """A mutant lowers it unasked."""
    asked = {"privacy__noise_multiplier": None, "privacy__epsilon": 3.0, "privacy__delta": 1e-3}
    config = recipe(tmp_path, **asked)
    alone = decide(config, Start()).plan
    give_budget(tmp_path, 3.0)
    seen = decide(config, Start())
    assert [type(error) for error in seen.refusals] == [BudgetExceeded]
    assert "privacy.fit_budget: true" in str(seen.refusals[0])
    assert "type --final" in str(seen.refusals[0])
    assert (seen.plan, seen.lowered) == (alone, "")
    config = recipe(tmp_path, **asked, privacy__fit_budget=True)
    for directory in (False, True):
        seen = decide(config, Start() if directory else None, subject=read_subject(config))
        assert seen.refusals == ()
        assert seen.plan.noise_multiplier > alone.noise_multiplier
        assert f"epsilon is lowered to {seen.plan.epsilon:.3f} from the 3 asked for" in seen.lowered
        assert seen.lowered in str(seen)
        assert seen.ledger.used_after == pytest.approx(1, abs=1e-3)
        assert seen.ledger.used_after <= 1


def test_a_spent_filter_is_refused_and_the_plan_shown(tmp_path: Path) -> None:
    asked = {"privacy__noise_multiplier": None, "privacy__epsilon": 8.0, "privacy__delta": 1e-3}
    config = recipe(tmp_path, **asked, privacy__fit_budget=True)
    give_budget(tmp_path, 0.02)
    seen = decide(config, Start())
    assert seen.exit_code == 3
    assert seen.plan is not None
