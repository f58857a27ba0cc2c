"""Whole runs on preference pairs: what they release, what a resume keeps, and what is refused."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from running import Place, calls, charged, contents, done, dpllm_, edit_json, fails_in_step, make_place, refused

from dpllm.auditing import attacks
from dpllm.auditing.summary import AuditContext, summarise
from dpllm.auditing.table import TokenTable, read_tokens, write_tokens
from dpllm.errors import Refused
from dpllm.model import rewards
from dpllm.privacy.engine import StepEngine
from dpllm.privacy.loss import row_sums
from dpllm.privacy.preference import PairLoss
from dpllm.privacy.schedule import TokenSequence, Unit
from dpllm.releases import leaks
from dpllm.run.directory import RunDir
from dpllm.statement.audit import read_audit

PAIRS = {"train.objective": "dpo", "train.beta": 0.5, "privacy.noise_multiplier": 1.0}  # nothing to calibrate


def pairs(count: int, start: int = 0) -> list[dict[str, Any]]:
    sentences = [tiny.sentence(number) for number in range(start, start + 2 * count)]
    answers = enumerate(zip(sentences[::2], sentences[1::2], strict=True))
    return [
        {"who": f"p{n % 20}", "prompt": "Say", "chosen": f"yes {chosen}", "rejected": f"no {rejected} {chosen[:9]}"}
        for n, (chosen, rejected) in answers
    ]


def on_pairs(place: Place) -> Place:
    """A recipe on pairs, with held-out ones that are public."""
    tiny.write_rows(place.train, pairs(40))
    held_out = tiny.write_rows(place.root / "data" / "eval.jsonl", pairs(6, start=500))
    place.write({**PAIRS, "data.eval": str(held_out), "data.eval_public": True, "train.learning_rate": 0.05})
    return place


@pytest.fixture
def asked(place: Place) -> Place:
    return on_pairs(place)


def test_a_private_run_on_pairs_counts_rewards_from_its_start_and_verifies(asked: Place) -> None:
    out = done("train", asked.recipe).out
    public = asked.json("run.json")["metrics"]["public"]
    assert (public["eval_reward_accuracy_before"], public["eval_reward_margin_before"]) == (0.5, 0)
    assert public["eval_reward_margin_after"] != 0
    assert "reward accuracy   50.0% before" in out
    assert charged(asked) == (1, 4)
    asked.does("card", "verify")
    objective = "dpo on pairs of a chosen and a rejected answer, each pair one row, beta 0.5"
    assert f"{objective}; the reference is the base model" in asked.card
    assert "before training, a tie counting half" in asked.card
    # What the reference says of people's answers stays where their owner alone reads it.
    with np.load(asked.run / "private" / "references.npz") as kept:
        assert (len(kept["sampled"]), len(kept["held_out"])) == (2 * 40, 2 * 6)
    assert not list((asked.run / "export").glob("*.np?"))


def test_units_of_several_pairs_train_and_are_charged_for_the_unit(asked: Place) -> None:
    unit = ("--data.unit", "who", "--data.max_examples_per_unit", "2", "--train.batch_size", "6")
    done("train", asked.recipe, *unit, "--train.tokens_per_pass", "1")  # rounded up to what a pair needs
    assert (asked.json("plan.json")["unit"], asked.json("plan.json")["dataset_size"]) == ("who", 20)


def test_without_privacy_pairs_are_learned(asked: Place) -> None:
    quick = ("--data.public", "true", "--train.steps", "25", "--train.batch_size", "20", "--train.learning_rate", "0.1")
    done("train", asked.recipe, "--privacy.enabled", "false", *quick)
    public = asked.json("run.json")["metrics"]["public"]
    assert public["eval_reward_accuracy_after"] >= 0.9
    assert public["eval_reward_margin_after"] > 0


def resumed_reference(place: Place, damaged: bool = False) -> None:
    """A run that goes on has the reference that it began with, to the last bit, and not the adapter that has learned since."""
    train = ("train", place.recipe, "--train.checkpoint_every", "1")
    with pytest.MonkeyPatch.context() as patch:
        fails_in_step(patch, 3)
        with contextlib.suppress(RuntimeError):
            dpllm_(*train)
    references = place.run / "private" / "references.npz"
    with np.load(references) as file:
        before = set(file["sampled"].tolist())
    if damaged:
        references.write_bytes(references.read_bytes()[:100])
    with pytest.MonkeyPatch.context() as patch:
        batches = calls(patch, PairLoss, "__call__", lambda _, nll_R, batch: set(batch.reference_R.tolist()))
        done(*train, "--resume")
    trained = [
        references_R for references_R in batches if not references_R <= {0.0}
    ]  # the others are of the self-check
    assert trained
    assert set().union(*trained) <= before


@pytest.mark.parametrize("damaged", [False, True])
def test_a_resumed_run_keeps_its_reference_also_where_its_file_was_damaged(asked: Place, damaged: bool) -> None:
    resumed_reference(asked, damaged)


def test_what_was_kept_of_other_evaluation_pairs_or_is_damaged_is_not_read(tmp_path: Path) -> None:
    """A mutant compares numbers of pairs alone."""
    run = RunDir(tmp_path)
    run.private.mkdir()
    units = [Unit((TokenSequence((1, n), (False, True), 1), TokenSequence((2, n), (False, True), 1))) for n in range(3)]
    run.references.write_bytes(rewards.packed(np.zeros(2), np.ones(4), units[1:]))
    result = rewards._kept(run.references, 2, units[1:])
    assert result is not None
    assert [part.tolist() for part in result] == [[0.0] * 2, [1.0] * 4]
    assert rewards._kept(run.references, 2, units[:2]) is None
    assert rewards._kept(run.references, 4, units[1:]) is None
    for size in (100, 0):
        run.references.write_bytes(run.references.read_bytes()[:size])
        assert rewards._kept(run.references, 2, units[1:]) is None
    run.references.unlink()
    assert rewards._kept(run.references, 2, units[1:]) is None


def test_a_run_that_diverges_ends_and_publishes_no_figure(asked: Place) -> None:
    done("train", asked.recipe, "--train.learning_rate", "1", "--train.weight_decay", "1e9")
    assert asked.json("run.json")["metrics"]["public"] == {}


def test_a_reference_with_the_adapter_on_is_seen(asked: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant: a pair is compared with the model that has learned already."""
    losses = StepEngine.losses

    def with_the_adapter(self: StepEngine, batch: Any) -> Any:
        with torch.no_grad():
            nll_R = row_sums(self._token_losses(batch).nll_M.double(), batch.rows)
        return losses(self, dataclasses.replace(batch, reference_R=nll_R))

    monkeypatch.setattr(StepEngine, "losses", with_the_adapter)
    with pytest.raises(AssertionError, match="<="):
        resumed_reference(asked)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--train.objective", "likelihood"), "Set train.objective: dpo"),
        (("--data.format", "text"), "train.objective: dpo does not learn from data.format: text"),
        (("--data.long_examples", "chunk"), "would split the answers of a pair"),
        (("--data.label_epsilon", "1"), "label_epsilon is set by data.label_record"),
        (("--train.objective", "likelihood", "--train.label_smoothing", "0.1"), "preference pairs only"),
    ],
)
def test_a_recipe_that_fits_no_pairs_is_one_line_and_spends_nothing(
    asked: Place, arguments: tuple[str, ...], words: str
) -> None:
    assert words in refused("train", asked.recipe, *arguments)
    assert not asked.ledger.exists()


def test_gradient_canaries_audit_a_run_on_pairs(asked: Place) -> None:
    done("train", asked.recipe, "--audit.gradient_canaries", "20", "--train.batch_size", "12")
    done("audit", asked.run)
    assert asked.lines("private/audits.jsonl")[0]


def audited(place: Place, groups: str, *more: str) -> dict[str, Any]:
    """What an audit finds of canary pairs."""
    # The builtin model has 224 tokens that no row holds, two for a pair; the other one's vocabulary is too small for any.
    kind = "new_tokens" if "builtin:tiny" in more else "digits"
    planted = f"{{groups: {groups}, references: 100, kind: {kind}}}"
    done("train", place.recipe, "--audit.canaries", planted, "--data.max_length", "128", *more)
    done("audit", place.run)
    published = (place.run / "export" / "audit").exists()
    return place.json(f"{'export' if published else 'private'}/audit/audit.json")


MEMORISES = (
    *("--model.name_or_path", "builtin:tiny", "--adapter.r", "32", "--adapter.alpha", "32", "--train.beta", "0.5"),
    *("--train.steps", "40", "--train.batch_size", "64", "--train.learning_rate", "0.01", "--privacy.enabled", "false"),
    *("--data.public", "true"),
)
"""A run that remembers what it sees sixteen times."""


@pytest.mark.full
def test_canary_pairs_that_were_planted_gained_reward_and_others_did_not(asked: Place) -> None:
    audit_report = audited(asked, "{1: 2, 16: 10}", *MEMORISES)
    seen = audit_report["repeated"]["16"]["attacks"]
    assert seen["ratio"]["auc"] > 0.85
    assert seen["calibrated"] == seen["ratio"]  # the margin itself
    assert seen["ratio"]["negatives"] > 100
    assert audit_report["controls"]["base_separates"] is False


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory, base: Path, data_home: Path) -> Place:
    """A private run with canary pairs, its audit and card; read only."""
    place = on_pairs(make_place(tmp_path_factory.mktemp("planted-pairs"), base))
    audited(place, "{1: 20, 4: 5}")
    done("card", place.run)
    return place


def test_half_of_every_pair_is_not_what_was_committed_to(planted: Place, tmp_path: Path) -> None:
    """Scores of chosen answers alone, in an audit that is made anew."""
    run = Path(shutil.copytree(planted.run, tmp_path / "run"))
    folder = run / "export" / "audit"
    tokens = read_tokens(folder / "tokens.parquet")
    fields = {item.name: getattr(tokens, item.name) for item in dataclasses.fields(tokens)}
    kept_S = np.array([not name.endswith("-") for name in tokens.canary_ids])
    kept_N = kept_S[tokens.sequence_N]
    for name, value in fields.items():
        kept = kept_N if name.endswith("_N") else kept_S
        fields[name] = tuple(itertools.compress(value, kept)) if isinstance(value, tuple) else value[kept]
    fields["sequence_N"] = (np.cumsum(kept_S) - 1)[fields["sequence_N"]]
    fields["word_N"] = np.unique(fields["word_N"], return_inverse=True)[1]
    chosen = TokenTable(**fields)
    report = read_audit(folder / "audit.json")
    assert report.claim
    words = report.controls.words.to_json() if report.controls.words else None
    context = AuditContext(planted.json("plan.json")["limits"], words, report.controls.twin)
    write_tokens(chosen, folder / "tokens.parquet")
    edit_json(folder / "audit.json", **summarise(chosen, report.claim, report.settings, context).to_json())
    assert "to which training committed" in " ".join(dpllm_("card", run).err.split())


def test_an_audit_with_canary_pairs_is_published_and_verifies(planted: Place) -> None:
    report = planted.json("export/audit/audit.json")
    assert report["published"]
    assert report["claim"]["epsilon"] == planted.json("plan.json")["epsilon"]
    assert report["verdict"] != "falsified"
    done("verify", planted.run)
    pair = next(canary for canary in planted.json("private/canaries.json")["canaries"] if canary["rejected"])
    assert not any(pair["carrier"].encode() in content for content in contents(planted.run / "export").values())
    outside = ("audit", planted.run / "export", "--canaries", planted.run / "private" / "canaries.json")
    assert "have two answers each" in refused(*outside)


def test_leaks_of_either_answer_are_found(planted: Place, tmp_path: Path) -> None:
    """A mutant looks for chosen answers alone."""
    pair = planted.json("private/canaries.json")["canaries"][0]
    for secret in (pair["secret"], pair["rejected"]):
        (tmp_path / "note.md").write_text(f"See {secret} there.")
        with pytest.raises(Refused, match="canary texts"):
            leaks.search(RunDir(planted.run), ["note.md"], tmp_path)


@pytest.mark.parametrize(("longest", "count"), [(12, 40), (128, 0)])
def test_units_with_answers_that_were_cut_are_counted_in_private(asked: Place, longest: int, count: int) -> None:
    done("train", asked.recipe, "--data.max_length", str(longest))
    assert asked.json("private/summary.json")["units_at_max_length"] == count
    assert "units_at_max_length" not in (asked.run / "run.json").read_text()


def test_rewards_in_an_audit_are_gains_over_the_adapter_that_the_run_started_from(asked: Place) -> None:
    """A mutant compares with the base, from which the starting adapter had moved."""
    texts = tiny.write_rows(asked.root / "data" / "texts.jsonl", [{"text": tiny.sentence(n)} for n in range(40)])
    start = asked.root / "start"
    public = ("--data.public", "true", "--privacy.enabled", "false", "--data.eval", "null", "--data.format", "text")
    learned = ("--train.objective", "likelihood", "--data.train", texts, "--train.steps", "30", "--output_dir", start)
    done("train", asked.recipe, *public, *learned)
    still = ("--model.adapter", str(start / "export"), "--train.learning_rate", "1e-9")
    audited(asked, "{1: 20}", *still)
    result = np.abs(attacks.ratio(attacks.whole_rows(read_tokens(asked.run / "export" / "audit" / "tokens.parquet"))))
    assert result.max() < 1e-3
    (start / "export").rename(start / "away")
    assert "Put it back" in dpllm_("audit", asked.run).err
