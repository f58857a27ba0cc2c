"""Text from the model during training changes nothing of the training, and is shown where the weights may leave."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from running import Answer, Place, done, make_place
from safetensors.torch import load_file

PROMPTS = {"train.sample_prompts": ["Anna bought", "On day"], "train.sample_every": 2}
SEED = {"privacy.insecure_seed": 5}
PUBLIC = {**SEED, "privacy.enabled": False, "data.public": True, "adapter.dropout": 0.5}


def trained(root: Path, base: Path, changes: dict[str, Any], *flags: str) -> tuple[Place, Answer]:
    place = make_place(root, base, changes)
    return place, done("train", place.recipe, *flags)


def written(place: Place) -> list[dict[str, Any]]:
    lines = (place.run / "private" / "metrics.jsonl").read_text("utf-8").splitlines()
    return [line for line in map(json.loads, lines) if "samples" in line]


@pytest.mark.parametrize("kind", [SEED, PUBLIC], ids=["private", "dropout"])
def test_weights_have_the_same_bits_with_and_without_samples(tmp_path: Path, base: Path, kind: dict[str, Any]) -> None:
    """Neither noise nor the sampler nor dropout's masks notice; nor does the record of what trained."""
    plain, _ = trained(tmp_path / "plain", base, kind)
    sampled, _ = trained(tmp_path / "sampled", base, {**kind, **PROMPTS})
    weights = [load_file(place.run / "export" / "adapter_model.safetensors") for place in (plain, sampled)]
    assert weights[0].keys() == weights[1].keys()
    assert all((weights[0][name] == tensor).all() for name, tensor in weights[1].items())
    assert [line["step"] for line in written(sampled)] == [2, 4]
    recipes = [place.json("run.json")["manifest"]["config.yaml"] for place in (plain, sampled)]
    assert recipes[0] == recipes[1]


def test_they_are_released_with_the_weights(tmp_path: Path, base: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("Anna bought\nOn day\n")
    place, answer = trained(tmp_path / "released", base, {"train.sample_prompts": str(prompts)})
    ((last,),) = [written(place)]
    assert last["step"] == 4
    assert [item["prompt"] for item in last["samples"]] == ["Anna bought", "On day"]
    assert answer.out.count("Sample of step 4: ") == 2
    assert "Sample of step 4: Anna bought -> " in answer.out


def test_without_a_guarantee_they_stay_private(tmp_path: Path, base: Path) -> None:
    place, answer = trained(tmp_path / "seeded", base, {**SEED, **PROMPTS, "telemetry.private_metrics": True})
    assert len(written(place)) == 2
    assert "Sample of step 2, which" not in answer.out
    assert "Anna bought" not in answer.out
    assert "Samples of step 2, which no guarantee covers" in " ".join(answer.out.split())


def test_the_summary_as_json_is_all_of_standard_output(tmp_path: Path, base: Path) -> None:
    place, answer = trained(tmp_path / "json", base, {}, "--json")
    record = json.loads(answer.out)
    assert (record["status"], record["steps_taken"]) == ("completed", 4)
    assert record["epsilon"] == place.json("plan.json")["epsilon"]
    assert record["next"] == [f"dpllm card {place.run}"]
    assert "Self-check" in answer.err
