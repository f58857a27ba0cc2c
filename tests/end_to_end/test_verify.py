"""Verification of a real run: whatever is changed in what the card states is seen, and nothing else is."""

from __future__ import annotations

import contextlib
import importlib
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import published
import pyarrow as pa
import pytest
from forging import Subject, others, survivors
from published import carry, changed, failing, get, leaves, other, read, rehash, write
from pyarrow import parquet
from running import Place, done, dpllm_, edit_json
from safetensors.numpy import load_file, save_file

from dpllm import files
from dpllm.card.artifact import MODEL
from dpllm.errors import ConfigError
from dpllm.run.directory import RunDir
from dpllm.verification.verify import verify


def test_an_honest_run_verifies(run: Path) -> None:
    verification = verify(run)
    assert not verification.failed
    names = {check.name for check in verification.checks if check.status == "verified"}
    assert names >= {"card", "files", "epsilon", "audit: statistics", "ledger", "ledger: entry", "run"}
    asserted = {check.name for check in verification.checks if check.status == "asserted"}
    assert {"training", "signature", "audit: what needs the models", "text of the author"} <= asserted


def test_what_the_gallery_holds_of_a_run_verifies_as_it_lies_there(
    run: Path, baseline: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "scripts"))
    copy = importlib.import_module("model_cards").copy
    for item in (run, baseline.run):
        card = copy(RunDir(item), tmp_path / item.parent.name)
        done("verify", card / "export")
        done("verify", card)


def test_the_command_prints_every_check_and_answers_4(run: Path) -> None:
    printed = done("verify", run).out
    assert printed.count("\nverified") > 15
    assert "asserted  signature: unsigned: integrity, not authenticity" in printed
    (run / "export" / "tokenizer.json").write_text("{}", encoding="utf-8")
    bad = dpllm_("verify", run, "--json")
    assert bad.code == 4
    assert "does not verify" in bad.err
    answer = json.loads(bad.out)
    assert answer["failed"]
    assert answer["path"] == str(run)
    assert json.loads(dpllm_("verify", run / "export", "--json").out)["path"] == str(run / "export")
    assert answer["counts"]["failed"] == len([check for check in answer["checks"] if check["status"] == "failed"])


# Every column, every weight; tests/verification/test_forged_releases.py has every field, line and file.


COLUMNS: dict[str, Callable[[Any], Any]] = {
    "canary_id": lambda name: name.replace("c", "d"),
    "group": lambda group: {1: 4, 4: 1}[group],
    "inserted": lambda coin: not coin,
    "tuned_log_prob": lambda value: value * 1.0001,
    "base_log_prob": lambda value: value * 1.0001,
    "tuned_argmax": lambda chosen: not chosen,
    "base_argmax": lambda chosen: not chosen,
    "secret": lambda of_secret: not of_secret,
    "word": lambda number: number // 2,
}


def _replaced(table: pa.Table, column: str, values: list[Any]) -> pa.Table:
    assert values != table[column].to_pylist()
    return table.set_column(table.column_names.index(column), column, [values])


def _changed_column(table: pa.Table, column: str) -> pa.Table:
    pairs = zip(table[column].to_pylist(), table["group"].to_pylist(), strict=True)
    return _replaced(table, column, [COLUMNS[column](value) if group else value for value, group in pairs])


def _raised_carriers(table: pa.Table) -> pa.Table:
    columns = (table[name].to_pylist() for name in ("tuned_log_prob", "inserted", "secret"))
    raised = [value / 2 if coin and not secret else value for value, coin, secret in zip(*columns, strict=True)]
    return _replaced(table, "tuned_log_prob", raised)


FORGED_SCORES: dict[str, Callable[[pa.Table], pa.Table]] = {
    **{column: partial(_changed_column, column=column) for column in COLUMNS},
    "scores of carriers alone": _raised_carriers,
    "secrets alone, as of version 1": lambda table: table.filter(table["secret"]).drop_columns(["secret", "word"]),
    "a column of text": lambda table: table.append_column("text", table["canary_id"]),
}


@pytest.mark.parametrize("forgery", FORGED_SCORES)
def test_forged_scores_are_seen(export: Path, forgery: str) -> None:
    """By the hash of the file; and, carried into the card, by what audit.json says."""
    path = export / "audit" / "tokens.parquet"
    parquet.write_table(FORGED_SCORES[forgery](parquet.read_table(path)), path)
    assert "files" in failing(export)
    rehash(export, "audit/tokens.parquet")
    failed = failing(export)
    assert any(name.startswith("audit") for name in failed) if forgery in COLUMNS else "audit" in failed


def test_every_changed_number_of_the_audit_is_seen(export: Path) -> None:
    """Carried into the statement, hashes and card: what follows from the scores is computed again."""
    path = export / "audit" / "audit.json"
    report, block = json.loads(path.read_text("utf-8")), read(export)
    asserted = ["shadows", "audits_run", "controls.words", "controls.twin"]
    asserted += ["canaries.log2_secrets", "canaries.settings.tokens"]
    names = {where: ".".join(map(str, where)) for where in leaves(report)}
    chosen = [where for where, name in names.items() if not name.startswith(tuple(asserted))]
    chosen = [where for number, where in enumerate(chosen) if number % 25 == 0 or len(where) == 1]
    counts = ("canaries", "references"), ("canaries", "settings", "references"), ("canaries", "settings", "groups", "1")
    for where in [*chosen, *counts, ("weights",), ("published",)]:
        forged = changed(report, where, other)
        path.write_text(json.dumps(forged), encoding="utf-8")
        with contextlib.suppress(ConfigError):  # no card can be made of some
            carry(export, {**block, "audit": forged})
            rehash(export, "audit/audit.json")
        assert any(name.startswith("audit") for name in failing(export)), where


def test_a_note_in_the_report_of_an_audit_is_seen(export: Path) -> None:
    edit_json(export / "audit" / "audit.json", note="text of somebody")
    rehash(export, "audit/audit.json")
    assert "audit" in failing(export)


def test_changed_weights_are_seen(run: Path) -> None:
    path = run / "export" / "adapter_model.safetensors"
    tensors = load_file(path)
    for tensor in tensors.values():
        tensor += 1e-3
    save_file(tensors, path)
    assert "files" in failing(run)
    assert dpllm_("verify", run).code == 4
    # With all hashes of the card renewed, the audit and the record still speak of other weights.
    rehash(run / "export", "adapter_model.safetensors")
    assert {"audit", "run"} <= failing(run)


# Whoever edits privacy.json, the front matter, the sections and the figure together.

ZEROS = "0" * 64
RECOMPUTED = {  # the fields of each check; that no other field is missed: tests/verification/test_forged_releases.py
    "epsilon": ["plan/epsilon", "plan/accountant/name"],
    "record": [
        *("steps/planned", 'steps={"planned": 5, "taken": 5}', "plan/target_epsilon=1.0", "randomness/secure_noise"),
        'released="model weights"',
    ],
    "without amplification": ["plan/without_amplification"],
    "other accountants": ["plan/accountants/pld", "plan/accountants/rdp"],
    "cross-check": ["plan/cross_check/epsilon", "plan/cross_check=null"],
    "limits of attackers": ["plan/limits/auc=0.9", "plan/limits/gdp_mu", "plan/curve/0/1", "plan/trade_off/3/1"],
    "files": [f'files/tokenizer.json="{ZEROS}"'],
    "card": ["plan/definition", "base_model/covered", "plan/event/count", "plan/delta=0.5", "plan/num_steps"],
    "audit": [
        *('audit/verdict="no_claim"', "audit/epsilon_lower_bound/value", "audit/exposure/1/mean", "plan/canary_slots"),
        *(f'audit/canaries/commitment="{ZEROS}"', "audit/audits_run", f'plan/canary_commitment="{ZEROS}"'),
        *("plan/unit", "plan/audit/alpha", "plan/audit=null"),
    ],
    "ledger": ["composed/delta", "composed/used=0.1", "composed/spent_epsilon=1.0"],
}  # fmt: skip


@pytest.mark.parametrize("numbers", [{"noise_multiplier": 9.0}, {"num_steps": 2}, {"dataset_size": 900}], ids=str)
def test_another_mechanism_costs_another_epsilon(export: Path, numbers: published.Json) -> None:
    """Also where event and numbers agree."""
    carry(export, published.replanned(read(export), **numbers))
    assert "epsilon" in failing(export)


@pytest.mark.parametrize(
    ("check", "field"), [(check, field) for check, fields in RECOMPUTED.items() for field in fields], ids=str
)
def test_what_can_be_computed_again_cannot_be_forged(export: Path, check: str, field: str) -> None:
    """By the check that is about it, whatever else sees it."""
    name, _, value = field.partition("=")
    where = tuple(int(key) if key.isdecimal() and "exposure" not in name else key for key in name.split("/"))
    block = read(export)
    forged = json.loads(value) if value else other(get(block, where))
    block = changed(block, where, lambda _: forged)
    try:
        carry(export, block)
    except ConfigError:  # no section can be rendered from it
        write(export, block)
    assert check in failing(export)


def test_every_field_of_the_ledger_is_compared_with_it(export: Path, finished: Place) -> None:
    subject = Subject(MODEL, export, ledger=str(finished.ledger))
    release = replace(subject.opened(), hashes=files.hashes(export, files.UNHASHED))
    assert survivors(subject, release, "composed") == set()


def test_without_an_audit_each_field_of_the_plan_is_computed_again_or_named(export: Path, tmp_path: Path) -> None:
    export = published.copy(export, tmp_path / "export")
    block = read(export)
    files_of_model = {name: digest for name, digest in block["files"].items() if not name.startswith("audit/")}
    block |= {"audit": None, "files": files_of_model}
    shutil.rmtree(export / "audit")
    carry(export, block)
    assert not failing(export)
    lines = " ".join(check.detail for check in verify(export).checks if check.status == "asserted")
    for where in leaves(block["plan"]):
        field = str(where[0])
        if re.search(rf"\b{field}\b", lines) or where[0] == "cross_check":
            continue
        for value in others(("plan", *where), get(block["plan"], where), {}):
            forged = changed(block, ("plan", *where), lambda _, new=value: new)
            try:
                carry(export, forged)
            except ConfigError:
                write(export, forged)
            assert failing(export), where
    named = ("canary_slots", "canary_commitment", "audit of the Plan", "target_epsilon", "max_grad_norm")
    assert all(field in lines for field in named)


def test_what_ran_without_a_guarantee_is_checked_too(export: Path) -> None:
    block = read(export)
    block |= {"guarantee": False, "reason": "a test", "attempted": block.pop("plan"), "lineage": None}
    (export / "privacy.svg").unlink()
    del block["files"]["privacy.svg"]
    carry(export, block)
    before = failing(export)
    lattice = {**block["randomness"]["lattice"], "noise_over_max_grad_norm": 50.0}
    for key, value in (("lattice", lattice), ("secure_noise", False)):
        carry(export, changed(block, ("randomness", key), lambda _, new=value: new))
        assert failing(export) - before, key
    with pytest.raises(ConfigError, match="randomness and attempted"):
        carry(export, {**block, "randomness": None})


def test_the_command_prints_asserted_beside_each_field_that_nobody_can_check(export: Path) -> None:
    lines = [line for line in dpllm_("verify", export).out.splitlines() if line.startswith("asserted  ")]
    for field in ("software", "hardware", "date", "tuning", "contact", "optimizer", "max_grad_norm", "randomness"):
        assert any(field in line for line in lines), field
    assert not any(re.search(r"\bepsilon,|trade_off", line) for line in lines)


@pytest.mark.parametrize("where", ["plan/trade_off/3/1", "plan/without_amplification"])
def test_a_figure_of_four_digits_cannot_move_in_a_later_one(export: Path, where: str) -> None:
    path = tuple(int(key) if key.isdecimal() else key for key in where.split("/"))
    for factor in (1 + 5e-6, 1 + 3e-7):
        carry(export, changed(read(export), path, lambda value, by=factor: value * by))
        assert failing(export) == {"limits of attackers" if len(path) > 2 else "without amplification"}
        carry(export, changed(read(export), path, lambda value, by=factor: float(f"{value / by:.4g}")))
        assert not failing(export)


def test_a_statement_of_another_accountant_may_differ_and_says_so(export: Path) -> None:
    block = changed(read(export), ("plan", "accountant", "version"), lambda _: "0.5.0")
    carry(export, changed(block, ("plan", "epsilon"), lambda value: value * 1.0001))
    assert not failing(export) & {"epsilon", "limits of attackers"}
    carry(export, changed(block, ("plan", "epsilon"), lambda value: value * 0.99))
    detail = next(check.detail for check in verify(export).checks if check.name == "epsilon")
    assert "0.5.0" in detail


def test_epsilon_and_event_cannot_be_those_of_another_run(export: Path) -> None:
    """A consistent card of fewer steps: what is left to say is that the audit tested another claim."""
    from dpllm.privacy.plan import Mechanism, Plan

    block = read(export)
    numbers = {name: block["plan"][name] for name in Mechanism.model_fields}
    plan = Plan.of(Mechanism.checked({**numbers, "num_steps": 2})).to_json()
    second = {**block["plan"]["cross_check"], "epsilon": plan["epsilon"] + 0.01}
    block |= {
        "plan": {**plan, "cross_check": second},
        "steps": {"planned": 2, "taken": 2},
        "composed": {**block["composed"], "spent_epsilon": plan["epsilon"]},
    }
    carry(export, block)
    assert failing(export) == {"audit"}


def test_a_guarantee_cannot_be_put_on_a_run_without_one(baseline: Place, tmp_path: Path) -> None:
    export = published.copy(baseline.run / "export", tmp_path / "export")
    block = read(export)
    del block["reason"]
    write(export, {**block, "guarantee": True})
    assert failing(export) == {"card"}


@pytest.mark.parametrize(
    ("where", "value"),
    [
        (("optimizer",), "sgd"), (("plan", "clipping"), "automatic"), (("plan", "max_grad_norm"), 0.5), (("data_public",), True),
        (("contact",), "x@y.z"), (("software", "torch"), "9"), (("not_covered",), ["nothing"]),
        (("plan", "neighbouring_relation"), "add_or_remove_one"), (("recipe_digest",), "0" * 64), (("date",), "2020-01-01"),
    ],
    ids=str,
)  # fmt: skip
def test_what_a_stranger_can_only_believe_is_compared_in_the_run_directory(
    run: Path, where: published.Where, value: object
) -> None:
    """docs/concepts/verification.md names these fields as asserted."""
    carry(run / "export", changed(read(run / "export"), where, lambda _: value))
    assert not failing(run / "export")
    assert "run" in failing(run)
