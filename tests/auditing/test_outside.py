"""Models trained elsewhere: what is loaded, what does not belong together, and where a report may lie."""

import json
import random
import shutil

import pytest
import tiny
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from dpllm.auditing import outside
from dpllm.auditing.outside import audit_outside, outside_claim
from dpllm.canaries.canaries import plan_canaries, save
from dpllm.errors import ConfigError, DpllmError
from dpllm.model.loading import positions
from dpllm.recipe.sections import CanaryConfig
from dpllm.statement.audit_bounds import Claim

TARGETS = ["q_proj", "v_proj"]
SECRET = "Sigrid Forsberg owes 4711"
COINS = {"coins": "independent"}

pytestmark = pytest.mark.usefixtures("one_thread")
CANARIES = [{"carrier": f"no. {n} is", "secret": f"{n:06d}", "inserted": n % 2 == 0} for n in range(60)]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tiny.save_model(tmp_path_factory.mktemp("models") / "tiny-base")


@pytest.fixture(scope="module")
def adapter(base, tmp_path_factory):
    return save_adapter(base, tmp_path_factory.mktemp("models") / "adapter")


def save_adapter(base, path, **changes):
    """As a stranger makes one: plain peft, weights that are not zero."""
    torch.manual_seed(0)
    net = AutoModelForCausalLM.from_pretrained(base)
    net = get_peft_model(net, LoraConfig(**{"task_type": "CAUSAL_LM", "r": 2, "target_modules": TARGETS, **changes}))
    for name, parameter in net.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.5)
    net.save_pretrained(path)
    return path


def copy(path, target):
    return shutil.copytree(path, target)


def edit(path, **changes):
    file = path / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
    return path


def logits(net):
    with torch.no_grad():
        return net(input_ids=torch.tensor([[0, 40, 41, 42, 43]])).logits


def load(path, base):
    return outside.load(path, base, torch.device("cpu"))


def refusal(path, base):
    with pytest.raises(ConfigError) as caught:
        load(path, base)
    assert caught.value.exit_code == 2
    return str(caught.value)


def test_an_adapter_is_scored_beside_its_own_base(adapter, base):
    models, kind, name = load(adapter, None)
    assert (kind, name) == ("LORA adapter", str(base))
    plain = logits(AutoModelForCausalLM.from_pretrained(base))
    with models.base() as before:
        torch.testing.assert_close(logits(before), plain)
    assert (logits(models.tuned) - plain).abs().max() > 1e-3
    assert not models.tuned.training
    assert positions(models.tuned) == 128
    assert len(models.tokenizer) == len(tiny.tokenizer())


def test_a_base_elsewhere_is_named_by_hand_and_the_tokenizer_of_the_model_goes_first(adapter, base, tmp_path):
    moved = edit(copy(adapter, tmp_path / "moved"), base_model_name_or_path="nowhere/tiny-base")
    torch.testing.assert_close(logits(load(moved, str(base))[0].tuned), logits(load(adapter, None)[0].tuned))
    own = copy(adapter, tmp_path / "own")
    tokenizer = tiny.tokenizer(chat_template="{{ messages[0]['content'] }}")
    tokenizer.save_pretrained(own)
    assert load(own, None)[0].tokenizer.chat_template == tokenizer.chat_template
    assert load(adapter, None)[0].tokenizer.chat_template == tiny.CHAT


def test_a_whole_model_is_scored_beside_the_base_that_is_named(base, tmp_path):
    tuned = AutoModelForCausalLM.from_pretrained(base)
    tuned.lm_head.weight.data.add_(0.1)
    tuned.save_pretrained(tmp_path / "whole")
    models, kind, name = load(tmp_path / "whole", str(base))
    assert (kind, name) == ("whole model", str(base))
    torch.testing.assert_close(logits(models.tuned), logits(tuned.eval()))
    with models.base() as before:
        torch.testing.assert_close(logits(before), logits(AutoModelForCausalLM.from_pretrained(base)))


def test_modules_that_were_saved_whole_are_switched_off_with_the_adapter(base, tmp_path):
    path = save_adapter(base, tmp_path / "saved", modules_to_save=["lm_head"])
    weights = load_file(path / "adapter_model.safetensors")
    save_file({name: w + 0.1 * ("lm_head" in name) for name, w in weights.items()}, path / "adapter_model.safetensors")
    models = load(path, None)[0]
    with models.base() as before:
        torch.testing.assert_close(logits(before), logits(AutoModelForCausalLM.from_pretrained(base)))


def test_a_directory_without_a_model_is_refused(tmp_path):
    assert "holds neither" in refusal(tmp_path, None)
    assert "is not a directory" in refusal(tmp_path / "none", None)


def test_an_adapter_without_a_base_that_can_be_found_is_refused(adapter, base, tmp_path):
    moved = edit(copy(adapter, tmp_path / "moved"), base_model_name_or_path=None)
    assert "names no base model" in refusal(moved, None)
    moved = edit(moved, base_model_name_or_path="nowhere/tiny-base")
    assert "adapter_config.json names 'nowhere/tiny-base'" in refusal(moved, None)
    assert "--base nowhere/else" in refusal(moved, "nowhere/else")
    assert "--base builtin:huge" in refusal(moved, "builtin:huge")


def test_a_broken_configuration_is_refused(adapter, tmp_path):
    broken = copy(adapter, tmp_path / "broken")
    (broken / "adapter_config.json").write_text("{")
    assert "is not an adapter configuration" in refusal(broken, None)
    (broken / "adapter_config.json").write_text('{"peft_type": "NEW"}')
    assert "is not an adapter configuration" in refusal(broken, None)


@pytest.mark.parametrize(
    "changes",
    [{"hidden_size": 32, "head_dim": 16}, {"num_hidden_layers": 1}, {"num_hidden_layers": 3}, {"family": "gpt2"}],
    ids=["wider", "fewer layers", "more layers", "another architecture"],
)
def test_a_base_of_another_shape_is_refused(adapter, tmp_path, changes):
    other = tiny.save_model(tmp_path / "other", **changes)
    assert "does not match the base model" in refusal(adapter, str(other))


def test_an_adapter_with_tensors_too_few_or_too_many_is_refused(adapter, tmp_path):
    for name, change in (
        ("few", lambda w: dict(list(w.items())[1:])),
        ("many", lambda w: {**w, "base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight": torch.ones(2, 16)}),
        ("renamed", lambda w: {key.replace("layers.1.", "layers.7."): value for key, value in w.items()}),
    ):
        path = copy(adapter, tmp_path / name)
        save_file(change(load_file(path / "adapter_model.safetensors")), path / "adapter_model.safetensors")
        assert "does not match the base model" in refusal(path, None)


def test_damaged_older_or_missing_weights_are_refused(adapter, tmp_path):
    path = copy(adapter, tmp_path / "damaged")
    (path / "adapter_model.safetensors").write_bytes(b"no tensors")
    assert "does not match the base model" in refusal(path, None)
    (path / "adapter_model.safetensors").unlink()
    assert "holds no adapter_model.safetensors" in refusal(path, None)
    path = copy(adapter, tmp_path / "older")
    torch.save(load_file(path / "adapter_model.safetensors"), path / "adapter_model.bin")
    (path / "adapter_model.safetensors").unlink()
    assert "adapter_model.bin is no longer read" in refusal(path, None)


def test_an_adapter_that_cannot_be_switched_off_is_refused(adapter, base, tmp_path):
    """Stored embeddings go into the base itself, which would then be no base any more."""
    path = copy(adapter, tmp_path / "embedded")
    weights = load_file(path / "adapter_model.safetensors")
    weights["base_model.model.model.embed_tokens.weight"] = torch.ones(384, 16)
    save_file(weights, path / "adapter_model.safetensors")
    assert "has to be merged" in refusal(path, None)
    net = AutoModelForCausalLM.from_pretrained(base)
    prompt = get_peft_model(net, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    prompt.save_pretrained(tmp_path / "prompt")
    assert "PROMPT_TUNING" in refusal(tmp_path / "prompt", None)


def test_a_tokenizer_of_another_model_is_refused(adapter, base, tmp_path):
    larger = copy(adapter, tmp_path / "larger")
    tokenizer = tiny.tokenizer()
    tokenizer.add_tokens([f"<new{number}>" for number in range(10)])
    tokenizer.save_pretrained(larger)
    assert "embeds 384" in refusal(larger, None)
    other = copy(adapter, tmp_path / "other")
    shutil.copy(base / "tokenizer_config.json", other)
    value = json.loads((base / "tokenizer.json").read_text())
    one, two = list(value["model"]["vocab"])[50:52]
    vocabulary = value["model"]["vocab"]
    vocabulary[one], vocabulary[two] = vocabulary[two], vocabulary[one]
    (other / "tokenizer.json").write_text(json.dumps(value))
    assert "numbers 2 tokens differently" in refusal(other, None)
    (other / "tokenizer.json").write_text("{")
    assert "no fast tokenizer" in refusal(other, None)


def test_a_whole_model_needs_a_base_of_its_own_shape(base, tmp_path):
    assert "Type --base NAME" in refusal(base, None)
    assert "--base nowhere/tiny" in refusal(base, "nowhere/tiny")
    other = tiny.save_model(tmp_path / "other", num_hidden_layers=1)
    assert "differ in num_hidden_layers" in refusal(base, str(other))
    broken = copy(base, tmp_path / "broken")
    (broken / "model.safetensors").unlink()
    assert "no causal language model could be loaded from it" in refusal(broken, str(base))


def test_a_claim_is_an_epsilon_with_its_delta():
    assert outside_claim(None, None) is None
    assert outside_claim(2.0, 1e-5) == Claim(2.0, 1e-5, "example")
    assert outside_claim(2.0, 0.0, "patient") == Claim(2.0, 0.0, "patient")
    wrong = [(epsilon, 1e-5) for epsilon in (None, 0.0, float("inf"), float("nan"))]
    for epsilon, delta in (*wrong, (1.0, None), (1.0, 1.0), (1.0, -0.1)):
        with pytest.raises(ConfigError, match="is not a claim"):
            outside_claim(epsilon, delta)


def test_canaries_that_cannot_be_scored_are_refused_without_their_text(adapter, tmp_path):
    with pytest.raises(ConfigError, match="a claim cannot be tested"):
        audit_outside(adapter, tiny.write_rows(tmp_path / "m.jsonl", [*CANARIES]), claim=outside_claim(1.0, 1e-5))
    long = {"carrier": f"{SECRET} " * 40, "secret": "99", "inserted": True}
    path = tiny.write_rows(tmp_path / "m.jsonl", [COINS, *CANARIES, long])
    with pytest.raises(ConfigError, match="canary c00060") as caught:
        audit_outside(adapter, path)
    assert "Sigrid" not in str(caught.value)
    plan = plan_canaries(CanaryConfig(groups={1: 4}, references=100, place="prompt"), generator=random.Random(2))
    save(plan, tmp_path / "canaries.json")
    with pytest.raises(ConfigError, match="in format text its secret has no place"):
        audit_outside(adapter, tmp_path / "canaries.json", fmt="text")


def test_weights_that_are_not_numbers_give_no_report(adapter, tmp_path):
    path = copy(adapter, tmp_path / "nan")
    weights = load_file(path / "adapter_model.safetensors")
    save_file({name: w * float("nan") for name, w in weights.items()}, path / "adapter_model.safetensors")
    with pytest.raises(DpllmError, match="not finite"):
        audit_outside(path, tiny.write_rows(tmp_path / "m.jsonl", [COINS, *CANARIES]))


def test_a_report_says_what_was_audited_and_what_no_file_can_show(adapter, tmp_path):
    report = audit_outside(adapter, tiny.write_rows(tmp_path / "m.jsonl", [COINS, *CANARIES])).to_json()
    weights = report["model"].pop("weights")
    assert list(weights) == ["adapter_config.json", "adapter_model.safetensors"]
    assert report["model"] == {"kind": "LORA adapter", "name": "adapter", "base": "tiny-base"}
    assert any("the base is the one" in line for line in report["assumed"])
    assert "no. 7 is" not in json.dumps(report, allow_nan=False)
