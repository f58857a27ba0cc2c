"""Texts of a model: what dpllm generate prints, from what, and what it says about privacy; and samples during training."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import PeftModel
from running import Answer, Place, contents, done, dpllm_, edit_json, edit_recipe, make_place, refused
from safetensors.torch import load_file

from dpllm.errors import ConfigError, DataError
from dpllm.publish import generate
from dpllm.text import prompts

Json = dict[str, Any]
FEW = ("--num", "3", "--max-new-tokens", "6")


def samples(*arguments: object) -> list[Json]:
    return list(json.loads(done("generate", *arguments, *FEW, "--json").out)["samples"])


def texts(*arguments: object) -> list[str]:
    return [sample["text"] for sample in samples(*arguments)]


@pytest.fixture(scope="session")
def talker(finished: Place, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The finished run, as if it had been trained on conversations."""
    run = Path(shutil.copytree(finished.run, tmp_path_factory.mktemp("talker") / "run"))
    return edit_recipe(run, "data", format="messages")


def test_a_seed_decides_everything(finished: Place) -> None:
    before = contents(finished.run)
    first = texts(finished.run, "--seed", 7)
    assert len(first) == 3
    assert texts(finished.run, "--seed", 7) == first
    assert texts(finished.run, "--seed", 8) != first
    assert texts(finished.run) != texts(finished.run)
    assert contents(finished.run) == before
    loaded, state = generate.load(finished.run), torch.random.get_rng_state()
    generate.sample(loaded, None, 2)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_run_export_and_merged_model_write_the_same(finished: Place, merged: Path) -> None:
    arguments = ("--prompt", "Anna bought", "--seed", "1")
    wanted = texts(finished.run, *arguments)
    assert texts(merged, *arguments) == wanted
    assert texts(finished.run / "export", *arguments, "--base", finished.base) == wanted
    assert "--base" in refused("generate", finished.run / "export", *arguments, *FEW)


def test_the_adapter_is_what_writes(finished: Place) -> None:
    """Greedy text by hand, from base and adapter."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(finished.base)
    base = transformers.AutoModelForCausalLM.from_pretrained(finished.base)
    tuned = PeftModel.from_pretrained(base, str(finished.run / "export")).eval()
    ids = tokenizer("Anna bought", return_tensors="pt")["input_ids"]
    prompt = ids.shape[1]
    with torch.no_grad():
        for _ in range(6):
            ids = torch.cat([ids, tuned(input_ids=ids).logits[:, -1:].argmax(-1)], dim=1)
    assert tokenizer.eos_token_id not in ids[0, prompt:]
    greedy = texts(finished.run, "--prompt", "Anna bought", "--temperature", "0")
    assert greedy == [tokenizer.decode(ids[0, prompt:], skip_special_tokens=True)] * 3


def test_prompts_of_a_file_are_continued_in_order(finished: Place, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "Anna"}\n"Bodil"\n\n{"messages": [{"role": "user", "content": "Who?"}]}\n')
    result = samples(finished.run, "--prompts", path, "--seed", 2)
    assert [sample["number"] for sample in result] == [0] * 3 + [1] * 3 + [2] * 3
    assert result[0]["prompt"] == "Anna"
    plain = done("generate", finished.run, "--prompts", path, "--seed", 2, *FEW).out
    assert plain.count("--- prompt 2, sample") == 3


def test_many_prompts_at_a_time_give_the_texts_of_each_alone(finished: Place) -> None:
    loaded = generate.load(finished.run)
    questions = ["Anna", "Anna bought seven plums at the old market", "Who came to the blue house?", "A"]
    settings = {"temperature": 0.0, "max_new_tokens": 12}
    together = generate.sample(loaded, questions, 2, **settings)
    alone = [generate.sample(loaded, [prompt], 1, **settings)[0].text for prompt in questions]
    assert [item.text for item in together] == [text for text in alone for _ in range(2)]
    assert [item.prompt for item in together] == [prompt for prompt in questions for _ in range(2)]
    assert len(set(alone)) > 1


def test_a_chat_model_gets_its_template(finished: Place, talker: Path) -> None:
    assert (generate.load(talker).format, generate.load(finished.run).format) == ("messages", "text")
    loaded = generate.load(talker)
    ids = prompts.encode(loaded.tokenizer, "Who came?", 0, loaded.format, loaded.template)
    turn = loaded.tokenizer.decode(ids)
    assert turn == "<s><|user|>Who came?</s><|assistant|>"
    arguments = ("--prompt", "Who came?", "--seed", "3")
    assert texts(talker, *arguments) == texts(finished.run, *arguments, "--chat")
    assert texts(talker, *arguments, "--no-chat") == texts(finished.run, *arguments)


def test_what_it_says_about_privacy(finished: Place, baseline: Place, merged: Path, tmp_path: Path) -> None:
    stranger, run = (Path(shutil.copytree(path, tmp_path / path.name)) for path in (merged, finished.run))
    (stranger / "privacy.json").unlink()
    edit_json(run / "export" / "privacy.json", guarantee=False, reason="x y")
    for place, *words in (
        (finished.run, "post-processing", "prompt is not covered"),
        (merged, "post-processing", "prompt is not covered"),
        (baseline.run, "no differential privacy guarantee", "may repeat training text"),
        (stranger, "no privacy statement lies beside it"),
        (run, "guarantee (x y)"),
    ):
        errors = done("generate", place, *FEW).err
        assert errors.count("\n") == 1
        assert all(word in errors for word in words)
        assert ("post-processing" in errors) is ("post-processing" in words)


def test_control_characters_do_not_reach_a_terminal(finished: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "sample", lambda *_, **__: [generate.Sample(0, None, "a\x1b[2Jb\nc\td\x07")])
    assert done("generate", finished.run).out == "--- sample 1\na\ufffd[2Jb\nc\td\ufffd\n"


def test_a_model_brings_no_settings_of_its_own(merged: Path, tmp_path: Path) -> None:
    shutil.copytree(merged, tmp_path / "model")
    own = {"temperature": 1e-3, "top_k": 1, "repetition_penalty": 9.0, "do_sample": True, "min_p": 0.99}
    edit_json(tmp_path / "model" / "generation_config.json", **own, suppress_tokens=list(range(3, 300)))
    assert texts(tmp_path / "model", "--seed", 5) == texts(merged, "--seed", 5)


def test_a_strangers_code_is_not_run(merged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers asks at a terminal whether to run it; here whoever is asked says yes."""
    model, ran = Path(shutil.copytree(merged, tmp_path / "stranger")), tmp_path / "ran"
    edit_json(model / "tokenizer_config.json", tokenizer_class="Own", auto_map={"AutoTokenizer": [None, "own.Own"]})
    (model / "own.py").write_text(f"open({str(ran)!r}, 'w').close()\nclass Own: pass\n", "utf-8")
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    assert "own code is never run" in refused("generate", model, *FEW)
    assert not ran.exists()


def test_an_end_token_ends_a_text(finished: Place) -> None:
    loaded = generate.load(finished.run)
    head = loaded.model.get_output_embeddings()
    with torch.no_grad():
        bias = torch.zeros(head.weight.shape[0])
        bias[loaded.tokenizer.eos_token_id] = 1e4
        head.register_forward_hook(lambda module, inputs, output: output + bias)
    assert [sample.text for sample in generate.sample(loaded, ["Anna"], 2)] == ["", ""]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *(((f"--{key}", "0"), "are out of range") for key in ("num", "max-new-tokens", "top-p")),
        (("--temperature", "nan"), "are out of range"),
        (("--seed", "99999999999999999999"), "out of torch"),
        (("--prompt", "a\udc80b"), "half of a character"),
        (("--top-p", "1.5"), "are out of range"),
        (("--max-new-tokens", "500"), "exceed the 128"),
        (("--prompts", "nowhere.jsonl"), "cannot be read"),
    ],
)
def test_mistakes_are_one_line_each(finished: Place, arguments: tuple[str, ...], message: str) -> None:
    answer = dpllm_("generate", finished.run, *arguments)  # what it says about privacy stands before the message
    assert answer.code == 2
    assert message in answer.err
    assert answer.err.splitlines()[-1].startswith("dpllm generate: ")
    assert not answer.out


def test_a_file_of_prompts_is_quoted_by_line_only_and_only_a_line_feed_ends_a_line(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    for line in ("{", "3", "[1]", '{"text": "SECRET"}', '{"prompt": 3}', "null"):
        path.write_text(f'"SECRET"\n{line}\n')
        with pytest.raises(DataError, match="line 2 holds no prompt") as refused:
            prompts.read_prompts(path)
        assert "SECRET" not in str(refused.value)
    path.write_text("\n")
    with pytest.raises(DataError, match="holds no prompts"):
        prompts.read_prompts(path)
    for text in ('"a\u2028b"\n', '\ufeff"a\u2028b"\r\n', '\n{"prompt": "a\u2028b"}'):
        path.write_bytes(text.encode())
        assert prompts.read_prompts(path) == ["a\u2028b"]


def test_without_weights_there_is_nothing_to_sample(tmp_path: Path, finished: Place) -> None:
    with pytest.raises(ConfigError, match="holds no weights"):
        generate.load(tmp_path)
    shutil.copytree(finished.run, tmp_path / "run")
    (tmp_path / "run" / "export" / "adapter_model.safetensors").unlink()
    with pytest.raises(ConfigError, match="holds no weights"):
        generate.load(tmp_path / "run")


def test_messages_that_the_template_does_not_take(talker: Path) -> None:
    loaded = generate.load(talker)
    loaded.tokenizer.chat_template = "{{ messages[0]['nothing']['deeper'] }}"
    with pytest.raises(DataError, match="prompt 1: the tokenizer's chat template rejects it"):
        generate.sample(loaded, ["SECRET"], 1)


def test_a_model_without_a_first_token_needs_a_prompt(finished: Place) -> None:
    loaded = generate.load(finished.run)
    loaded.tokenizer.backend_tokenizer.post_processor = None
    loaded.tokenizer.bos_token = loaded.tokenizer.eos_token = None
    with pytest.raises(ConfigError, match="cannot start without a prompt"):
        generate.sample(loaded, None, 1)


# --- samples during training change nothing of it, and are shown where the weights may leave -------------------------


PROMPTS = {"train.sample_prompts": ["Anna bought", "On day"], "train.sample_every": 2}
SEED = {"privacy.insecure_seed": 5}
PUBLIC = {**SEED, "privacy.enabled": False, "data.public": True, "adapter.dropout": 0.5}


def trained(root: Path, base: Path, changes: dict[str, Any], *flags: str) -> tuple[Place, Answer]:
    place = make_place(root, base, changes)
    return place, done("train", place.recipe, *flags)


def written(place: Place) -> list[dict[str, Any]]:
    return [line for line in place.lines("private/metrics.jsonl") if "samples" in line]


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
    assert not any(words in answer.out for words in ("Sample of step 2, which", "Anna bought"))
    assert "Samples of step 2, which no guarantee covers" in " ".join(answer.out.split())


def test_the_summary_as_json_is_all_of_standard_output(tmp_path: Path, base: Path) -> None:
    place, answer = trained(tmp_path / "json", base, {}, "--json")
    record = json.loads(answer.out)
    assert (record["status"], record["steps_taken"]) == ("completed", 4)
    assert record["epsilon"] == place.json("plan.json")["epsilon"]
    assert record["next"] == [f"dpllm card {place.run}"]
    assert "Self-check" in answer.err
