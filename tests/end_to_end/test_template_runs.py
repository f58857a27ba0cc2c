"""A run whose recipe has data.template: whatever asks its model, or scores its rows, reads them as training did."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
from running import Place, done, make_place

from dpllm.auditing.members import audit_run_members
from dpllm.auditing.run import audit, load_models
from dpllm.comparison import tasks
from dpllm.publish import generate
from dpllm.run.directory import RunDir, open_run
from dpllm.text import rendering
from dpllm.text.rendering import joined
from dpllm.text.tokens import encode

TEMPLATE = "[INST] {prompt} [/INST]\n### Answer:\n{completion}"
ASKED = "[INST] Who? [/INST]\n### Answer:\n"


def pairs(count: int, start: int = 0) -> list[dict[str, str]]:
    return [{"prompt": f"Who {n}?", "completion": tiny.sentence(n)} for n in range(start, start + count)]


@pytest.fixture(scope="module")
def templates() -> Any:
    """The templates of all texts that are made, in this module's order."""
    seen: list[str | None] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rendering, "joined", lambda *arguments: seen.append(arguments[2]) or joined(*arguments))
        yield seen


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, base: Path, data_home: Path, templates: list[str | None]) -> Place:
    place = make_place(tmp_path_factory.mktemp("template"), base)
    tiny.write_rows(place.train, pairs(60))
    held_out = tiny.write_rows(place.root / "data" / "eval.jsonl", pairs(60, 100))
    canaries = {"kind": "random_tokens", "groups": {1: 40}, "references": 100, "tokens": 4}
    place.write(
        {
            **{"data.eval": str(held_out), "data.template": TEMPLATE, "audit.canaries": canaries},
            **{"train.sample_prompts": ["Who?"], "audit.gradient_canaries": 0, "privacy.noise_multiplier": 1.0},
        }
    )
    shown = " ".join(done("plan", place.recipe).out.replace("\u2502", " ").split())
    assert "masked: [INST] <prompt> [/INST] ### Answer: learned: <completion><eos>" in shown
    place.does("train", "card")
    assert templates.count(TEMPLATE) == len(templates) > 120 + 120  # rows of both files, all canaries, a sample
    return place


@pytest.mark.parametrize("way", ["audit", "members", "tasks", "generate", "synthesize"])
def test_every_text_is_made_by_the_template(run: Place, templates: list[str | None], way: str) -> None:
    templates.clear()
    place, config = RunDir(run.run), RunDir(run.run).load_config()
    public = run.root / "prompts.txt"
    public.write_text("Who?\nWhere?\n")
    if way == "audit":
        audit(place)
        done("card", run.run)
    elif way == "members":
        audit_run_members(open_run(place), load_models(open_run(place)))
    elif way == "tasks":
        tasks._encoded({"Who?": ["Anna"]}, load_models(open_run(place)), config)
    elif way == "generate":
        done("generate", run.run, "--prompt", "Who?", "--num", 1, "--max-new-tokens", 2)
    else:
        done(
            "synthesize",
            run.run,
            "--rows",
            2,
            "--prompts",
            public,
            "--keep-unfinished",
            "--keep-duplicates",
            "--no-quality",
        )
    assert set(templates) == {TEMPLATE}


def test_an_export_and_a_merged_model_are_asked_as_the_run_is(run: Place) -> None:
    done("merge", run.run)
    for place in (run.run, run.run / "export", run.run / "merged"):
        loaded = generate.load(place, base=str(run.base))
        (ids,) = generate.encode_all(loaded, ["Who?"])
        assert loaded.tokenizer.decode(ids) == f"<s>{ASKED}"
    assert run.json("export/privacy.json")["template"] == TEMPLATE
    assert "joined as `template` of privacy.json says" in run.card
    done("verify", run.run)
    done("verify", run.run / "export")


def test_a_secret_begins_where_the_template_says(run: Place) -> None:
    """Behind a line end, random tokens are no tokens that begin with a space."""
    secrets = run.json("private/canaries.json")["canaries"]
    tokenizer = tiny.tokenizer()
    for secret in secrets:
        row, reads = {"prompt": secret["carrier"], "completion": secret["secret"]}, tiny.reads(128, template=TEMPLATE)
        (sequence,) = encode(row, "prompt_completion", tokenizer, reads)
        assert len(sequence.input_ids) - sequence.loss_mask.index(True) == 4 + 1
