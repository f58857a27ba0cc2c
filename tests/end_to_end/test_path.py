"""From recipe to card: what lies where, what agrees with what, and what is never published."""

from __future__ import annotations

import io
import json
import math
import re
import shutil
import stat
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import tiny
import torch
import yaml
from published import carry, failing
from rich.console import Console
from running import NUM_ROWS, SENTINEL, STEPS, Place, calls, contents, done, dpllm_, make_place, refused, results, rows
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import dpllm
from dpllm.auditing.table import read_tokens
from dpllm.errors import NotBatchInvariant, Refused
from dpllm.ledger import Ledger
from dpllm.model import loading
from dpllm.privacy import selfcheck
from dpllm.recipe.config import load_config
from dpllm.run import loop
from dpllm.text import data

SLOTS = 20 + 4 * 4
Json = dict[str, Any]


def front_matter(place: Place) -> Json:
    return dict(yaml.safe_load(place.card.split("---")[1]))


def published(run: Path) -> dict[str, bytes]:
    return {f"export/{name}": content for name, content in contents(run / "export").items()}


LAYOUT = {
    "config.yaml plan.json run.json": "",
    "metrics.jsonl layers.json canaries.json manifest.key summary.json audits.jsonl rows.json": "private/",
    "adapter_config.json adapter_model.safetensors README.md privacy.json privacy.svg": "export/",
    "tokenizer.json tokenizer_config.json chat_template.jinja": "export/",
    "audit.json tokens.parquet": "export/audit/",
}


def test_a_run_directory_holds_what_the_design_says_and_no_more(finished: Place) -> None:
    assert contents(finished.run).keys() == {
        folder + name for names, folder in LAYOUT.items() for name in names.split()
    }


def test_private_is_for_its_owner_alone(finished: Place, baseline: Place) -> None:
    for run in (finished.run, baseline.run):
        assert stat.S_IMODE((run / "private").stat().st_mode) == 0o700
    for name in ("canaries.json", "rows.json"):
        assert stat.S_IMODE((finished.run / "private" / name).stat().st_mode) == 0o600


def test_the_data_are_read_once_copies_are_private_from_the_first_moment_and_every_weight_moves(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """N, policy and records are of one reading, and so is what trains."""
    seen = calls(monkeypatch, data, "load_table", lambda *_: stat.S_IMODE((place.run / "private").stat().st_mode))
    done("train", place.recipe)
    assert seen == [0o700]
    weights = load_file(place.run / "export" / "adapter_model.safetensors")
    assert len(weights) == 28
    assert all(bool((value != 0).all()) for name, value in weights.items() if "lora_B" in name)  # noise reaches all


def promise(shown: str) -> dict[str, Any]:
    """What ``plan --json`` shows, without what is no promise: the largest batch, the ledger's answer, advice."""
    value: dict[str, Any] = json.loads(shown)
    return {key: value[key] for key in value.keys() - {"largest_batch", "ledger", "refusals", "advice"}}


# --- what agrees -----------------------------------------------------------------------------------------------------


def test_the_plan_that_was_shown_is_the_plan_that_was_run(finished: Place) -> None:
    shown = promise((finished.root / "plan.txt").read_text())
    saved = finished.json("plan.json")
    assert {key: saved[key] for key in shown} == shown
    assert set(saved) - set(shown) == {"cross_check", "canary_commitment", "audit"}


def test_plan_and_record_agree(finished: Place) -> None:
    plan, record = finished.json("plan.json"), finished.json("run.json")
    assert (plan["schema_version"], record["schema_version"]) == (2, 2)
    assert record["status"] == "completed"
    assert record["guarantee"] == {"holds": True, "reason": None}
    assert plan["num_steps"] == record["steps_planned"] == record["steps_taken"] == STEPS
    assert plan["epsilon"] <= plan["target_epsilon"] == 8.0
    assert plan["dataset_size"] == NUM_ROWS + SLOTS
    assert plan["canary_slots"] == SLOTS
    assert plan["sampling_rate"] == plan["expected_batch_size"] / plan["dataset_size"]
    assert plan["neighbouring_relation"] == "zero_out"
    assert plan["delta"] * plan["dataset_size"] < 1
    assert plan["event"]["count"] == STEPS
    assert math.isclose(plan["cross_check"]["epsilon"], plan["epsilon"], rel_tol=0.05)


def test_the_ledger_shows_the_run(finished: Place) -> None:
    record = finished.json("run.json")["ledger"]
    with Ledger(finished.ledger) as ledger:
        assert ledger.verify(record["head"]) == []
        assert ledger.datasets() == ["notes"]
        assert ledger.run(record["entry"]).steps == STEPS
        links = [(link.kind, link.facts) for link in ledger.history("notes") if link.facts.get("status") != "running"]
        assert [kind for kind, _ in links] == ["data", "reserve", "commit"]
        assert links[0][1]["records"] == NUM_ROWS
        assert links[1][1]["entry"] == links[2][1]["entry"] == record["entry"]
        assert (links[2][1]["status"], links[2][1]["steps"]) == ("completed", STEPS)
        assert math.isclose(ledger.spent("notes"), finished.json("plan.json")["epsilon"], rel_tol=1e-6)
    table = done("ledger", "show", "--ledger", finished.ledger).out
    assert "notes" in table
    assert f"{STEPS}/{STEPS}" in table
    assert "completed" in table


def test_metrics_are_one_json_value_a_line(finished: Place) -> None:
    steps = finished.lines("private/metrics.jsonl")
    assert [line["step"] for line in steps] == list(range(1, STEPS + 1))
    layers = finished.json("private/layers.json")["layers"]
    assert all("lora_" in name for name in layers)
    assert max(len(json.dumps(line)) for line in steps) < 1000
    for line in steps:
        assert line["norm"] > 0
        assert len(line["clipped_by_layer"]) == len(layers)
        assert all(0 <= number <= line["units"] for number in line["clipped_by_layer"])


# --- what is never published -----------------------------------------------------------------------------------------


def test_no_secret_no_text_and_no_path_is_published(finished: Place, baseline: Place) -> None:
    for place in (finished, baseline):
        secret = place.json("private/canaries.json")
        canaries = [*secret["canaries"], *secret["references"]]
        words = [text for canary in canaries for text in (canary["secret"], canary["carrier"])]
        words += [secret["salt"], SENTINEL, "Sigrid", tiny.sentence(3)]
        words += [str(finished.root), str(finished.root.parent), str(finished.base), str(place.run)]
        public = {**published(place.run), "run.json": (place.run / "run.json").read_bytes()}
        for name, content in public.items():
            result = [word for word in words if word.encode() in content]
            assert result == [], (name, result)


def test_the_audit_of_a_run_without_privacy_stays_private(finished: Place, baseline: Place) -> None:
    assert not (baseline.run / "export" / "audit").exists()
    assert (baseline.run / "private" / "audit" / "audit.json").exists()
    assert not (finished.run / "private" / "audit").exists()
    coins = read_tokens(finished.run / "export" / "audit" / "tokens.parquet").coins
    assert set(coins) <= {True, False, None}
    assert coins.count(None) == 100


def test_a_run_without_privacy_claims_none(baseline: Place) -> None:
    record = baseline.json("run.json")
    assert record["status"] == "completed"
    assert record["guarantee"]["holds"] is False
    assert record["ledger"] is None
    assert not (baseline.run / "plan.json").exists()
    front = front_matter(baseline)
    assert front["privacy"]["guarantee"] is False
    assert "differential-privacy" not in front["tags"]
    assert "no differential privacy guarantee" in baseline.card.lower()


def test_a_declared_size_hides_the_real_one(tmp_path: Path, base: Path) -> None:
    real, declared = 433, 450
    changes = {"data.public_size": declared, "audit.canaries": {"groups": {1: 7}}, "privacy.noise_multiplier": 1.0}
    place = make_place(tmp_path / "hidden", base, changes)
    tiny.write_rows(place.train, rows(real))
    answer = done("train", place.recipe)
    plan = place.json("plan.json")
    assert (plan["dataset_size"], plan["neighbouring_relation"]) == (declared + 7, "add_or_remove_one")
    done("card", place.run)
    texts = {name: content.decode("utf-8", "replace") for name, content in published(place.run).items()}
    texts |= {name: (place.run / name).read_text() for name in ("plan.json", "run.json", "config.yaml")}
    texts["what is printed"] = answer.out + answer.err
    for name, text in texts.items():
        assert re.findall(rf"(?<![\w.])(?:{real}|{real + 7})(?![\w.])", text) == [], name


@pytest.mark.parametrize("public", [True, False])
def test_a_loss_on_private_evaluation_data_is_neither_printed_nor_published(place: Place, public: bool) -> None:
    held_out = tiny.write_rows(place.root / "data" / "held_out.jsonl", rows(10, start=700))
    flags = ("--data.eval", held_out, "--data.eval_public", str(public).lower())
    out = done("train", place.recipe, *flags).out
    done("card", place.run)
    losses = place.json("private/summary.json")
    for name in ("eval_loss_before", "eval_loss_after"):
        assert (f"{losses[name]:.4f}" in out) is public
    assert ("summary.json" in out) is not public
    record = place.json("run.json")
    assert (record["metrics"] == {"public": {}}) is not public
    assert any("private evaluation data" in note for note in record["deviations"]) is not public
    everything = b"".join([*published(place.run).values(), (place.run / "run.json").read_bytes()])
    assert public or f"{losses['eval_loss_after']:.3f}".encode() not in everything


# --- formats, units, adapters ----------------------------------------------------------------------------------------


def test_frozen_layers_with_automatic_clipping_run_the_same_path(place: Place) -> None:
    place.write({"adapter": {"method": "frozen", "last_blocks": 1}, "privacy.clipping": "automatic"})
    assert "automatic" in place.does("plan")
    place.does("train", "card")
    trained, before = (
        dict(AutoModelForCausalLM.from_pretrained(path).named_parameters())
        for path in (place.run / "export", place.base)
    )
    moved = {name for name, value in trained.items() if not value.equal(before[name])}
    assert moved == {name for name in before if ".layers.1." in name or name == "model.norm.weight"}
    assert (place.json("plan.json")["clipping"], place.json("run.json")["guarantee"]["holds"]) == ("automatic", True)
    assert "automatic clipping" in place.card


def test_units_with_several_rows_are_counted_once(place: Place) -> None:
    people = 10
    tiny.write_rows(place.train, [{**row, "author": f"p{n % people}"} for n, row in enumerate(rows())])
    place.write({"data.unit": "author", "data.max_examples_per_unit": 3, "train.batch_size": 2})
    done("train", place.recipe)
    plan = place.json("plan.json")
    assert (plan["dataset_size"], plan["unit"], plan["max_examples_per_unit"]) == (people, "author", 3)
    lines = place.lines("private/metrics.jsonl")
    assert all(line["units"] <= people for line in lines)
    assert place.runs()[0].reservation.unit == "author"
    shown = done("plan", place.recipe, "--output_dir", place.root / "elsewhere").out
    assert "user-level: column author" in " ".join(shown.split())
    done("card", place.run)
    assert "one `author` (all rows" in place.card


@pytest.mark.parametrize("method", ["lora", "frozen"])
def test_low_precision_is_checked_in_float32_too(place: Place, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    built = results(monkeypatch, loading, "shrunken")
    place.write({"adapter": {"method": method}, "train.precision": "bf16", "train.steps": 1, "train.epochs": None})
    done("train", place.recipe)
    (checked,) = built
    assert {p.dtype for p in checked.parameters()} == {torch.float32}
    assert not any(hasattr(module, "autograd_grad_sample_hooks") for module in checked.modules())


def test_the_record_says_that_dropout_of_the_base_was_off(tmp_path: Path) -> None:
    place = make_place(tmp_path / "place", tiny.save_model(tmp_path / "gpt2", "gpt2"), {"train.precision": "bf16"})
    shown = place.does("train")
    off = place.json("run.json")["model"]["dropout_off"]
    assert off["attn_dropout"] == off["resid_dropout"] == off["embd_pdrop"] == 0.1
    assert "dropout is off" in shown


@pytest.mark.parametrize("tokens", [256, None])
def test_passes_change_where_a_kernel_rounds_by_company(
    place: Place, monkeypatch: pytest.MonkeyPatch, tokens: int | None
) -> None:
    """Half as many tokens are tried first; where that does not help, each example has a pass of its own."""
    compared = selfcheck._check_company

    def company(subject: Any, *some: Any) -> Any:
        if subject.packing.tokens == tokens:
            return compared(subject, *some)
        raise NotBatchInvariant("act_fn rounds a row differently, so that one unit would change the others")

    monkeypatch.setattr(selfcheck, "_check_company", company)
    shown = " ".join(done("train", place.recipe).out.split())
    done("card", place.run)
    passes = f"{tokens} tokens" if tokens else "one example"
    assert f"Passes of {passes} in this run, which is slower: act_fn rounds a row differently." in shown
    assert place.json("run.json")["tokens_per_pass"] == tokens
    assert place.json("run.json")["guarantee"]["holds"]
    card = place.card
    assert f"| Batch | 8 expected{'; passes of 256 tokens' if tokens else ''} |" in card


def test_plan_and_train_give_the_same_advice_before_anything_is_spent(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.write({"train.learning_rate": 1.0, "privacy.epsilon": 500, "privacy.noise_multiplier": 0.3})
    advice = dpllm.plan(place.recipe).advice
    assert advice[0].startswith("learning rate 1 is very large")
    assert any(text.startswith("noise multiplier 0.3 is below 0.5") for text in advice)
    monkeypatch.setattr("dpllm.run.loop._reserve", Mock(side_effect=Refused("before the reservation")))
    planned, trained = (" ".join(dpllm_(command, place.recipe).out.split()) for command in ("plan", "train"))
    for text in advice:
        assert f"Advice: {text}" in planned
        assert f"Advice: {text}" in trained


def test_weights_that_are_not_finite_are_neither_exported_nor_used(place: Place, finished: Place) -> None:
    place.write({"train.learning_rate": 1.0, "train.weight_decay": 1e37})
    assert "has a value that is not finite" in refused("train", place.recipe, code=3)
    assert not list(place.run.glob("export/*.safetensors"))
    assert (place.json("run.json")["status"], place.json("run.json")["guarantee"]["holds"]) == ("interrupted", False)
    run = place.root / "copied"
    shutil.copytree(finished.run, run)
    (adapter,) = run.glob("export/*.safetensors")
    save_file({name: tensor * math.inf for name, tensor in load_file(adapter).items()}, adapter)
    answer = dpllm_("generate", run / "export", "--base", finished.base)  # of which synthesize makes its rows
    assert "has a value that is not finite" in answer.err
    with pytest.raises(Refused, match="has a value that is not finite"):  # an audit
        loading.load_for_scoring(load_config(run / "config.yaml"), run / "export", torch.device("cpu"))


@pytest.mark.parametrize("terminal", [True, False])
def test_who_sits_at_the_terminal_is_told_that_a_run_diverged_and_its_record_is_read(
    place: Place, terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A log may be read by others, and the loss of private rows carries no noise."""
    held_out = tiny.write_rows(place.root / "data" / "eval.jsonl", rows(10, start=500))
    place.write({"train.learning_rate": 1.0, "train.weight_decay": 1e9, "data.eval": str(held_out)})
    out = io.StringIO()
    out.isatty = lambda: terminal  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "__stdout__", out)
    record = loop.train(load_config(place.recipe), console=Console(file=out, width=200))
    assert ("Warning: the run has diverged" in out.getvalue()) is terminal
    assert ("loss nan (private)" in out.getvalue()) is terminal
    assert record.status == "completed"
    assert place.json("private/summary.json")["eval_loss_after"] is None
    done("card", place.run)


def test_a_fixed_noise_seed_has_no_guarantee_and_no_total_covers_such_a_run(place: Place) -> None:
    done("train", place.recipe, "--privacy.insecure_seed", 7)
    guarantee = place.json("run.json")["guarantee"]
    assert guarantee["holds"] is False
    assert "seeded by the user" in guarantee["reason"]
    done("card", place.run)
    assert "no differential privacy guarantee" in place.card.lower()
    assert "differential-privacy" not in front_matter(place)["tags"]
    second = Place(place.root / "second", place.base)
    done("train", place.recipe, "--output_dir", second.run)
    second.does("card", "verify")
    block = second.json("export/privacy.json")
    assert (block["guarantee"], block["composed"]["spent_epsilon"]) == (True, None)
    (deviation,) = block["deviations"]
    seeded = "gives no guarantee: its noise and sampling were seeded.*no figure of the ledger covers it"
    assert re.search(seeded, deviation)
    assert second.card.count("no ε covers all runs on this dataset") == 1
    assert "as if all" not in second.card
    assert f"Exception: {deviation}." in " ".join(done("ledger", "show", "--ledger", place.ledger).out.split())
    carry(second.run / "export", {**block, "composed": {**block["composed"], "spent_epsilon": 99.0}})
    assert "ledger" in failing(second.run)
