"""What trains, what does not, and what a stranger can load."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import tiny_models as tm
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.pytorch_utils import Conv1D

from dpllm.errors import ConfigError
from dpllm.model import adapters, loading
from dpllm.privacy import guards
from dpllm.recipe.config import RunConfig
from dpllm.run import checkpoint
from dpllm.run.directory import RunDir

CPU = torch.device("cpu")
ROUTED = ("experts", "router", "gate")
Json = dict[str, Any]


@pytest.fixture(scope="session")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("bases")
    return {family: tiny.save_model(root / family, family) for family in tiny.FAMILIES | tiny.MIXED}


def recipe(base: Path | str, adapter: Json | None = None, **sections: Json) -> RunConfig:
    model = {"name_or_path": str(base), **sections.pop("model", {})}
    return tm.recipe(model=model, adapter=adapter or {"method": "lora", "r": 4}, **sections)


def trainable(net: torch.nn.Module) -> set[str]:
    return {name for name, parameter in net.named_parameters() if parameter.requires_grad}


def in_block(name: str) -> bool:
    return re.search(r"\.(layers|h)\.\d+\.", name) is not None


def logits(net: Any) -> torch.Tensor:
    ids = torch.tensor([[0, 40, 41, 42, 43, 44]])
    with torch.no_grad():
        return net.eval()(input_ids=ids).logits


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_auto_adapts_every_linear_layer_of_the_blocks_and_nothing_else(bases: dict[str, Path], family: str) -> None:
    base = loading.load_base(recipe(bases[family]).model, CPU)
    expected = {
        name
        for name, module in base.named_modules()
        if isinstance(module, torch.nn.Linear | Conv1D) and in_block(name) and not set(name.split(".")) & set(ROUTED)
    }
    assert len(expected) >= 8
    net = loading.build(recipe(bases[family]), CPU)
    names = trainable(net)
    adapted = {name.removeprefix("base_model.model.").rsplit(".lora_", 1)[0] for name in names}
    assert adapted == expected
    assert {name.split(".lora_")[1] for name in names} == {"A.default.weight", "B.default.weight"}
    assert len(names) == 2 * len(expected)
    ends = net.get_output_embeddings(), net.get_input_embeddings()
    assert not any(parameter.requires_grad for end in ends for parameter in end.parameters())
    guards.check_model(net)


ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
MLP = {"gate_proj", "up_proj", "down_proj"}
LATENT = {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"}
AUTO = {  # what is adapted, by the last part of its name, and some of what is not, by its name in a block
    "deepseek_v2": (LATENT, {"mlp.gate", "mlp.experts", "mlp.shared_experts.gate_proj"}),
    "deepseek_v3": (LATENT, {"mlp.gate", "mlp.experts", "mlp.shared_experts.gate_proj"}),
    "deepseek_v32": (LATENT, {"mlp.gate", "mlp.experts", "self_attn.indexer.wq_b"}),
    "glm4_moe": (ATTENTION, {"mlp.gate", "mlp.experts", "mlp.shared_experts.gate_proj", "mlp.gate_proj"}),
    "qwen2_moe": (ATTENTION | MLP | {"shared_expert_gate"}, {"mlp.gate", "mlp.experts"}),
    "qwen3_moe": (ATTENTION, {"mlp.gate", "mlp.experts"}),
    "qwen3_next": (
        ATTENTION | {"in_proj_qkvz", "in_proj_ba", "out_proj", "shared_expert_gate"}, {"mlp.gate", "mlp.experts"},
    ),
    "ernie4_5_moe": (ATTENTION, {"mlp.gate", "mlp.experts", "mlp.shared_experts.gate_proj"}),
    "exaone_moe": (ATTENTION, {"mlp.gate", "mlp.experts", "mlp.shared_experts.gate_proj"}),
    "jamba": (
        ATTENTION | MLP | {"in_proj"}, {"feed_forward.router", "feed_forward.experts", "mamba.out_proj", "mamba.x_proj"},
    ),
    "mamba": ({"in_proj"}, {"mixer.out_proj", "mixer.x_proj", "mixer.dt_proj"}),
    "mamba2": ({"in_proj"}, {"mixer.out_proj"}),
    "nemotron_h": (
        ATTENTION | {"in_proj", "up_proj", "down_proj"}, {"mixer.gate", "mixer.experts", "mixer.out_proj"},
    ),
    "stablelm": (ATTENTION | MLP, set()),
    "modernbert-decoder": ({"q_proj", "k_proj", "v_proj", "Wi", "Wo"}, set()),
    "ctrl": ({"Wq", "Wk", "Wv", "dense", "0", "2"}, set()),
    "gemma3": (ATTENTION | MLP, set()),
}  # fmt: skip


@pytest.mark.parametrize("family", tiny.MIXED)
def test_auto_leaves_out_what_clipping_cannot_hold_and_says_so(bases: dict[str, Path], family: str) -> None:
    net = loading.build(recipe(bases[family]), CPU)
    adapted = {name.rsplit(".lora_", 1)[0] for name in trainable(net)}
    expected, apart = AUTO[family]
    assert {name.rsplit(".", 1)[-1] for name in adapted} == expected
    assert all(name.startswith(f"{adapters.blocks(net)[0]}.") for name in adapted)
    assert apart <= set(adapters.left_out(net))
    assert not {name.removeprefix("base_model.model.") for name in adapted} & set(adapters.left_out(net))
    assert bool(apart) == bool(adapters.left_out(net))
    guards.check_model(net)
    assert len(str(net.peft_config["default"].target_modules)) < 300


def test_names_that_match_more_than_the_blocks_become_an_expression(bases: dict[str, Path]) -> None:
    """Numbers name linear layers of CTRL and its blocks too; Gemma 3 has an encoder of images with the same names."""
    for family, prefix in (("ctrl", r"transformer\.h\.\d+\.("), ("gemma3", r"model\.language_model\.layers\.\d+\.(")):
        assert loading.build(recipe(bases[family]), CPU).peft_config["default"].target_modules.startswith(prefix)
    for family in ("llama", "deepseek_v3", "mamba2"):
        targets = loading.build(recipe(bases[family]), CPU).peft_config["default"].target_modules
        assert not isinstance(targets, str)


def test_a_smaller_list_before_the_blocks_is_not_taken_for_them(bases: dict[str, Path]) -> None:
    net = loading.load_base(recipe(bases["llama"]).model, CPU)
    small = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(5))
    net.model._modules = {"projections": small, **net.model._modules}
    assert adapters.blocks(net)[0] == "model.layers"


@pytest.mark.parametrize(
    "adapter", [{"method": "lora"}, {"method": "frozen", "last_blocks": 1}], ids=["lora", "frozen"]
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_what_trains_is_float32_over_a_low_precision_base(bases: dict[str, Path], dtype: str, adapter: Json) -> None:
    net = loading.build(recipe(bases["llama"], adapter, model={"dtype": dtype}), CPU)
    dtypes = {(parameter.requires_grad, parameter.dtype) for parameter in net.parameters()}
    assert {kind for trains, kind in dtypes if trains} == {torch.float32}
    assert adapter["method"] == "frozen" or (False, getattr(torch, dtype)) in dtypes


@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], "q_proj", ".*\\.layers\\.1\\..*_proj"])
def test_targets_are_read_as_they_are_typed(bases: dict[str, Path], targets: Any) -> None:
    net = loading.build(recipe(bases["llama"], {"method": "lora", "target_modules": targets}), CPU)
    layers = {name.rsplit(".lora_", 1)[0].removeprefix("base_model.model.model.layers.") for name in trainable(net)}
    if isinstance(targets, str) and "*" in targets:
        assert {layer.split(".")[0] for layer in layers} == {"1"}
        assert len(layers) == 7
    else:
        wanted = [targets] if isinstance(targets, str) else targets
        assert layers == {f"{block}.self_attn.{name}" for block in range(2) for name in wanted}


@pytest.mark.parametrize("targets", [["c_attn"], "nothing_like_it"])
def test_a_target_that_matches_nothing_lists_what_there_is(bases: dict[str, Path], targets: Any) -> None:
    with pytest.raises(ConfigError, match=r"matches no layer") as caught:
        loading.build(recipe(bases["llama"], {"method": "lora", "target_modules": targets}), CPU)
    message = str(caught.value)
    for layer in ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"):
        assert layer in message
    assert "adapter.target_modules: auto" in message
    assert "\n" not in message


def test_the_seed_decides_the_initialisation_and_a_new_adapter_changes_nothing_yet(bases: dict[str, Path]) -> None:
    nets = [loading.build(recipe(bases["llama"], train={"steps": 1, "seed": seed}), CPU) for seed in (3, 3, 4)]
    first, same, other = ([p for name, p in net.named_parameters() if "lora_A" in name] for net in nets)
    assert all(map(torch.equal, first, same))
    assert not any(map(torch.equal, first, other))
    base = loading.load_base(recipe(bases["llama"]).model, CPU)
    torch.testing.assert_close(logits(nets[0]), logits(base))


def test_with_its_first_factor_frozen_an_adapter_starts_the_same_and_trains_half(bases: dict[str, Path]) -> None:
    whole, half = (
        loading.build(recipe(bases["phi3"], {"method": "lora", "lora_a": a}), CPU) for a in ("trained", "frozen")
    )
    assert all(value.equal(half.state_dict()[name]) for name, value in whole.state_dict().items())
    assert trainable(half) == {name for name in trainable(whole) if ".lora_B." in name}
    assert len(trainable(half)) == len(trainable(whole)) / 2
    assert adapters.left_out(half) == []


def test_processes_compare_a_frozen_factor_too(bases: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    facts: dict[str, str] = {}
    monkeypatch.setattr(loading.processes, "several", lambda: True)
    monkeypatch.setattr(loading.processes, "check_equal", facts.update)
    results = []
    adapter = {"method": "lora", "lora_a": "frozen"}
    for seed in (1, 1, 2):
        loading.build(recipe(bases["phi3"], adapter, train={"steps": 1, "seed": seed}), CPU)
        results.append(facts["the adapter or layers that training starts from"])
    assert results[0] == results[1] != results[2]  # B starts at zero: only the frozen factor differs


def test_heads_and_embeddings_that_cannot_train_as_asked_say_so(bases: dict[str, Path], monkeypatch: Any) -> None:
    with pytest.raises(ConfigError, match="Remove the embedding"):
        loading.build(recipe(bases["llama"], {**ADAPTERS["embedding"], "lora_a": "frozen"}), CPU)
    monkeypatch.setattr("transformers.LlamaForCausalLM.get_output_embeddings", lambda self: None)
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM has no output head.*adapter\.lm_head: false"):
        loading.build(recipe(bases["llama"], {"method": "frozen", "lm_head": True}), CPU)


@pytest.mark.parametrize(
    ("adapter", "kinds"),
    [
        ({"method": "lora", "lora_a": "frozen"}, 1),
        ({"method": "lora", "modules_to_save": ["lm_head"]}, 2),
        ({"method": "frozen", "last_blocks": 1, "lm_head": True}, 3),
    ],
)
def test_the_table_counts_all_that_trains(bases: dict[str, Path], adapter: Json, kinds: int) -> None:
    net = loading.build(recipe(bases["gpt2"], adapter), CPU)
    rows = adapters.trainable_table(net)
    assert len(rows) == kinds
    assert sum(tensors for _, tensors, _ in rows) == len(trainable(net))
    assert sum(size for *_, size in rows) == sum(p.numel() for p in net.parameters() if p.requires_grad)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "phi3", "gpt2", "gpt_neox", "opt", "stablelm"])
@pytest.mark.parametrize("final_norm", [True, False])
def test_exactly_the_last_blocks_and_the_final_norm_train(
    bases: dict[str, Path], family: str, final_norm: bool
) -> None:
    adapter = {"method": "frozen", "last_blocks": 1, "final_norm": final_norm}
    net = loading.build(recipe(bases[family], adapter), CPU)
    names = trainable(net)
    last = {name for name, _ in net.named_parameters() if re.search(r"\.(layers|h)\.1\.", name)}
    final = {name for name, _ in net.named_parameters() if (not in_block(name) and "norm" in name) or ".ln_f." in name}
    assert last
    assert final
    assert names == last | (final if final_norm else set())


@pytest.mark.parametrize(
    ("adapter", "words"),
    [
        ({"last_blocks": 3}, "adapter.last_blocks is 3, but the base model has 2 blocks"),
        ({"last_blocks": 0, "final_norm": False}, "nothing trains"),
    ],
)
def test_layers_that_are_not_there_or_none_at_all_are_an_error(
    bases: dict[str, Path], adapter: Json, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        loading.build(recipe(bases["llama"], {"method": "frozen", **adapter}), CPU)


def test_a_tied_head_trains_as_the_one_weight_that_it_is(tmp_path: Path, bases: dict[str, Path]) -> None:
    adapter = {"method": "frozen", "last_blocks": 0, "final_norm": False, "lm_head": True}
    tied = tiny.save_model(tmp_path / "tied", tie_word_embeddings=True)
    assert trainable(loading.build(recipe(tied, adapter), CPU)) == {"model.embed_tokens.weight"}
    assert trainable(loading.build(recipe(bases["llama"], adapter), CPU)) == {"lm_head.weight"}


@pytest.mark.parametrize(
    ("settings", "positions"),
    [({"max_position_embeddings": 64}, 64), ({"max_position_embeddings": -1}, None), ({}, None),
     ({"text_config": {"max_position_embeddings": 64}}, 64)],
)  # fmt: skip
def test_rows_are_no_longer_than_the_model_reads(settings: Json, positions: int | None) -> None:
    """-1 is XLNet's word for any length; a model of text and pictures states the length in its text configuration."""
    inner = SimpleNamespace(**settings.pop("text_config", settings))
    net = SimpleNamespace(config=SimpleNamespace(**settings, get_text_config=lambda: inner))
    assert loading.positions(net) == positions
    loading.check_length(recipe("x", data={"max_length": 64}), net)
    if positions:
        with pytest.raises(ConfigError, match="to 64 or less"):
            loading.check_length(recipe("x", data={"max_length": 65}), net)


def test_checkpointing_is_not_reentrant(bases: dict[str, Path]) -> None:
    config = recipe(bases["llama"], model={"gradient_checkpointing": True})
    net = loading.build(config, CPU)
    assert net.is_gradient_checkpointing
    kinds = {part._gradient_checkpointing_func.keywords["use_reentrant"] for part in net.modules() if
             getattr(part, "_gradient_checkpointing_func", None)}  # fmt: skip
    assert kinds == {False}


@pytest.mark.parametrize("name", ["absent", "builtin:huge", "some-org/some-model"])
def test_a_model_that_is_not_there_is_one_clear_line(tmp_path: Path, name: str) -> None:
    config = recipe(str(tmp_path / name) if name == "absent" else name)
    for load in (loading.load_tokenizer, lambda m: loading.load_base(m, CPU)):
        with pytest.raises(ConfigError, match=r"model\.name_or_path") as caught:
            load(config.model)
        assert "\n" not in str(caught.value)


def moved(net: torch.nn.Module) -> torch.nn.Module:
    """As training would leave it: every trainable weight elsewhere."""
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return net


ADAPTERS = {
    "lora": {"method": "lora", "r": 4},
    "rslora": {"method": "lora", "r": 4, "use_rslora": True},
    "embedding": {"method": "lora", "r": 4, "target_modules": ["q_proj", "embed_tokens"]},
    "head": {"method": "lora", "r": 4, "modules_to_save": ["lm_head", "embed_tokens"]},
    "frozen": {"method": "frozen", "last_blocks": 1},
    "frozen_head": {"method": "frozen", "last_blocks": 1, "lm_head": True},
}


@pytest.mark.parametrize(
    ("family", "method"),
    [*((family, method) for family in ("llama", "gpt2", "mixtral", "opt") for method in ("lora", "frozen")),
     *((family, "lora") for family in ("deepseek_v3", "jamba", "nemotron_h", "ctrl", "gemma3")),
     *(("llama", method) for method in ("rslora", "embedding", "head", "frozen_head"))],
)  # fmt: skip
def test_a_stranger_loads_the_export_and_gets_the_same_logits(
    tmp_path: Path, bases: dict[str, Path], family: str, method: str
) -> None:
    adapter = ADAPTERS[method]
    if (family, method) == ("mixtral", "frozen"):
        pytest.skip("its experts would train, which is refused")
    config = recipe(bases[family], adapter)
    net = moved(loading.build(config, CPU))
    run = RunDir(tmp_path / "secret-place" / "run")
    run.make()
    (run.export / "of_the_last_time.txt").write_text("old")
    checkpoint.export(net, loading.load_tokenizer(config.model), run)
    assert not (run.export / "of_the_last_time.txt").exists()
    hashes = checkpoint.weight_hashes(run.export)
    if adapter["method"] == "lora":
        loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(bases[family]), str(run.export))
        assert set(hashes) == {"adapter_model.safetensors", "adapter_config.json"}
    else:
        loaded = AutoModelForCausalLM.from_pretrained(str(run.export))
        assert set(hashes) == {"model.safetensors", "config.json"}
    expected = logits(net)
    torch.testing.assert_close(logits(loaded), expected)
    assert not torch.allclose(logits(loading.load_base(config.model, CPU)), expected, atol=1e-3)
    assert AutoTokenizer.from_pretrained(str(run.export)).encode("a red boat") == tiny.tokenizer().encode("a red boat")
    scoring = loading.load_for_scoring(config, run.export, CPU)
    torch.testing.assert_close(logits(scoring.tuned), expected)
    with scoring.base() as base:
        torch.testing.assert_close(logits(base), logits(loading.load_base(config.model, CPU)))
    assert_nothing_private(run.export, tmp_path, bases[family])


def assert_nothing_private(export: Path, *places: Path) -> None:
    for path in export.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            for place in places:
                assert str(place).encode() not in content, path
                assert str(place.parent).encode() not in content, path
            assert path.suffix in {".safetensors", ".json", ".jinja", ".txt", ".model"}, path
            assert path.name != "README.md"
