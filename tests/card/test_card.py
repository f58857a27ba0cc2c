"""What a model card must and must not say."""

import copy
import hashlib
import itertools
import json
import os
import re
import shutil
from pathlib import Path

import pytest
from cards import (
    EPSILON,
    HELD_OUT,
    HOME,
    SECRET_SEED,
    audit,
    baseline,
    baseline_record,
    body,
    broken,
    config,
    export_text,
    first_line,
    front_matter,
    make_run,
    plan,
    pointer,
    record,
    render_card,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from published import failing

from dpllm.card.card import write_card
from dpllm.errors import ConfigError
from dpllm.privacy.events import dp_sgd_event
from dpllm.privacy.noise import noise_scale
from dpllm.statement import formatting

positive = st.floats(min_value=1e-6, max_value=1e6, allow_nan=False)


def test_the_statement_carries_the_same_numbers_as_plan_and_record() -> None:
    text, block = render_card(config(), plan(), record(), audit())
    matter = front_matter(text)
    assert matter["privacy"] == pointer(block)
    fields = {**block["plan"], **block}
    assert {name: fields[name] for name in matter["privacy"].keys() - {"statement", "sha256"}} | {
        "statement": "privacy.json",
        "sha256": hashlib.sha256((json.dumps(block, indent=2, sort_keys=True) + "\n").encode()).hexdigest(),
    } == matter["privacy"]
    assert block["plan"] == plan()
    assert block["composed"]["spent_epsilon"] == 4.25
    assert block["guarantee"] is True
    gpt2 = {"name": "openai-community/gpt2", "revision": record()["model"]["commit"], "covered": False}
    assert block["base_model"] == gpt2
    assert matter["base_model"] == gpt2["name"]
    assert matter["library_name"] == "peft"
    assert matter["tags"] == ["differential-privacy", "dp-sgd", "dpllm", "lora", "clinical"]


@settings(max_examples=25, deadline=None, derandomize=True)
@given(delta=st.floats(min_value=1e-12, max_value=1e-3), sigma=positive)
def test_every_number_survives_yaml(delta: float, sigma: float) -> None:
    event = dp_sgd_event(64 / 888, sigma, 100).to_json()
    promised = {**plan(), "delta": delta, "noise_multiplier": sigma, "event": event}
    text, block = render_card(config(), promised, record(), None)
    assert front_matter(text)["privacy"] == pointer(block)
    assert front_matter(text)["privacy"]["delta"] == delta
    assert block["plan"]["noise_multiplier"] == sigma


@given(positive)
def test_a_bound_is_never_rounded_down(value: float) -> None:
    shown = float(formatting.bound(value))
    assert value <= shown <= value * 1.0011


@given(st.floats(min_value=0, max_value=1))
def test_a_limit_on_a_share_is_never_rounded_down(value: float) -> None:
    assert value <= float(formatting.percent_bound(value).rstrip("%")) / 100 + 1e-11


@pytest.mark.parametrize(
    ("relation", "says"),
    [("zero_out", "zero-out: the data of one unit replaced by nothing"), ("add_or_remove_one", "a declared number")],
)
def test_the_neighbouring_relation_is_named_in_words(relation: str, says: str) -> None:
    text, block = render_card(config(), plan(neighbouring_relation=relation), record(), None)
    assert says in text
    assert ("the number of units, which is published" in block["not_covered"]) == (relation == "zero_out")


def test_interrupted_run_states_the_whole_plan() -> None:
    text, block = render_card(config(), plan(), record(status="interrupted", steps_taken=40), audit())
    assert block["plan"]["epsilon"] == EPSILON
    assert block["steps"] == {"planned": 100, "taken": 40}
    assert "40 taken of 100 planned; interrupted" in text
    assert any("when to stop" in line for line in block["not_covered"])


def test_no_card_calls_a_model_private_or_free_of_memorisation() -> None:
    for the_audit in (None, audit(), audit(verdict="inconclusive")):
        text = render_card(config(), plan(), record(), the_audit)[0].lower()
        for wrong in ("is private", "fully private", "anonym", "no memoris", "cannot be extracted", "probability 1 -"):
            assert wrong not in text


def test_rendering_is_deterministic_and_leaves_its_arguments_alone() -> None:
    arguments = (plan(), record(), audit())
    before = copy.deepcopy(arguments)
    shuffled = {key: arguments[1][key] for key in reversed(arguments[1])}
    assert render_card(config(), *arguments) == render_card(config(), before[0], shuffled, before[2])
    assert arguments == before


LIMITS = {"tpr_at_fpr_0.001": 0.00618481, "tpr_at_fpr_0.01": 0.0367772, "auc": 0.6265405, "gdp_mu": 0.933221}
CURVE = [[1e-4, 2.31541], [1e-5, 2.96331], [1e-30, None]]


def words_of(**changes: object) -> str:
    return " ".join(render_card(config(), plan(**changes), record(), None)[0].split())


def test_limits_and_other_deltas_are_stated_rounded_up_and_a_missing_second_accountant_is_said() -> None:
    card = words_of(limits=LIMITS, curve=CURVE)
    assert "that of μ = 0.9333" in card
    assert "| ε at other δ | 2.316 at 0.0001, 2.964 at 1e-05, not certified at 1e-30 |" in card
    assert "μ" not in words_of(limits={**LIMITS, "gdp_mu": None})
    assert "at other δ" not in words_of(curve=[])
    card = words_of(cross_check=None)
    assert "| Second accountant | none supports this event |" in card
    assert "none supports" not in words_of()


def test_the_one_membership_limit_is_the_tightest_that_is_known() -> None:
    """That of one (epsilon, delta) is 18%: the whole mechanism says more, and both would be read as a contradiction."""
    card = words_of(limits=LIMITS)
    said = re.findall(r"at most ([\d.]+%)", card)
    assert said == ["3.7%", "3.7%", "0.7%"]  # the first screen; the figure in words, at 1% and 0.1%
    assert "3.7%" not in words_of()


def test_baseline_says_so_first_and_gives_no_audit_numbers(tmp_path: Path) -> None:
    measured = audit(audits_run=31337)
    run = make_run(tmp_path, baseline(), plan(), baseline_record(), measured)
    text = write_card(run).read_text(encoding="utf-8")
    assert first_line(text).startswith("> **No differential privacy guarantee: ")
    assert "without differential privacy" in first_line(text)
    block = json.loads((run.export / "privacy.json").read_text())
    assert front_matter(text)["privacy"] == pointer(block)
    assert block["guarantee"] is False
    assert block["audit"] is None
    assert not {"epsilon", "delta", "attempted", "noise_multiplier"} & set(block)
    assert "31337" not in export_text(run)
    assert "## Audit" not in text
    assert not {"differential-privacy", "dp-sgd"} & set(front_matter(text)["tags"])


def test_broken_assumption_is_the_first_line_and_epsilon_is_no_guarantee() -> None:
    text, block = render_card(config(privacy={"insecure_seed": SECRET_SEED}), plan(), broken(), audit())
    assert first_line(text) == "> **No differential privacy guarantee: the noise was seeded (privacy.insecure_seed).**"
    assert "epsilon" not in block
    assert block["attempted"]["epsilon"] == EPSILON
    before, _, attempted = body(text).partition("## What was attempted")
    assert "2.99" not in before
    assert "They are no guarantee" in attempted
    assert "Pr[M(D) in S]" not in text
    assert str(SECRET_SEED) not in text  # who knows it can take the noise off


def test_a_run_that_promises_nothing_claims_no_tags_and_no_secret_generator() -> None:
    recipe = config(card={"tags": ["differential-privacy", "clinical"]})
    assert front_matter(render_card(recipe, plan(), broken(), None)[0])["tags"] == ["dpllm", "lora", "clinical"]
    recipe = config(privacy={"secure_noise": True, "insecure_seed": SECRET_SEED})
    text, _ = render_card(recipe, plan(), broken(), None)
    assert "keyed by the operating system" not in text


def test_a_lower_bound_above_the_claim_takes_the_guarantee_away() -> None:
    """Whatever the verdict beside it says; a verdict alone does too, see the states of cards."""
    the_audit = audit()
    the_audit["epsilon_lower_bound"]["value"] = 3.2
    text, block = render_card(config(), plan(), record(), the_audit)
    assert block["guarantee"] is False
    assert "audit of these weights contradicts it" in first_line(text)


def test_nothing_private_is_read(tmp_path: Path) -> None:
    run = make_run(tmp_path / "a", config(), plan(), record(), audit())
    for name in ("summary.json", "canaries.json", "metrics.jsonl", "audit/audit.json"):
        path = run.private / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"eval_loss_after": HELD_OUT, "text": "SENTINEL"}))
    write_card(run)
    other = make_run(tmp_path / "b", config(), plan(), record(), audit())
    other.private.rmdir()
    write_card(other)
    assert export_text(run) == export_text(other)
    assert "SENTINEL" not in export_text(run)
    assert str(HELD_OUT) not in export_text(run)


@pytest.mark.parametrize("public", [False, True])
def test_held_out_loss_only_of_public_evaluation_data(tmp_path: Path, public: bool) -> None:
    figures = {"eval_loss_before": 8.5, "eval_loss_after": HELD_OUT, "eval_accuracy_before": 0.1}
    metrics = {"public": {**figures, "eval_accuracy_after": 0.4321}}
    for root, recipe, the_record in (
        (tmp_path / "dp", config(data={"eval_public": public}), record(metrics=metrics)),
        (tmp_path / "base", baseline(data={"public": True, "eval_public": public}), baseline_record(metrics=metrics)),
    ):
        run = make_run(root, recipe, plan(), the_record, None)
        write_card(run)
        assert ("7.6543" in export_text(run)) == public
        assert ("43.2% after" in export_text(run)) == public


def test_no_local_path_and_no_exact_time(tmp_path: Path) -> None:
    ledger = {**record()["ledger"], "dataset": f"{HOME}/notes"}
    reason = f"seeded by '{HOME}/private/seed.json'"
    for recipe, the_record, the_audit in (
        (config(), record(ledger=ledger, deviations=[f"resumed from {HOME}/runs/x/private/resume"]), audit()),
        (config(model={"name_or_path": f"{HOME}/base"}), broken(reason), audit(verdict_reason=f"see {HOME}/a.png")),
        (config(model={"name_or_path": "./base"}, data={"train": "../notes.jsonl"}), record(ledger=None), None),
    ):
        run = make_run(tmp_path, recipe, plan(), the_record, None)
        (run.export / "audit").mkdir(exist_ok=True)
        write_card(run)
        text, block = render_card(recipe, plan(), the_record, the_audit)
        for written in (text, json.dumps(block), export_text(run)):
            assert "alice" not in written
            assert "secret-project" not in written
            assert not re.search(r"(?<![\w:/])/home|\.\./|\./base", written)
            assert "1289" not in written  # how long a run took depends on the private draws


def test_local_and_builtin_models_are_not_linked_to_the_hub() -> None:
    for name in ("builtin:tiny", "models/tiny"):
        the_record = record()
        the_record["model"] = {**the_record["model"], "name_or_path": name, "commit": None}
        text, _ = render_card(config(model={"name_or_path": name}), plan(), the_record, None)
        assert "base_model" not in front_matter(text)
        assert "https://huggingface.co" not in text


@pytest.mark.parametrize(
    ("train", "public", "listed"),
    [("org/notes", True, ["org/notes"]), ("org/notes", False, None), ("dir/notes.jsonl", True, None)],
)
def test_datasets_lists_public_hub_data_only(train: str, public: bool, listed: list[str] | None) -> None:
    recipe = config(data={"train": train, "public": public})
    assert front_matter(render_card(recipe, plan(), record(), None)[0]).get("datasets") == listed


def test_the_front_matter_names_the_statement_by_its_hash(tmp_path: Path) -> None:
    run = make_run(tmp_path, config(), plan(), record(), audit())
    path = write_card(run)
    assert path == run.export / "README.md"
    written = json.loads((run.export / "privacy.json").read_text())
    assert written["schema_version"] == 4
    shown = front_matter(path.read_text(encoding="utf-8"))["privacy"]
    assert shown["sha256"] == hashlib.sha256((run.export / "privacy.json").read_bytes()).hexdigest()
    assert shown == pointer(written)
    assert written["files"] == {
        name: hashlib.sha256((run.export / name).read_bytes()).hexdigest()
        for name in ("adapter_model.safetensors", "audit/audit.json", "privacy.svg", "tokenizer.json")
    }
    names = ["README.md", "adapter_model.safetensors", "audit", "privacy.json", "privacy.svg", "tokenizer.json"]
    assert sorted(p.name for p in run.export.iterdir()) == names


def test_a_run_with_dp_needs_its_plan_and_a_refused_one_has_no_card(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"plan\.json"):
        write_card(make_run(tmp_path / "a", config(), None, record(), None))
    with pytest.raises(ConfigError, match="refused"):
        write_card(make_run(tmp_path / "b", config(), plan(), record(status="refused"), None))
    killed = record(status="interrupted", steps_taken=None, artifacts={})
    with pytest.raises(ConfigError, match="ended before it exported weights"):
        write_card(make_run(tmp_path / "c", config(), plan(), killed, None))


@pytest.mark.parametrize(
    ("generator", "cryptographic", "words"),
    [
        ("aes256_ctr", True, "AES-256 in counter mode for sampling and noise"),
        ("philox_gpu", False, "for noise torch's Philox on a GPU"),
        ("philox", False, "Philox for sampling and noise"),
    ],
)
def test_the_card_names_the_generator_that_run_json_names(generator: str, cryptographic: bool, words: str) -> None:
    text, block = render_card(config(), plan(), record(generator=generator), audit())
    stated = {"generator": generator, "secure_noise": cryptographic, "lattice": record()["lattice"]}
    assert block["randomness"] == stated
    assert words in text
    assert ("not a cryptographic generator" in text) is not cryptographic


def test_the_card_says_what_noise_on_a_lattice_was_added() -> None:
    sigma, lattice = plan()["noise_multiplier"], {"coordinates": 10**6}
    lattice["noise_over_max_grad_norm"] = noise_scale(sigma, 1.0, 10**6)
    text, block = render_card(config(), plan(), record(lattice=lattice), audit())
    assert block["randomness"]["lattice"] == lattice
    assert "rounded to one lattice" in text
    assert "over 1,000,000 coordinates" in text


def test_tables_of_the_card_are_whole() -> None:
    for the_audit in (None, audit()):
        lines = body(render_card(config(), plan(), record(), the_audit)[0]).splitlines()
        for above, line in itertools.pairwise(lines):
            if above.startswith("|") and line.startswith("|"):
                assert above.count("|") == line.count("|"), line


@pytest.mark.parametrize("name", ["metrics.jsonl", "chat_template.jinja", "special_tokens_map.json", "audit/roc.png"])
@pytest.mark.parametrize("link", [True, False])
def test_a_private_file_is_not_published_under_any_name(tmp_path: Path, name: str, link: bool) -> None:
    run = make_run(tmp_path, config(), plan(), record(), audit())
    run.metrics.write_text('{"loss": 7.654321}\n')
    path = run.export / name
    (os.link if link else shutil.copy)(run.metrics, path)
    if name.startswith("audit/"):
        with pytest.raises(ConfigError, match=f"{name} is a copy of a file in private/"):
            write_card(run)
    else:
        write_card(run)
        assert name not in json.loads((run.export / "privacy.json").read_text())["files"]
        assert "files" in failing(run.export)
    path.unlink()
    write_card(run)
    assert "files" not in failing(run.export)


def test_the_tables_of_an_audit_may_lie_in_private_too(tmp_path: Path) -> None:
    """An audit with a private positive control writes them twice; a mutant then makes no card."""
    run = make_run(tmp_path, config(), plan(), record(), audit())
    for folder in (run.audit_dir(False), run.audit_dir(True)):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tokens.parquet").write_bytes(b"scores")
    write_card(run)
    (run.private / "other.parquet").write_bytes(b"scores")
    with pytest.raises(ConfigError, match=r"audit/tokens\.parquet is a copy of a file in private/"):
        write_card(run)
