"""What a comparison shows, refuses, and where it may lie."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from dpllm.config import RunConfig, dump_config
from dpllm.errors import ConfigError
from dpllm.report.compare import Comparison, compare
from dpllm.rundir import RunDir, write_json

Json = dict[str, Any]
HASHES = {False: "aa" * 32, True: "bb" * 32}
SPENT = 2.9973841290312


def recipe(enabled: bool, **sections: Json) -> Json:
    base: Json = {
        "model": {"name_or_path": "builtin:tiny"},
        "data": {"train": "builtin:clinic", "eval": "builtin:clinic/eval", "public": True, "eval_public": True},
        "privacy": {"enabled": enabled, "epsilon": 3.0},
        "train": {"steps": 100, "learning_rate": 1e-3 if enabled else 5e-4},
        "audit": {"canaries": {"groups": {1: 200, 4: 20, 16: 20}}},
        "output_dir": f"runs/{'dp' if enabled else 'baseline'}",
    }
    for name, section in sections.items():
        base[name] = {**base[name], **section}
    return base


def measured_audit(enabled: bool, digest: str) -> Json:
    exposure, extraction = {}, {}
    figures = {"1": (2.9, 1.5, 4, 0, 99), "4": (7.4, 1.7, 8, 0, 11), "16": (9.97, 2.4, 9, 1, 9)}
    for group, (high, low, many, few, planted) in figures.items():
        exposure[group] = {
            "mean": low if enabled else high,
            "null_mean": 1.44,
            "p_value": 0.3,
            "maximum": 9.9,
            "base_mean": 1.41,
            "inserted": planted,
        }
        extraction[group] = {
            "inserted": planted,
            "tuned": few if enabled else many,
            "base": 0,
            "held_out": 10,
            "held_out_tuned": 0,
        }
    attack = {
        "group": 1,
        "auc": 0.531 if enabled else 0.842,
        "auc_interval": [0.45, 0.612] if enabled else [0.784, 0.9],
        "confidence": 0.95,
        "tpr_at_1_percent_fpr": 0.02,
        "tpr_interval": [0.002, 0.07],
        "positives": 99,
        "negatives": 101,
    }
    bound = {"value": 0.12 if enabled else 2.4, "alpha": 0.05, "delta": 1e-5, "ceiling": 2.756, "method": "one-run"}
    return {
        "claim": {"epsilon": SPENT, "delta": 1e-5} if enabled else None,
        "canaries": {"digits": 8, "groups": {}, "references": 1000, "commitment": "c0" * 32},
        "attacks": {"ratio": attack, "loss": {**attack, "auc": 0.7}},
        "exposure": exposure,
        "extraction": extraction,
        "epsilon_lower_bound": bound,
        "verdict": "consistent",
        "verdict_reason": "",
        "audits_run": 1,
        "weights": {"adapter_model.safetensors": digest},
    }


def make_run(
    root: Path,
    enabled: bool,
    sections: dict[str, Json] | None = None,
    record: Json | None = None,
    summary: Json | None = None,
    audit: bool = True,
) -> RunDir:
    run = RunDir(root)
    run.make()
    config = RunConfig.model_validate(recipe(enabled, **(sections or {})))
    run.config.write_text(dump_config(config), encoding="utf-8")
    write_json(
        run.run,
        {
            "status": "completed",
            "guarantee": {"holds": enabled, "reason": None},
            "epsilon_spent": SPENT if enabled else None,
            "delta": 1e-5 if enabled else None,
            "model": {"name_or_path": "builtin:tiny", "commit": None},
            "artifacts": {"adapter_model.safetensors": HASHES[enabled]},
            **(record or {}),
        },
    )
    write_json(
        run.private / "summary.json",
        {
            "eval_loss_before": 3.912,
            "eval_loss_after": 2.377 if enabled else 1.954,
            "eval_tokens": 15023,
            **(summary or {}),
        },
    )
    if enabled:
        write_json(run.plan, {"epsilon": SPENT, "delta": 1e-5, "canary_commitment": "c0" * 32})
    if audit:
        write_json(run.audit_dir(enabled) / "audit.json", measured_audit(enabled, HASHES[enabled]))
    return run


@pytest.fixture
def runs(tmp_path: Path) -> tuple[RunDir, RunDir]:
    return make_run(tmp_path / "baseline", False), make_run(tmp_path / "dp", True)


def rows(result: Comparison) -> dict[str, tuple[str, str, str]]:
    return {row.measure: (row.base, row.baseline, row.dp) for row in result.rows}


def files(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


def test_each_figure_stands_in_its_own_column(runs: tuple[RunDir, RunDir]) -> None:
    shown = rows(compare(*runs))
    assert shown["Held-out loss (nats per target token)"] == ("3.912", "1.954", "2.377")
    assert shown["Epsilon"] == ("-", "no guarantee", "2.998 (delta 1e-05)")
    assert shown["Canary exposure in bits, 16 copies (no memory: 1.44)"] == ("1.41", "9.97", "2.40")
    assert shown["Canaries extracted, 1 copy"] == ("0 of 99", "4 of 99", "0 of 99")
    assert shown["AUC, ratio attack, 1 copy (95% interval)"] == ("-", "0.84 (0.78, 0.90)", "0.53 (0.45, 0.61)")
    assert shown["Epsilon lower bound (95% confidence)"] == ("-", "2.40 (ceiling 2.76)", "0.12 (ceiling 2.76)")


def test_the_largest_group_comes_first(runs: tuple[RunDir, RunDir]) -> None:
    exposures = [measure for measure in rows(compare(*runs)) if measure.startswith("Canary exposure")]
    assert [measure.split(", ")[1].split()[0] for measure in exposures] == ["16", "4", "1"]


def test_table_shows_every_row(runs: tuple[RunDir, RunDir]) -> None:
    result = compare(*runs)
    console = Console(file=io.StringIO(), width=140)
    console.print(result.table())
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for row in result.rows:
        assert row.measure in text
        assert row.dp in text
    assert "Do not publish" in text


def test_files_are_private_and_nothing_is_exported(runs: tuple[RunDir, RunDir]) -> None:
    baseline, dp = runs
    exported = files(baseline.export), files(dp.export)
    result = compare(baseline, dp)
    assert result.output == dp.private / "compare"
    assert files(result.output) == {"comparison.json", "comparison.md", "comparison.png"}
    assert result.output.stat().st_mode & 0o077 == 0
    assert (files(baseline.export), files(dp.export)) == exported
    assert (result.output / "comparison.png").read_bytes().startswith(b"\x89PNG")
    written = json.loads((result.output / "comparison.json").read_text())
    assert written["loss"] == {"base": 3.912, "baseline": 1.954, "dp": 2.377}
    assert written["epsilon"] == SPENT


@pytest.mark.parametrize("place", ["baseline/export", "dp/export/audit", "dp/private/../export/x"])
def test_output_in_a_published_directory_is_refused(runs: tuple[RunDir, RunDir], tmp_path: Path, place: str) -> None:
    before = files(tmp_path)
    with pytest.raises(ConfigError, match="export/"):
        compare(*runs, output=tmp_path / place)
    assert files(tmp_path) == before


def test_another_output_is_taken(runs: tuple[RunDir, RunDir], tmp_path: Path) -> None:
    compare(*runs, output=tmp_path / "elsewhere")
    assert files(tmp_path / "elsewhere") == {"comparison.json", "comparison.md", "comparison.png"}


def test_the_runs_cannot_be_swapped(runs: tuple[RunDir, RunDir]) -> None:
    with pytest.raises(ConfigError, match="not the baseline"):
        compare(runs[1], runs[0])
    with pytest.raises(ConfigError, match="not the baseline"):
        compare(runs[1], runs[1])
    with pytest.raises(ConfigError, match="not the DP run"):
        compare(runs[0], runs[0])


@pytest.mark.parametrize(
    ("sections", "key"),
    [
        ({"model": {"name_or_path": "org/other"}}, "model.name_or_path"),
        ({"model": {"dtype": "bfloat16"}}, "model.dtype"),
        ({"data": {"train": "org/other"}}, "data.train"),
        ({"data": {"eval": "org/other"}}, "data.eval"),
        ({"data": {"max_length": 64}}, "data.max_length"),
        ({"audit": {"canaries": {"groups": {1: 100}}}}, "audit.canaries.groups.1"),
        ({"audit": {"canaries": {"digits": 6}}}, "audit.canaries"),
    ],
)
def test_other_model_data_or_canaries_are_refused(tmp_path: Path, sections: dict[str, Json], key: str) -> None:
    dp = make_run(tmp_path / "dp", True, sections)
    with pytest.raises(ConfigError, match=key.replace(".", r"\.")):
        compare(make_run(tmp_path / "baseline", False), dp)


def test_other_commit_or_evaluation_tokens_are_refused(tmp_path: Path) -> None:
    baseline = make_run(tmp_path / "baseline", False)
    with pytest.raises(ConfigError, match=r"model\.commit"):
        compare(baseline, make_run(tmp_path / "a", True, record={"model": {"name_or_path": "x", "commit": "5c"}}))
    with pytest.raises(ConfigError, match="eval_tokens"):
        compare(baseline, make_run(tmp_path / "b", True, summary={"eval_tokens": 3}))


def test_other_settings_are_listed(tmp_path: Path) -> None:
    dp = make_run(tmp_path / "dp", True, {"train": {"steps": 150}, "data": {"public_size": 4000}})
    result = compare(make_run(tmp_path / "baseline", False), dp)
    assert result.differences["train.steps"] == (100, 150)
    assert result.differences["data.public_size"] == (None, 4000)
    assert result.differences["privacy.enabled"] == (False, True)
    assert "output_dir" not in result.differences
    assert "| train.steps | 100 | 150 |" in (result.output / "comparison.md").read_text()


def test_a_missing_or_foreign_audit_is_refused(tmp_path: Path) -> None:
    baseline = make_run(tmp_path / "baseline", False)
    with pytest.raises(ConfigError, match="dpllm audit"):
        compare(baseline, make_run(tmp_path / "a", True, audit=False))
    other = {"artifacts": {"adapter_model.safetensors": "ff" * 32}}
    with pytest.raises(ConfigError, match="other weights"):
        compare(baseline, make_run(tmp_path / "b", True, record=other))
    with pytest.raises(ConfigError, match="refused"):
        compare(baseline, make_run(tmp_path / "c", True, record={"status": "refused"}))


def test_without_canaries_loss_and_epsilon_are_compared(tmp_path: Path) -> None:
    sections = {"audit": {"canaries": None}}
    nothing = {"eval_loss_before": None, "eval_loss_after": None, "eval_tokens": None}
    result = compare(
        make_run(tmp_path / "baseline", False, sections, audit=False, summary=nothing),
        make_run(tmp_path / "dp", True, sections, audit=False, summary=nothing),
    )
    assert [row.measure for row in result.rows] == ["Held-out loss (nats per target token)", "Epsilon"]
    assert result.rows[0].dp == "not measured"


def test_a_broken_guarantee_shows_no_epsilon(tmp_path: Path) -> None:
    dp = make_run(tmp_path / "dp", True, record={"guarantee": {"holds": False, "reason": "the noise was seeded"}})
    result = compare(make_run(tmp_path / "baseline", False), dp)
    assert rows(result)["Epsilon"] == ("-", "no guarantee", "no guarantee")
    assert result.guarantee == "the noise was seeded"
    assert "the noise was seeded" in (result.output / "comparison.md").read_text()


def test_a_group_in_which_no_coin_said_in_is_compared(tmp_path: Path) -> None:
    """Of four candidates all stay out in one run of sixteen; nothing can then be measured, and nothing may break."""
    runs = make_run(tmp_path / "baseline", False), make_run(tmp_path / "dp", True)
    path = runs[1].audit_dir(True) / "audit.json"
    audit = json.loads(path.read_text())
    for seen in audit["exposure"].values():
        seen.update(mean=None, maximum=None, base_mean=None, p_value=None, inserted=0)
    for got in audit["extraction"].values():
        got.update(inserted=0, tuned=0, base=0)
    write_json(path, audit)
    result = compare(*runs)
    assert (result.output / "comparison.png").exists()
    assert {row.dp for row in result.rows if "exposure" in row.measure} == {"not measured"}
