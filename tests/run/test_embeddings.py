"""Clusters and classifiers of private texts: what they cost, when it is charged, what nobody sees, and how they are applied."""

from __future__ import annotations

import hashlib
import json
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import tiny

from dpllm.cli import main
from dpllm.ledger import Budget, RunRequest, budgets, open_ledger
from dpllm.model import loading
from dpllm.privacy import embedded, renyi
from dpllm.privacy.events import Gaussian, SelfComposed
from dpllm.recipe.config import ModelConfig
from dpllm.run import embeddings
from dpllm.statement.released import Statistics

Json = dict[str, Any]
Say = Callable[..., tuple[int, str, str]]
PREDICT = ["--predict", "label", "--values", "yes,no"]
CLUSTERS = ["--clusters", "2", "--rounds", "3"]
UNITS = 40
WORDS = ["the pain is worse after meals", "he asked for a letter", "the boat and the dog", "seen at home on Monday"]


def rows(units: int = UNITS) -> list[Json]:
    texts = ("pain in the chest, worse after meals", "a letter for the employer is asked for")
    return [
        {
            "text": f"{texts[unit % 2]}, patient {unit}, visit {number}",
            "who": f"p{unit}",
            "label": ("yes", "no")[unit % 2],
        }
        for unit in range(units)
        for number in range(2)
    ]


def write(found: list[Json], name: str = "rows.jsonl") -> None:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in found), encoding="utf-8")


@pytest.fixture
def say(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Say:
    """Types ``dpllm describe`` on rows; returns exit code and what was printed."""
    monkeypatch.setenv("COLUMNS", "250")
    monkeypatch.chdir(tmp_path)
    write(rows())
    Path("public.txt").write_text("\n".join(WORDS))

    def typed(*words: object, epsilon: float = 20.0) -> tuple[int, str, str]:
        fixed = [
            "rows.jsonl",
            "--unit",
            "who",
            "--max-examples-per-unit",
            4,
            "--dataset",
            "notes",
            "--ledger",
            "l.sqlite",
        ]
        fixed += ["--epsilon", epsilon, "--encoder", "builtin:tiny", "--data.max_length", 16, "--words", "public.txt"]
        code = main(["describe", *map(str, [*fixed, *words])])
        return code, *capsys.readouterr()

    return typed


def ledger() -> Any:
    return open_ledger("l.sqlite")


def entries() -> int:
    book = ledger()
    return len(book.history()) if book else 0


def released(folder: str) -> Statistics:
    return Statistics.pick(json.loads((Path(folder) / "describe.json").read_text()))


def verdicts(capsys: pytest.CaptureFixture[str], folder: str, *more: str) -> dict[str, str]:
    capsys.readouterr()
    main(["verify", folder, "--json", *more])
    return {check["name"]: check["status"] for check in json.loads(capsys.readouterr().out)["checks"]}


@pytest.mark.parametrize(("asked", "folder", "steps"), [(PREDICT, "classifier", 2), (CLUSTERS, "clusters", 3)])
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


def test_a_classifier_tells_labels_apart_and_classifies_a_file(say: Say, capsys: pytest.CaptureFixture[str]) -> None:
    assert say(*PREDICT)[0] == 0
    write(
        [{"text": "pain in the chest, worse"}, {"text": "  "}, {"text": "a letter is asked for"}, {"text": ""}],
        "new.jsonl",
    )
    assert main(["classify", "classifier", "new.jsonl"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert found == [{"row": n, "label": one} for n, one in enumerate(("yes", None, "no", None), 1)]
    write([{"number": 1}], "bare.jsonl")
    code = main(["classify", "classifier", "bare.jsonl"])
    assert (code, capsys.readouterr().err.count("\n")) == (2, 1)


def test_clusters_are_named_by_public_texts_and_assign_a_file(say: Say, capsys: pytest.CaptureFixture[str]) -> None:
    assert say(*CLUSTERS)[0] == 0
    names = sorted(released("clusters").releases[0].value or {})
    assert [name[:3] for name in names] == ["01 ", "02 "]
    assert {name[3:] for name in names} <= set(WORDS)
    write([*rows(2), {"text": ""}], "new.jsonl")
    assert main(["classify", "clusters", "new.jsonl"]) == 0
    found = [json.loads(line)["label"] for line in capsys.readouterr().out.splitlines()]
    assert found[-1] is None
    assert found[0] == found[1] != found[2] == found[3]
    assert set(found[:-1]) == set(names)


def test_without_public_texts_words_of_the_vocabulary_name_clusters(say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embeddings, "WORDS", 20)
    monkeypatch.setattr(embeddings, "MIXED", 5)
    Path("own.yaml").write_text(
        "model: {name_or_path: builtin:tiny}\ndata: {train: rows.jsonl}\ntrain: {steps: 1}\noutput_dir: r\n",
    )
    words = ["own.yaml", "--epsilon", "20", *CLUSTERS, "--ledger", "l.sqlite", "--data.max_length", "16"]
    assert main(["describe", *words]) == 0
    assert all(name[3:].count(", ") == 2 for name in released("clusters").releases[0].value or {})


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
    found = rows(4 * len(odd))
    for place, row in enumerate(found):
        row["label"] = odd[place % len(odd)]
    del found[1]["label"]
    write(found)
    code, _, error = say(*PREDICT)
    assert code == 0, error
    counts = dict(released("classifier").releases[0].counts())
    assert counts["other"] == pytest.approx(32, abs=10)
    assert "never listed" not in (Path("classifier") / "describe.json").read_text()


def test_odd_texts_and_a_unit_of_a_thousand_rows_are_no_error(say: Say) -> None:
    found = [*rows(), {"text": "", "who": "p1", "label": "yes"}, {"text": " \u200b", "who": "p2", "label": "no"}]
    found += [{"text": f"again {n} " * 40, "who": "p3", "label": "yes"} for n in range(1000)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    assert say(*PREDICT)[0] == 0


@pytest.mark.parametrize(
    ("words", "told"),
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
        ([*CLUSTERS, "--units"], "by another dpllm describe"),
        (["--clusters", "1"], "--clusters is 2 to 99"),
        (["--clusters", "100"], "--clusters is 2 to 99"),
        (["--clusters", "2", "--rounds", "1"], "--rounds 2 to 100"),
        ([*CLUSTERS, "--words", "none.txt"], "--words none.txt"),
        ([*CLUSTERS, "--encoder", "builtin:none"], "builtin"),
        ([*CLUSTERS, "--max-examples-per-unit", "10000"], "--max-examples-per-unit"),
        ([*CLUSTERS, "--data.public_size", "1"], "too few for 2 clusters"),
        ([*CLUSTERS, "--delta", "0.5"], "delta"),
        ([*CLUSTERS, "--output", "/dev/null/x"], "cannot be written to"),
        ([*CLUSTERS, "--model.adapter", "somewhere"], "model.adapter"),
    ],
)
def test_bad_input_is_one_message_and_nothing_is_spent(say: Say, words: list[str], told: str) -> None:
    code, _, error = say(*words)
    assert code in (2, 3)
    [line] = [line for line in error.splitlines() if not line.startswith("calibrating the noise")]  # of a busy machine
    assert told in line
    assert entries() == 0


def test_texts_without_an_encoder_are_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["describe", "rows.jsonl", "--epsilon", "1", "--clusters", "2"]) == 2
    assert "--encoder MODEL" in capsys.readouterr().err


def test_an_encoder_that_couples_rows_or_learned_these_data_is_refused(
    say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = loading.load_base

    def coupled(*given: Any, **more: Any) -> Any:
        model = real(*given, **more)
        model.config.quantization_config = type("Outliers", (), {"load_in_8bit": True, "llm_int8_threshold": 6.0})()
        return model

    with monkeypatch.context() as patch:
        patch.setattr(loading, "load_base", coupled)
        code, _, error = say(*PREDICT)
    assert (code, ledger().runs("notes")) == (3, [])
    assert "outlier columns" in error
    whose = type("Base", (), {"statement": type("One", (), {"dataset": "notes"})(), "ancestors": ()})()
    monkeypatch.setattr("dpllm.run.describe.parents.of_base", lambda config: whose)
    code, _, error = say(*PREDICT)
    assert (code, ledger().runs("notes")) == (3, [])
    assert "was tuned on notes" in error


def test_a_file_of_code_is_no_encoder(say: Say) -> None:
    """Its class would come from elsewhere."""
    from dpllm.text import builtin

    shutil.copytree(builtin.path("builtin:tiny"), "own")
    settings = json.loads(Path("own/config.json").read_text())
    settings |= {"auto_map": {"AutoModelForCausalLM": "code.Odd"}, "model_type": "odd"}
    Path("own/config.json").write_text(json.dumps(settings))
    Path("own/code.py").write_text("open('ran', 'w')\n")
    code, _, error = say(*PREDICT, "--encoder", "own")
    assert (code, error.count("\n"), Path("ran").exists()) == (2, 1, False)
    assert ledger().runs("notes") == []


@pytest.fixture
def folder(say: Say) -> Path:
    assert say(*PREDICT)[0] == 0
    return Path("classifier")


def edited(folder: Path, **changes: Any) -> None:
    """describe.json of another release, with the page that it gives."""
    from dpllm.statement.released import page

    stated = json.loads((folder / "describe.json").read_text())
    of_release = {name: changes.pop(name) for name in list(changes) if name in stated["releases"][0]}
    stated = {**stated, **changes, "releases": [{**stated["releases"][0], **of_release}]}
    (folder / "describe.json").write_text(json.dumps(stated))
    (folder / "README.md").write_text(page(Statistics.pick(stated)))


def test_what_was_changed_afterwards_fails(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = released("classifier").releases[0]
    event = {"type": "self_composed", "count": 2, "event": {"type": "gaussian", "noise_multiplier": 9.0}}
    changes: list[Json] = [
        {"epsilon": 1.0},
        {"delta": 0.5},
        {"event": event},
        {"event": {**event, "count": 1}},
        {"event": {"type": "pure_dp", "epsilon": 1.0}},
        {"error_95": 0.1},
        {"epsilon": released("classifier").epsilon * 0.9995},
        {"statistic": "exact sizes"},
        {"declared": {**one.declared.to_json(), "quantile": 0.5}},
        {"mechanism": "none"},
        {"value": {**(one.value or {}), "yes": 3.5}},
        {"value": {"yes": 3}},
        {"vectors": "0" * 64},
        {"entry": "0" * 16},
        {"dataset": "other"},
        {"unit": "example"},
        {"neighbouring_relation": "add_or_remove_one"},
        {"declared": {**one.declared.to_json(), "units": 200_000}},
        {"declared": {**one.declared.to_json(), "values": ["yes"]}},
        {"declared": {**one.declared.to_json(), "dimensions": 3}},
    ]
    keep = {path.name: path.read_bytes() for path in folder.iterdir()}
    for change in changes:
        edited(folder, **change)
        assert "failed" in verdicts(capsys, "classifier", "--ledger", "l.sqlite").values(), change
        for name, content in keep.items():
            (folder / name).write_bytes(content)
    for name, content in {
        "README.md": b"# safe",
        "more.txt": b"",
        "vectors.safetensors": b"odd",
        "describe.json": b"{}",
    }.items():
        (folder / name).write_bytes(content)
        assert "failed" in verdicts(capsys, "classifier").values(), name
        (folder / name).unlink()
        for kept, old in keep.items():
            (folder / kept).write_bytes(old)
    assert "failed" not in verdicts(capsys, "classifier", "--ledger", "l.sqlite").values()


def test_an_entry_that_was_reserved_and_not_charged_pays_for_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = released("classifier")
    claim = ledger().reserve(
        "notes", RunRequest(one.releases[0].event, one.delta, 2, one.unit, one.neighbouring_relation)
    )
    edited(folder, entry=claim.entry)
    checks = verdicts(capsys, "classifier", "--ledger", "l.sqlite")
    assert checks["ledger"] == "failed"
    ledger().charge(claim.entry, 1)
    assert verdicts(capsys, "classifier", "--ledger", "l.sqlite")["ledger"] == "failed", "half of it is not all"


@pytest.mark.parametrize("odd", ["nan", "shape", "half", "pickle", "missing", "dry"])
def test_a_file_that_is_not_what_was_released_classifies_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str], odd: str
) -> None:
    """No pickle is read, and shapes and numbers are looked at even where somebody made the hash fit."""
    path = folder / "vectors.safetensors"
    tensors = safetensors.numpy.load(path.read_bytes())
    if odd == "nan":
        tensors["vectors"][0, 0] = np.nan
    elif odd == "shape":
        tensors["vectors"] = tensors["vectors"][:, :1].copy()
    elif odd == "half":
        tensors["centre"] = tensors["centre"].astype(np.float16)
    elif odd == "missing":
        del tensors["centre"]
    content = pickle.dumps(tensors) if odd == "pickle" else safetensors.numpy.save(tensors)
    path.write_bytes(content)
    edited(folder, vectors=hashlib.sha256(content).hexdigest(), **({"value": None} if odd == "dry" else {}))
    assert main(["classify", "classifier", "rows.jsonl"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "vectors.safetensors" in error
    assert "failed" in verdicts(capsys, "classifier").values()


def test_a_budget_that_is_used_up_refuses_before_the_texts_are_read(say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_ledger("l.sqlite") as book:
        order = renyi.filter_order(2.0, 1e-6)
        budgets.set_budget(book, "notes", Budget(2.0, 1e-6, "who", "zero_out", "adaptive", order, by="a", reason="b"))
    monkeypatch.setattr(embeddings, "Encoder", lambda *_: pytest.fail("the texts were read"))
    code, _, error = say(*PREDICT)
    assert code == 3
    assert "notes" in error


def test_verify_of_a_folder_loads_no_torch(folder: Path) -> None:
    program = "import sys; from dpllm.cli import main; code = main(['verify', 'classifier']); print(code, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines()[-1] == "0 False"


def test_a_planned_budget_admits_what_a_dry_run_sealed(say: Say) -> None:
    with open_ledger("l.sqlite") as book:
        budgets.set_budget(book, "notes", Budget(25.0, 1e-6, "who", "zero_out", by="a", reason="b"))
    code, printed, _ = say(*CLUSTERS, "--dry-run", "--json")
    assert code == 3
    Path("plan.json").write_text(printed)
    seal = ["ledger", "seal", "notes", "plan.json", "--ledger", "l.sqlite", "--by", "a", "--reason", "b"]
    assert main(seal) == 0
    assert say(*CLUSTERS)[0] == 0
    assert say(*CLUSTERS, "--output", "more")[0] == 3


def test_another_encoder_classifies_nothing(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["classify", str(folder), "rows.jsonl", "--encoder", str(tiny.save_model(tmp_path / "tiny"))]) == 2
    assert "is of an encoder with" in capsys.readouterr().err


def test_a_tokenizer_with_more_tokens_than_its_model_is_refused_whatever_the_texts(say: Say) -> None:
    """A mutant reads texts until one has such a token, and ends with an error that tells of it."""
    tiny.save_model(Path("more"))
    tokenizer = loading.load_tokenizer(ModelConfig(name_or_path="more"))
    tokenizer.add_tokens([f"zebra{number}" for number in range(1000)])
    tokenizer.save_pretrained("more")
    code, _, error = say(*CLUSTERS, "--encoder", "more")
    assert (code, entries()) == (2, 0)
    assert "the tokenizer knows" in error


def test_declared_values_are_read_as_the_data_are(say: Say) -> None:
    write([{**row, "label": 1.0 if row["label"] == "yes" else 2.0} for row in rows()])
    assert say("--predict", "label", "--values", "1.0,2.0")[0] == 0
    value = released("classifier").releases[0].value or {}
    assert set(value) == {"1", "2", "other"}
    assert abs(value["other"]) < value["1"]
