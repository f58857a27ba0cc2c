"""Clusters and classifiers of private texts: what they cost, when it is charged, what nobody sees, and bad input."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny
from released_folders import CLUSTERS, PREDICT, UNITS, Say, entries, ledger, released, rows, verdicts, write

from dpllm.cli import main
from dpllm.ledger import Budget, budgets, open_ledger
from dpllm.model import loading
from dpllm.privacy import embedded
from dpllm.privacy.events import Gaussian, SelfComposed
from dpllm.recipe.config import ModelConfig
from dpllm.releases import embeddings
from dpllm.text import builtin


@pytest.mark.parametrize(("asked", "folder", "steps"), [(PREDICT, "classifier", 2), (CLUSTERS, "clusters", 5)])
def test_a_release_is_charged_round_by_round_and_verifies(
    say: Say, capsys: pytest.CaptureFixture[str], asked: list[str], folder: str, steps: int
) -> None:
    code, printed, _ = say(*asked, "--dry-run")
    assert (code, entries()) == (0, 0)
    assert "Nothing was spent" in printed
    code, printed, error = say(*asked)
    assert code == 0, error
    assert "charged to the ledger; all of it is in" in printed
    found, book = released(folder), ledger()
    [release], [run] = found.releases, book.runs("notes")
    assert run.event == release.event == SelfComposed(steps, Gaussian(release.noise_multiplier))
    assert (run.state, run.steps, run.reservation.num_steps, run.reservation.entry) == (
        "completed",
        steps,
        steps,
        release.entry,
    )
    assert found.epsilon == pytest.approx(20.0, rel=1e-2)
    assert found.epsilon == book.spent("notes", found.delta)
    assert release.declared.units == UNITS
    counts = [count for _, count in release.counts()]
    assert sum(counts) == pytest.approx(UNITS, abs=4 * release.error_95)
    assert set(verdicts(capsys, folder, "--ledger", "l.sqlite").values()) == {"verified", "asserted"}
    assert "failed" not in verdicts(capsys, folder).values()
    text = "".join(path.read_text(errors="replace") for path in Path(folder).iterdir())
    assert "patient 1" not in text
    assert "employer" not in text
    code, _, error = say(*asked)
    assert (code, len(ledger().runs("notes"))) == (2, 1)
    assert "holds an earlier release" in error


def test_a_crash_in_the_second_round_stays_charged_and_is_not_drawn_again(
    say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, seen = embedded._noised, []

    def crash(sums: Any, scale: float) -> Any:
        [run] = ledger().runs("notes")
        seen.append(run.steps)
        if len(seen) == 2:
            raise RuntimeError("power cut")
        return real(sums, scale)

    with monkeypatch.context() as patch:
        patch.setattr(embedded, "_noised", crash)
        with pytest.raises(RuntimeError, match="power cut"):
            say(*CLUSTERS)
    assert seen == [1, 2], "each round is charged before it is drawn"
    assert not Path("clusters").exists()
    [run] = ledger().runs("notes")
    assert (run.state, run.steps) == ("running", 2)
    spent = ledger().spent("notes", 1e-6)
    assert say(*CLUSTERS)[0] == 0
    assert len(ledger().runs("notes")) == 2
    assert ledger().spent("notes", 1e-6) > 1.3 * spent


@pytest.mark.parametrize("units", [40, 41, 5])
def test_how_many_clusters_are_borne_follows_from_the_public_number_of_units(say: Say, units: int) -> None:
    """A refusal by the private number of units told of one more or less."""
    write(rows(units))
    asked = ["--clusters", "3", "--data.public_size", "100", "--dry-run"]
    told = [say(*asked, epsilon=epsilon)[::2] for epsilon in (1.0, 20.0)]
    assert [code for code, _ in told] == [2, 0]
    assert told[0][1].startswith("dpllm describe: 100 units are too few for 3 clusters at epsilon 1: one below ")
    assert entries() == 0


def test_values_that_are_not_listed_or_missing_are_other_and_never_refused(say: Say) -> None:
    odd: list[Any] = ["never listed", None, "", "YES", 7, ["yes"], {"yes": 1}, "other"]
    result = rows(4 * len(odd))
    for place, row in enumerate(result):
        row["label"] = odd[place % len(odd)]
    del result[1]["label"]
    write(result)
    code, _, error = say(*PREDICT)
    assert code == 0, error
    counts = dict(released("classifier").releases[0].counts())
    assert counts["other"] == pytest.approx(32, abs=10)
    assert "never listed" not in (Path("classifier") / "describe.json").read_text()


def test_odd_texts_and_a_unit_of_a_thousand_rows_are_no_error(say: Say) -> None:
    result = [*rows(), {"text": "", "who": "p1", "label": "yes"}, {"text": " \u200b", "who": "p2", "label": "no"}]
    result += [{"text": f"again {n} " * 40, "who": "p3", "label": "yes"} for n in range(1000)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in result))
    assert say(*PREDICT)[0] == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--predict", "label", "--values", "yes"], "--values"),
        (["--predict", "label", "--values", "yes,yes"], "--values"),
        (["--predict", "label", "--values", "yes,,no"], "--values"),
        (["--predict", "label", "--values", "yes,other"], "--values"),
        (["--predict", "label"], "--values"),
        (["--predict", "diagnosis", "--values", "a,b"], "no row has a column 'diagnosis'"),
        ([*CLUSTERS, *PREDICT], "folders of their own"),
        ([*CLUSTERS, "--values", "a,b"], "folders of their own"),
        ([*CLUSTERS, "--epsilon", "0.002", "--data.public_size", "200000"], "takes noise of"),
        ([*CLUSTERS, "--units"], "another dpllm describe"),
        (["--clusters", "1"], "--clusters 1: is 2 to 99"),
        (["--clusters", "100"], "--clusters 100: is 2 to 99"),
        ([*CLUSTERS, "--model", "builtin:none"], "builtin"),
        ([*CLUSTERS, "--max-examples-per-unit", "10000"], "--max-examples-per-unit"),
        ([*CLUSTERS, "--data.public_size", "1"], "data.public_size 1 is wrong"),
        ([*CLUSTERS, "--delta", "0.5"], "delta"),
        ([*CLUSTERS, "--output", "/dev/null/x"], "cannot be written to"),
        ([*CLUSTERS, "--model.adapter", "somewhere"], "model.adapter"),
    ],
)
def test_bad_input_is_one_message_and_nothing_is_spent(say: Say, words: list[str], message: str) -> None:
    code, _, error = say(*words)
    assert code in (2, 3)
    [line] = error.splitlines()
    assert message in line
    assert entries() == 0


def test_texts_without_an_encoder_are_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["describe", "rows.jsonl", "--epsilon", "1", "--clusters", "2"]) == 2
    assert "--model MODEL" in capsys.readouterr().err


def test_an_encoder_that_couples_rows_or_learned_these_data_is_refused(
    say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = loading.load_base

    def coupled(*arguments: Any, **more: Any) -> Any:
        model = real(*arguments, **more)
        model.config.quantization_config = type("Outliers", (), {"load_in_8bit": True, "llm_int8_threshold": 6.0})()
        return model

    with monkeypatch.context() as patch:
        patch.setattr(loading, "load_base", coupled)
        code, _, error = say(*PREDICT)
    assert (code, ledger().runs("notes")) == (3, [])
    assert "outlier columns" in error
    whose = type("Base", (), {"models": [type("One", (), {"dataset": "notes"})()]})()
    monkeypatch.setattr("dpllm.releases.describe.of_base", lambda config: whose)
    code, _, error = say(*PREDICT)
    assert (code, ledger().runs("notes")) == (3, [])
    assert "was tuned on notes" in error


def test_a_file_of_code_is_no_encoder(say: Say) -> None:
    """Its class would come from elsewhere."""
    shutil.copytree(builtin.path("builtin:tiny"), "own")
    settings = json.loads(Path("own/config.json").read_text())
    settings |= {"auto_map": {"AutoModelForCausalLM": "code.Odd"}, "model_type": "odd"}
    Path("own/config.json").write_text(json.dumps(settings))
    Path("own/code.py").write_text("open('ran', 'w')\n")
    code, _, error = say(*PREDICT, "--model", "own")
    assert (code, error.count("\n"), Path("ran").exists()) == (2, 1, False)
    assert ledger().runs("notes") == []


def test_a_budget_that_is_used_up_refuses_before_the_texts_are_read(say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_ledger("l.sqlite") as book:
        budgets.set_budget(book, "notes", Budget(2.0, 1e-6, "who", "zero_out", by="a", reason="b"))
    monkeypatch.setattr(embeddings, "Encoder", lambda *_: pytest.fail("the texts were read"))
    code, _, error = say(*PREDICT)
    assert code == 3
    assert "notes" in error


def test_a_tokenizer_with_more_tokens_than_its_model_is_refused_whatever_the_texts(say: Say) -> None:
    """A mutant reads texts until one has such a token, and ends with an error that tells of it."""
    tiny.save_model(Path("more"))
    tokenizer = loading.load_tokenizer(ModelConfig(name_or_path="more"))
    tokenizer.add_tokens([f"zebra{number}" for number in range(1000)])
    tokenizer.save_pretrained("more")
    code, _, error = say(*CLUSTERS, "--model", "more")
    assert (code, entries()) == (2, 0)
    assert "the tokenizer has" in error


def test_declared_values_are_read_as_the_data_are(say: Say) -> None:
    write([{**row, "label": 1.0 if row["label"] == "yes" else 2.0} for row in rows()])
    assert say("--predict", "label", "--values", "1.0,2.0")[0] == 0
    value = released("classifier").releases[0].value or {}
    assert set(value) == {"1", "2", "other"}
    assert abs(value["other"]) < value["1"]
