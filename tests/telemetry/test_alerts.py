"""The alerts of ops/prometheus: valid, tested by promtool, about metrics that exist, and none of their tests is idle."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from ledger_stores import budget, reserve

from dpllm.ledger import Ledger, budgets
from dpllm.telemetry.metrics import GAUGES, ledger_families

OPS = Path(__file__).parents[2] / "ops" / "prometheus"
RULES = yaml.safe_load((OPS / "alerts.yml").read_text("utf-8"))["groups"][0]["rules"]
TESTS = yaml.safe_load((OPS / "alerts_test.yml").read_text("utf-8"))["tests"]


def promtool(*arguments: object) -> subprocess.CompletedProcess[str]:
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("promtool is not installed: apt-get install prometheus")
    return subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, timeout=60)


def test_the_rules_are_valid() -> None:
    answer = promtool("check", "rules", OPS / "alerts.yml")
    assert (answer.returncode, answer.stderr) == (0, ""), answer.stdout


def test_the_rules_pass_their_tests() -> None:
    answer = promtool("test", "rules", OPS / "alerts_test.yml")
    assert answer.returncode == 0, answer.stderr


@pytest.mark.full
@pytest.mark.parametrize(
    ("rule", "broken"),
    [
        ("dp_training_budget_used > 0.9", "dp_training_budget_used > 0.96"),
        ("dp_training_budget_used > 0.9", "dp_training_budget_used > 0.5"),
        ('{state="running"} > 3600', "> 3600"),
        ('{state="running"} > 3600', '{state="running"} > 60'),
        ("> 86400", "> 100000"),
        ("dp_audit_epsilon_lower_bound > dp_stated_epsilon", "dp_audit_epsilon_lower_bound >= dp_stated_epsilon"),
        ("dp_audit_epsilon_lower_bound > dp_stated_epsilon", "dp_audit_epsilon_lower_bound > 3"),
        (" and dp_membership_inference_auc_lower > 0.5", ""),
        ("dp_membership_inference_auc > 0.60", "dp_membership_inference_auc > 0.55"),
        ("for: 10m", "for: 1m"),
        ("> 0.90", ">= 0.90"),
        ("dp_ledger_chain_valid == 0", "dp_ledger_chain_valid == 1"),
    ],
)
def test_a_rule_that_is_changed_fails_its_tests(rule: str, broken: str, tmp_path: Path) -> None:
    text = (OPS / "alerts.yml").read_text("utf-8")
    assert text.count(rule) == 1
    (tmp_path / "alerts.yml").write_text(text.replace(rule, broken), encoding="utf-8")
    shutil.copy(OPS / "alerts_test.yml", tmp_path)
    assert promtool("check", "rules", tmp_path / "alerts.yml").returncode == 0
    assert promtool("test", "rules", tmp_path / "alerts_test.yml").returncode == 1


def test_every_alert_is_seen_to_fire_and_not_to_fire() -> None:
    fires, quiet = set(), set()
    for case in TESTS:
        for moment in case["alert_rule_test"]:
            (fires if moment["exp_alerts"] else quiet).add(moment["alertname"])
            if len(case["input_series"]) > 1 and moment["exp_alerts"]:  # another series, for which it must not
                quiet.add(moment["alertname"])
    assert fires == quiet == {rule["alert"] for rule in RULES}


def test_alerts_are_about_metrics_that_exist(tmp_path: Path) -> None:
    with Ledger(tmp_path / "ledger.sqlite") as book:
        budgets.set_budget(book, "notes", budget(8.0))
        reserve(book)
        families = ledger_families(book)
    metric_names = {sample.name for family in families for sample in family.samples} | set(GAUGES)
    for rule in RULES:
        names_in_rule = set(re.findall(r"\bdp_\w+", rule["expr"] + " " + rule["annotations"]["description"]))
        assert names_in_rule, rule["alert"]
        assert names_in_rule <= metric_names, rule["alert"]
        assert rule["labels"]["severity"] in ("page", "warn")


def test_what_contradicts_a_promise_wakes_somebody() -> None:
    pages = {rule["alert"] for rule in RULES if rule["labels"]["severity"] == "page"}
    assert pages == {"DPAuditContradictsClaim", "DPLedgerChainBroken"}
