"""What the recipe promises: closed, frozen, typed, and one clear line for every mistake."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

import dpllm
from dpllm.errors import ConfigError
from dpllm.recipe.config import FrozenConfig, LoraConfig, RunConfig, Section, dump_config, load_config
from dpllm.recipe.section import parse_overrides

RECIPES = sorted((Path(__file__).resolve().parents[2] / "recipes").rglob("*.yaml"))
RUN_RECIPES = [path for path in RECIPES if path.parent.name != "accelerate"]
Json = dict[str, Any]


def raw() -> Json:
    return {
        "model": {"name_or_path": "gpt2"}, "adapter": {"method": "lora", "r": 8}, "data": {"train": "rows.jsonl"},
        "privacy": {"epsilon": 3.0}, "train": {"steps": 10, "batch_size": 8}, "output_dir": "runs/a",
    }  # fmt: skip


def put(value: Json, changes: Json) -> Json:
    for key, new in changes.items():
        *parents, last = key.split(".")
        section = value
        for parent in parents:
            section = section.setdefault(parent, {})
        section[last] = new
    return value


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return write(tmp_path, raw())


def write(folder: Path, value: Any) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(value if isinstance(value, str) else yaml.safe_dump(value), encoding="utf-8")
    return path


def problem(folder: Path, value: Any, *overrides: str) -> str:
    """The message of a refused recipe, without its path, which begins each line."""
    path = write(folder, value)
    with pytest.raises(ConfigError) as caught:
        load_config(path, parse_overrides(overrides))
    message = str(caught.value)
    assert all(line.startswith(f"{path}: ") for line in message.splitlines()), message
    return message.replace(f"{path}: ", "")


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("privacy.epsilom", "epsilon"), ("train.learning_rat", "learning_rate"), ("data.publik", "public"),
        ("adapter.target_module", "target_modules"), ("audit.canaries.digit", "digits"), ("modle", "model"),
    ],
)  # fmt: skip
def test_unknown_key_gets_the_nearest_spelling(tmp_path: Path, key: str, nearest: str) -> None:
    expected = f"{key}: unknown key; did you mean {nearest}?"
    assert expected in problem(tmp_path, put(raw(), {key: 1}))
    assert expected in problem(tmp_path, raw(), f"--{key}", "1")  # typed as an override too


# Values of another type, and impossible ones.
WRONG: dict[str, list[Any]] = {
    "output_dir": [None], "train": [5], "train.steps": ["many", 1.5, True, 0], "train.batch_size": [0],
    "train.tokens_per_pass": [0, 1.5, "many", None, [8], 2**20 + 1], "train.learning_rate": [[1]],
    "train.optimizer": ["lion"], "train.warmup": [1.0], "train.momentum": [1.0],
    "privacy.epsilon": ["lots", True, 0, -1, float("inf"), float("nan")],
    "privacy.delta": ["small", True, 0, 1.0, 1], "privacy.enabled": ["maybe", 1], "privacy.max_grad_norm": [0],
    "privacy.noise_multiplier": [0], "privacy.insecure_seed": [-1, 2**128], "data.public": ["yes"],
    "data.train": [5, None], "data.max_length": [1], "data.public_size": [0],
    "data.columns": [{"patient_id": "visit_id"}], "model.dtype": ["int3"], "adapter": [{"method": "prefix"}],
    "adapter.target_modules": [5], "adapter.lora_a": ["random"], "adapter.r": [0], "adapter.dropout": [1.0],
    "audit.alpha": [0.5], "audit.canaries": [5], "audit.canaries.digits": [3], "audit.canaries.groups": [{}, {0: 5}],
}  # fmt: skip


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, values in WRONG.items() for value in values])
def test_a_wrong_value_names_its_key_in_every_line(tmp_path: Path, key: str, value: Any) -> None:
    message = problem(tmp_path, put(raw(), {key: value}))
    assert all(line.startswith(f"{key}: ") for line in message.splitlines()), message


@pytest.mark.parametrize("bands", ["many", 2.5, [4], {"n": 4}, 0])
def test_a_wrong_number_of_bands_is_one_line(tmp_path: Path, bands: Any) -> None:
    message = problem(tmp_path, put(raw(), {"privacy.noise": "banded", "privacy.bands": bands}))
    assert message.startswith("privacy.bands: ")
    assert "1 or more, or auto" in message
    assert len(message.splitlines()) == 1


@pytest.mark.parametrize(
    ("changes", "advice"),
    [
        ({"privacy.zzz": 1}, "privacy.zzz: unknown key; known keys: enabled, epsilon, delta"),
        ({"train.epochs": 2}, "train.epochs or train.steps"),
        ({"train.steps": None}, "train.epochs or train.steps"),
        ({"model.adapter": "runs/first/export", "adapter": {"method": "frozen"}}, "or adapter.method: lora"),
        ({"model.adapter": ""}, "model.adapter: "),
        ({"train.momentum": 0.9}, "set optimizer: sgd or remove momentum"),
        ({"data.unit": "author"}, "data.max_examples_per_unit"),
        ({"data.max_examples_per_unit": 3}, "needs data.unit"),
        ({"data.packing": True}, "set data.packing: false"),
        ({"privacy.fit_budget": True, "privacy.final": True}, "set privacy.epsilon to that of the budget or less"),
    ],
)
def test_contradictions_say_what_to_type(tmp_path: Path, changes: Json, advice: str) -> None:
    assert advice in problem(tmp_path, put(raw(), changes))


def test_every_problem_has_a_line_and_a_missing_section_is_named(tmp_path: Path) -> None:
    first, second = problem(tmp_path, put(raw(), {"privacy.epsilon": -1, "train.batchsize": 3})).splitlines()
    assert first.startswith("privacy.epsilon: ")
    assert second == "train.batchsize: unknown key; did you mean batch_size?"
    value = raw()
    del value["data"]
    assert problem(tmp_path, value) == "data: required, and missing"


@pytest.mark.parametrize("content", [b"model: [", b"- a\n- b\n", b"", b"just words", b"\xff\xfe\x00", None])
def test_a_file_that_is_no_recipe_is_one_line(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path if content is None else tmp_path / "recipe.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"^{path}: [^\n]*$"):
        load_config(path)


def test_adapter_is_one_of_two(tmp_path: Path) -> None:
    for adapter, kind in (
        ({"method": "lora", "r": 8}, LoraConfig),
        ({"method": "frozen", "last_blocks": 1}, FrozenConfig),
    ):
        assert isinstance(load_config(write(tmp_path, {**raw(), "adapter": adapter})).adapter, kind)
    default = {key: value for key, value in raw().items() if key != "adapter"}
    assert load_config(write(tmp_path, default)).adapter == LoraConfig()
    assert load_config(write(tmp_path, {**raw(), "adapter": {"r": 4}})).adapter == LoraConfig(r=4)
    message = problem(tmp_path, {**raw(), "adapter": {"method": "frozen", "r": 8}})
    assert message.startswith("adapter.r: unknown key; known keys: method, last_blocks")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--privacy.epsilon", "2"], {"privacy.epsilon": 2}),
        (["--privacy.epsilon=2"], {"privacy.epsilon": 2}),
        (["--train.batch-size", "4"], {"train.batch_size": 4}),
        (["--train.batch-size=4", "--output-dir", "x"], {"train.batch_size": 4, "output_dir": "x"}),
        (["--data.columns", "{text: body}"], {"data.columns": {"text": "body"}}),
        (["--data.eval", "null"], {"data.eval": None}),
        (["--data.public", "true"], {"data.public": True}),
        (["--adapter.target_modules", "[q_proj, v_proj]"], {"adapter.target_modules": ["q_proj", "v_proj"]}),
        (["--data.train", "a=b.jsonl"], {"data.train": "a=b.jsonl"}),
        (["--data.train=a=b.jsonl"], {"data.train": "a=b.jsonl"}),
        (["--card.description", "{broken: ["], {"card.description": "{broken: ["}),
        (["--train.learning_rate", "-1"], {"train.learning_rate": -1}),
    ],
)
def test_overrides_are_read_as_yaml(arguments: list[str], expected: Json) -> None:
    assert parse_overrides(arguments) == expected


@pytest.mark.parametrize("text", ["1e-3", "1.0e-3", "0.001", "1E-3"])
def test_scientific_numbers_are_numbers_on_the_line_and_in_the_file(recipe: Path, text: str) -> None:
    overrides = parse_overrides(["--train.learning_rate", text, "--privacy.delta", text])
    config = load_config(recipe, overrides)
    assert (config.train.learning_rate, config.privacy.delta) == (1e-3, 1e-3)
    recipe.write_text(dump_config(config).replace("0.001", text))
    assert load_config(recipe) == config


@pytest.mark.parametrize("arguments", [["privacy.epsilon", "3"], ["--train.steps"], ["--train.steps", "--data.eval"]])
def test_broken_overrides_are_named(arguments: list[str]) -> None:
    with pytest.raises(ConfigError, match=arguments[0]):
        parse_overrides(arguments)


def test_overrides_win_over_the_file_and_make_sections(recipe: Path) -> None:
    overrides = parse_overrides(["--privacy.epsilon", "1", "--audit.canaries.digits", "6", "--card.title", "A"])
    config = load_config(recipe, overrides)
    assert (config.privacy.epsilon, config.audit.canaries.digits, config.card.title) == (1, 6, "A")
    assert config.train.steps == 10


def test_frozen_in_every_section(recipe: Path) -> None:
    config = load_config(recipe)
    with pytest.raises(ValidationError):
        config.output_dir = "elsewhere"
    for name in RunConfig.model_fields:
        section = getattr(config, name)
        if isinstance(section, Section):
            field = next(iter(type(section).model_fields))
            with pytest.raises(ValidationError):
                setattr(section, field, getattr(section, field))


@pytest.mark.parametrize("path", RUN_RECIPES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_dumped_recipe_loads_as_the_same(path: Path, tmp_path: Path) -> None:
    config = load_config(path)
    text = dump_config(config)
    assert load_config(write(tmp_path, text)) == config
    written = yaml.safe_load(text)
    assert set(written) == set(RunConfig.model_fields)
    assert set(written["train"]) == set(type(config.train).model_fields)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("privacy:\n  epsilon: 8\n  delta: 1e-6\n  epsilon: 3\n", "'epsilon' appears twice, in lines 2 and 4"),
        ("train: {steps: 1}\ntrain: {steps: 2}\n", "'train' appears twice, in lines 1 and 2"),
        ("train: {steps: 1, steps: 2}\n", "'steps' appears twice, in lines 1 and 1"),
        ("audit: {canaries: {groups: {1: 10, 4: 20, 0x1: 30}}}\n", "1 appears twice"),
        ("data: &data\n  train: a.jsonl\n", "line 1 has an anchor"),
        ("a: [x, x]\nb: [*a, *a]\n", "line 2 has an anchor"),
        (f"train: {'[' * 3_000}{']' * 3_000}\n", "nested too deeply"),
        (f"train: {'{a: ' * 3_000}1{'}' * 3_000}\n", "nested too deeply"),
        ("train: {steps: 2020-99-99}\n", "is not valid YAML"),
    ],
    ids=["key", "section", "one line", "number", "anchor", "alias", "deep list", "deep mapping", "no date"],
)
def test_yaml_that_is_ambiguous_or_endless_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    message = problem(tmp_path, text)
    assert reason in message
    assert "\n" not in message


@pytest.mark.parametrize("text", ["[" * 3_000, "2020-99-99", "*name", "&name text"])
def test_an_override_that_is_no_value_is_its_text(text: str) -> None:
    assert parse_overrides(["--card.title", text]) == {"card.title": text}


def test_embedded_data_are_public_and_others_are_not(tmp_path: Path) -> None:
    for train, public in (("builtin:clinic", True), ("mine.jsonl", False)):
        for held_out, eval_public in (("builtin:clinic/eval", True), ("mine.jsonl", False)):
            data = load_config(write(tmp_path, put(raw(), {"data.train": train, "data.eval": held_out}))).data
            assert (data.public, data.eval_public) == (public, eval_public)


def test_rows_that_replace_embedded_data_are_not_public(tmp_path: Path) -> None:
    """A resolved recipe, as a run writes it, says public: true of the embedded rows; a mutant kept that for others."""
    resolved = load_config(
        write(tmp_path, put(raw(), {"data.train": "builtin:clinic", "data.eval": "builtin:clinic/eval"}))
    )
    file = tmp_path / "resolved.yaml"
    file.write_text(dump_config(resolved), "utf-8")
    assert (resolved.data.public, resolved.data.eval_public) == (True, True)
    for changes, flags in (
        ({"data.train": "mine.jsonl"}, (False, True)),
        ({"data.train": ["builtin:clinic", "mine.jsonl"], "data.eval": "mine.jsonl"}, (False, False)),
        ({"data.train": "mine.jsonl", "data.public": True}, (True, True)),
        ({"data.train": "builtin:tiny"}, (True, True)),
        ({"privacy.epsilon": 3}, (True, True)),
    ):
        for changed in (load_config(file, changes), dpllm.load_recipe(resolved, changes)):
            assert (changed.data.public, changed.data.eval_public) == flags


@pytest.mark.parametrize("trackers", [["wandb"], []])
@pytest.mark.parametrize("public", [True, False])
def test_a_card_says_where_private_held_out_figures_went(tmp_path: Path, trackers: list[str], public: bool) -> None:
    changes = {
        "data.eval": "held.jsonl",
        "data.public": public,
        "telemetry.private_metrics": True,
        "telemetry.trackers": trackers,
    }
    first = load_config(write(tmp_path, put(raw(), changes))).deviations[0]
    assert first.startswith("held-out loss was computed on private evaluation data")
    assert ("it is kept private" in first) == (not trackers)
    assert ("it went to trackers" in first) == bool(trackers)


def test_a_changed_recipe_differs_in_the_named_keys_alone() -> None:
    before = RunConfig.model_validate(put(raw(), {"audit.canaries.groups": {1: 20}}))
    changes = {"privacy.epsilon": 5.0, "privacy.delta": 1e-6, "output_dir": "runs/b", "audit.canaries.digits": 9}
    after = before.changed(changes)
    assert after.model_dump() == put(before.model_dump(), changes) != before.model_dump()
    assert before.changed({}) == before


@pytest.mark.parametrize("key", ["epsilom", "privacy.epsilom", "audit.canaries.digit"])
def test_a_change_of_a_key_that_no_recipe_has_is_an_error(key: str) -> None:
    before = RunConfig.model_validate(put(raw(), {"audit.canaries.groups": {1: 20}}))
    with pytest.raises(KeyError):
        before.changed({key: 1})
    with pytest.raises(KeyError):
        RunConfig.model_validate(raw()).changed({"audit.canaries.digits": 9})


def test_labels_have_an_epsilon_that_can_be_drawn(tmp_path: Path) -> None:
    """As ``dpllm randomize-labels`` draws them; above, e^epsilon overflows."""
    assert "data.label_epsilon" in problem(
        tmp_path, put(raw(), {"data.label_epsilon": 1000, "data.label_record": "a.json"})
    )
