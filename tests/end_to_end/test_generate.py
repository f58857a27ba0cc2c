"""``dpllm generate``: what it prints, from what, and what it says about privacy."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from running import Place, contents, done, dpllm_, edit_recipe, refused

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
    from peft import PeftModel

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
    for place in (finished.run, merged):
        errors = done("generate", place, *FEW).err
        assert errors.count("\n") == 1
        assert "post-processing" in errors
        assert "prompt is not covered" in errors
    errors = done("generate", baseline.run, *FEW).err
    assert errors.count("\n") == 1
    assert "no differential privacy guarantee" in errors
    assert "may repeat training text" in errors
    assert "post-processing" not in errors
    shutil.copytree(merged, tmp_path / "stranger")
    (tmp_path / "stranger" / "privacy.json").unlink()
    assert "no privacy statement lies beside it" in done("generate", tmp_path / "stranger", *FEW).err
    shutil.copytree(finished.run, tmp_path / "run")
    block = tmp_path / "run" / "export" / "privacy.json"
    block.write_text(json.dumps({**json.loads(block.read_text()), "guarantee": False, "reason": "x y"}))
    assert "guarantee (x y)" in done("generate", tmp_path / "run", *FEW).err


def test_control_characters_do_not_reach_a_terminal(finished: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "sample", lambda *_, **__: [generate.Sample(0, None, "a\x1b[2Jb\nc\td\x07")])
    assert done("generate", finished.run).out == "--- sample 1\na\ufffd[2Jb\nc\td\ufffd\n"


def test_a_model_brings_no_settings_of_its_own(merged: Path, tmp_path: Path) -> None:
    shutil.copytree(merged, tmp_path / "model")
    own = {"temperature": 1e-3, "top_k": 1, "repetition_penalty": 9.0, "do_sample": True, "min_p": 0.99}
    own["suppress_tokens"] = list(range(3, 300))
    path = tmp_path / "model" / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **own}))
    assert texts(tmp_path / "model", "--seed", 5) == texts(merged, "--seed", 5)


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
        *((("--temperature", value), "are out of range") for value in ("-1", "nan")),
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


@pytest.mark.parametrize("line", ["{", "3", "[1]", '{"text": "SECRET"}', '{"prompt": 3}', "null"])
def test_a_file_of_prompts_is_quoted_by_line_only(tmp_path: Path, line: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'"SECRET"\n{line}\n')
    with pytest.raises(DataError, match="line 2 holds no prompt") as refused:
        prompts.read_prompts(path)
    assert "SECRET" not in str(refused.value)
    path.write_text("\n")
    with pytest.raises(DataError, match="holds no prompts"):
        prompts.read_prompts(path)


@pytest.mark.parametrize("text", ['"a\u2028b"\n', '\ufeff"a\u2028b"\r\n', '\n{"prompt": "a\u2028b"}'])
def test_only_a_line_feed_ends_a_line_of_prompts(tmp_path: Path, text: str) -> None:
    (tmp_path / "prompts.jsonl").write_bytes(text.encode())
    assert prompts.read_prompts(tmp_path / "prompts.jsonl") == ["a\u2028b"]


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
