"""Manifests of canaries: what a stranger may write, what is refused, and what follows without coins or references."""

import json
import random
from types import SimpleNamespace

import numpy as np
import pytest
from score_tables import row, token_table

from dpllm.auditing import attacks, outside, statistics
from dpllm.auditing.bounds import epsilon_lower_bound
from dpllm.auditing.outside import FEWEST_OUT, Manifest, read_manifest
from dpllm.canaries import canaries
from dpllm.canaries.texts import Canary
from dpllm.errors import ConfigError
from dpllm.recipe.sections import CanaryConfig, default_ways
from dpllm.statement.audit_bounds import Claim

COINS = {"coins": "independent"}
SECRET = "Sigrid Forsberg owes 4711"


def canary(number, inserted, **other):
    return {"carrier": f"{SECRET}, and no. {number} is", "secret": f"{number:08d}", "inserted": inserted, **other}


def entries(count=60, references=0):
    drawn = random.Random(1)
    made = [canary(number, bool(drawn.getrandbits(1))) for number in range(count)]
    return made + [canary(count + number, False, group=0) for number in range(references)]


def write(path, lines):
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines), "utf-8")
    return path


def refusal(path, lines):
    with pytest.raises(ConfigError) as caught:
        read_manifest(write(path, lines))
    assert caught.value.exit_code == 2
    assert "sigrid" not in str(caught.value).casefold()
    return str(caught.value)


def test_a_stranger_writes_one_object_a_line(tmp_path):
    lines = [COINS, *entries(60, references=30), ""]
    result = read_manifest(write(tmp_path / "m.jsonl", lines))
    assert (len(result.canaries), len(result.references)) == (60, 30)
    assert (result.independent_coins, result.commitment) == (True, None)
    for entry, read in zip(lines[1:61], result.canaries, strict=True):
        assert (entry["carrier"], entry["secret"], entry["inserted"]) == (read.carrier, read.secret, read.inserted)
        assert read.group == 1
    assert {item.group for item in result.references} == {0}
    names = [item.canary_id for item in (*result.canaries, *result.references)]
    assert len(set(names)) == 90


def test_coins_are_independent_only_where_the_file_says_so_and_nothing_contradicts_it(tmp_path):
    assert not read_manifest(write(tmp_path / "m.jsonl", entries())).independent_coins
    for header in ({"coins": "half"}, {"coins": "Independent?"}, {"coins": 1}, {"coins": "independent", "seed": 1}):
        assert "line 1 is not a canary" in refusal(tmp_path / "m.jsonl", [header, *entries()])
    lines = [canary(number, number >= 25) for number in range(200)]
    assert "175 of 200" in refusal(tmp_path / "m.jsonl", [COINS, *lines])
    assert not read_manifest(write(tmp_path / "m.jsonl", lines)).independent_coins


def test_the_manifest_of_a_run_is_checked_against_its_commitment(tmp_path):
    plan = canaries.plan_canaries(CanaryConfig(groups={1: 40, 4: 20}, references=100), generator=random.Random(0))
    path = tmp_path / "canaries.json"
    canaries.save(plan, path)
    result = read_manifest(path)
    assert (result.canaries, result.references) == (plan.canaries, plan.references)
    assert (result.independent_coins, result.commitment) == (True, plan.commitment)
    value = json.loads(path.read_text())
    value["canaries"][0]["inserted"] = not value["canaries"][0]["inserted"]
    path.write_text(json.dumps(value))
    with pytest.raises(ConfigError, match="commitment"):
        read_manifest(path)


NO_SECRET = [{"secret": "1"}, {"secret": "1", "inserted": 1}, {"inserted": True}]
NO_SECRET += [{"secret": secret, "inserted": True} for secret in (" ", "half of a character: \ud800")]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        *((line, "line 5 is not a canary") for line in ('{"carrier": "Sigrid', '["Sigrid"]')),
        *(({"carrier": SECRET, **more}, "line 5 is not a canary") for more in NO_SECRET),
        *((canary(99, True, group=group), "line 5 is not a canary") for group in ("1", 10**9, -1, True, 0)),
        (canary(99, True, repetitions=4), "line 5 is not a canary"),
        ({"text": SECRET, "inserted": True}, "of a whole text, the last words are the secret"),
        (canary(9, True), "1 canaries have the same text as another one"),
    ],
)
def test_a_line_that_is_no_canary_is_refused_by_its_number(tmp_path, line, message):
    lines = [COINS, *entries()]
    assert message in refusal(tmp_path / "m.jsonl", [*lines[:4], line, *lines[5:]])


def test_files_without_canaries_are_refused(tmp_path):
    for lines in ([], [COINS], [{**entry, "inserted": False} for entry in entries()]):
        assert "0 canaries were inserted" in refusal(tmp_path / "m.jsonl", lines)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "none.jsonl", tmp_path, tmp_path / "binary"):
        with pytest.raises(ConfigError, match="cannot be read"):
            read_manifest(path)


def test_canaries_that_were_never_inserted_are_refused(tmp_path):
    plan = canaries.plan_canaries(CanaryConfig(groups={1: 1}, references=100), generator=random.Random(0))
    while plan.canaries[0].inserted:
        plan = canaries.redraw_coins(plan)
    canaries.save(plan, tmp_path / "canaries.json")
    with pytest.raises(ConfigError, match="0 canaries were inserted"):
        read_manifest(tmp_path / "canaries.json")


def test_too_few_texts_to_compare_with_are_refused(tmp_path):
    few = [canary(number, number >= FEWEST_OUT - 1) for number in range(60)]
    assert f"and {FEWEST_OUT - 1} were not" in refusal(tmp_path / "m.jsonl", few)
    planted = [canary(number, True) for number in range(FEWEST_OUT, 60)]
    for more in ({}, {"group": 0}):
        left_out = [canary(number, False, **more) for number in range(FEWEST_OUT)]
        read_manifest(write(tmp_path / "m.jsonl", left_out + planted))


def test_a_group_of_which_all_were_inserted_has_references(tmp_path):
    """Without any, its exposure would be ranked among none."""
    planted = [canary(number, True, group=8) for number in range(25)]
    left_out = [canary(100 + number, False) for number in range(30)]
    assert "every canary of group 8 was inserted" in refusal(tmp_path / "m.jsonl", planted + left_out)
    for shared in ([{**entry, "group": 0} for entry in left_out], [{**entry, "group": 8} for entry in left_out]):
        read_manifest(write(tmp_path / "m.jsonl", planted + shared))


def summarise(monkeypatch, planned, claim, lift, seed, base_shift=0.0):
    """The summary of a model that gives inserted canaries ``lift`` nats, by two tokens each; and its score table."""
    draw = np.random.default_rng(seed)
    everyone = (*planned.canaries, *planned.references)
    base_S = draw.normal(-18, 2, len(everyone)) + [base_shift * one.inserted for one in everyone]
    tuned_S = base_S + draw.normal(0, 0.5, len(everyone)) + [lift * one.inserted for one in everyone]
    rows = [
        row(one.canary_id, one.group, one.inserted if one.group else None, tuned, base)
        for one, tuned, base in zip(everyone, tuned_S.tolist(), base_S.tolist(), strict=True)
    ]
    halves = (np.repeat(values_S[:, None] / 2, 2, axis=1) for values_S in (tuned_S, base_S))
    known = {"groups": tuple(row.group for row in rows), "coins": tuple(row.inserted for row in rows)}
    table = token_table(*halves, [one.canary_id for one in everyone], **known)
    monkeypatch.setattr(outside, "score_encoded", lambda *_: table)
    monkeypatch.setattr(outside, "_encode", lambda *_: None)
    monkeypatch.setattr(outside, "positions", lambda _: None)
    return outside._summary(SimpleNamespace(tuned=None, tokenizer=None), planned, claim, "text").to_json(), rows


def manifest(count=200, references=0, *, independent=True, seed=0, groups=(1,)):
    draw = random.Random(seed)
    drawn = [(n, groups[n % len(groups)], bool(draw.getrandbits(1))) for n in range(count)]
    made = tuple(Canary(f"c{n:05d}", group, f"a{n}", f"{n:08d}", coin) for n, group, coin in drawn)
    others = tuple(Canary(f"r{n:05d}", 0, f"b{n}", f"{n:08d}", inserted=False) for n in range(references))
    return Manifest(made, others, independent)


@pytest.mark.parametrize("references", [0, 150])
def test_independent_coins_carry_the_bound_with_and_without_references(monkeypatch, references, seed):
    planned = manifest(references=references)
    report, rows = summarise(monkeypatch, planned, Claim(1.0, 1e-5, "example"), 2.0, seed)
    once = [row for row in rows if row.group == 1]
    scores, coins = attacks.calibrated(once, report["epsilon_lower_bound"]["slope"]), [row.inserted for row in once]
    bound = epsilon_lower_bound(scores, coins, delta=1e-5, alpha=0.05, **default_ways(200))
    assert report["epsilon_lower_bound"]["value"] == bound.value > 1
    assert report["verdict"] == "falsified"
    inside, outside = [row for row in rows if row.inserted], [row for row in rows if not row.inserted]
    ratio = report["attacks"]["ratio"]
    assert (ratio["positives"], ratio["negatives"]) == (len(inside), len(outside))
    area = statistics.auc(attacks.ratio(inside), attacks.ratio(outside))
    assert (ratio["auc"], ratio["auc_interval"]) == (area.value, [area.low, area.high])
    exposure = report["exposure"]["1"]
    assert exposure["largest_possible"] == np.log2(references or len(outside))
    assert report["extraction"]["1"]["held_out"] == len(once) - len(inside)


@pytest.mark.parametrize("draw", [1, 8])
def test_without_references_a_canary_left_out_is_counted_once(monkeypatch, draw):
    """These draws show the attack at work (p < .001) only to somebody who counts every canary that was left out twice."""
    report, rows = summarise(monkeypatch, manifest(100), Claim(1.0, 1e-5, "example"), 0.3, draw)
    left_out = [row for row in rows if not row.inserted]
    ratios = attacks.ratio([row for row in rows if row.inserted]), attacks.ratio(left_out)
    assert statistics.rank_sum_p_value(*ratios) > 0.001
    assert report["verdict"] == "inconclusive"
    assert "seen to work nowhere" in report["verdict_reason"]
    assert report["controls"]["positive"] is None
    assert report["attacks"]["ratio"]["negatives"] == len(left_out)


@pytest.mark.parametrize("references", [0, 150])
def test_without_independent_coins_there_is_no_bound_and_no_verdict(monkeypatch, references, seed):
    planned = manifest(references=references, independent=False, groups=(1, 1, 1, 16))
    report, _ = summarise(monkeypatch, planned, None, 8.0, seed)
    assert {report["epsilon_lower_bound"][name] for name in ("value", "ceiling", "num_canaries")} == {0}
    assert {seen["test"] for seen in report["repeated"].values()} == {None}
    assert report["verdict"] == "no_claim"
    assert '{"coins": "independent"}' in report["verdict_reason"]
    assert report["attacks"]["ratio"]["auc"] == 1.0
    assert report["exposure"]["16"]["mean"] > 4
    assert not report["controls"]["base_separates"]


def test_without_coins_a_shift_is_said(monkeypatch, seed):
    report, _ = summarise(monkeypatch, manifest(independent=False), None, 0.0, seed, base_shift=6.0)
    assert report["controls"]["base_separates"]


def test_repeated_canaries_are_judged_without_references_too(monkeypatch, seed):
    planned = manifest(300, groups=(1, 1, 4))
    report, rows = summarise(monkeypatch, planned, Claim(0.3, 1e-5, "example"), 6.0, seed)
    assert report["repeated"]["4"]["test"] is not None
    left_out = sum(row.group == 4 and not row.inserted for row in rows)
    assert report["repeated"]["4"]["attacks"]["ratio"]["negatives"] == left_out
    assert json.dumps(report["repeated"], allow_nan=False)
