"""What an author states of a deployment: on the card, in the statement, and in an entry of the DP Deployments Registry."""

import copy
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from cards import EPSILON, broken, config, plan, record, render_card

from dpllm.card import registry
from dpllm.errors import ConfigError
from dpllm.recipe.config import RunConfig, dump_config, make_config
from dpllm.recipe.sections import DeploymentConfig
from dpllm.statement import privacy_record

SCHEMA = yaml.safe_load(Path(__file__).with_name("registry_schema.yaml").read_text("utf-8"))
SAID = {
    "curator": 'St. Mary\'s: "ward 7"', "intended_use": "drafts of letters <b>| # within the ward",
    "sector": "Healthcare", "region": "Bavaria", "further_releases": "one more in 2028",
    "epsilon_rationale": "the largest that the board allows", "epsilon_decided_by": "the ethics board",
    "review_date": "2027-06-30", "incident_contact": "dpo@hospital.example",
}  # fmt: skip
ABSENT = "not stated"


def with_deployment(deployment: dict[str, Any], **card: Any) -> RunConfig:
    return config(card={"deployment": deployment, "contact": None, **card})


def entry(deployment: dict[str, Any], **card: Any) -> dict[str, Any]:
    recipe = with_deployment(deployment, **card)
    block = render_card(recipe, plan(), record(), None)[1]
    text = registry.entry(privacy_record.read(block), recipe)
    return dict(yaml.safe_load(text))


def leaves(value: Any, where: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        return {name: leaf for key, inner in value.items() for name, leaf in leaves(inner, f"{where}.{key}").items()}
    return {where: value}


def test_every_key_is_optional_and_absent_unless_it_is_given() -> None:
    assert all(field.default is None for field in DeploymentConfig.model_fields.values())
    assert SAID.keys() == DeploymentConfig.model_fields.keys()
    text, block = render_card(config(), plan(), record(), None)
    assert "deployment" not in block
    assert "in its author's words" not in text


@pytest.mark.parametrize("key", SAID)
def test_a_key_that_is_given_stands_in_the_statement_and_on_the_card_and_no_other(key: str) -> None:
    text, block = render_card(with_deployment({key: SAID[key]}), plan(), record(), None)
    assert block["deployment"] == {key: SAID[key]}
    section = text.partition("## The deployment, in its author's words")[2].partition("\n## ")[0]
    assert section.count("\n| ") == 2  # the head of the table, and one row
    assert SAID[key].split()[0] in section


def test_a_run_without_a_guarantee_is_no_deployment_and_explains_the_planned_epsilon_alone() -> None:
    recipe = with_deployment({"epsilon_rationale": "because"})
    assert "| Why this ε | because |" in render_card(recipe, plan(), record(), None)[0]
    assert "| Why the planned ε | because |" in render_card(recipe, plan(), broken(), None)[0]
    block = render_card(config(), plan(), broken(), None)[1]
    with pytest.raises(ConfigError, match="gives no differential privacy guarantee"):
        registry.entry(privacy_record.read(block), config())


@pytest.mark.parametrize("value", ["soon", "2027-02-30", "2027-6-30", "", " ", 3, True])
def test_a_review_is_on_a_day(value: object) -> None:
    with pytest.raises(ConfigError, match=r"card\.deployment\.review_date"):
        make_config(raw(), {"card.deployment.review_date": value}, "recipe.yaml")


def raw() -> dict[str, Any]:
    return dict(yaml.safe_load(dump_config(config())))


def test_a_day_without_quotes_is_one_and_comes_back_from_the_recipe() -> None:
    given = yaml.safe_load("{review_date: 2027-06-30}")
    recipe = with_deployment(given)
    assert recipe.card.deployment.review_date == "2027-06-30"
    assert RunConfig.model_validate(yaml.safe_load(dump_config(recipe))) == recipe


@pytest.mark.parametrize("changes", [{"sector": "Justice"}, {"curator": ""}, {"curator": "  "}, {"curators": "A"}])
def test_what_says_nothing_or_has_no_place_is_refused(changes: dict[str, str]) -> None:
    keys = {f"card.deployment.{key}": value for key, value in changes.items()}
    with pytest.raises(ConfigError, match=r"card\.deployment"):
        make_config(raw(), keys, "recipe.yaml")


@pytest.mark.parametrize("deployment", [{}, SAID, *({key: value} for key, value in SAID.items())])
def test_an_entry_keeps_to_the_schema(deployment: dict[str, Any]) -> None:
    jsonschema.validate(entry(deployment), SCHEMA)


def test_the_schema_sees_what_is_wrong() -> None:
    whole = entry(SAID)
    for change in ({"tier": 4}, {"more": 1}, {"status": "Approved"}, {"deployment": {"basic": {}}}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**copy.deepcopy(whole), **change}, SCHEMA)


def test_an_entry_says_what_the_statement_says() -> None:
    made = entry(SAID, title="Letters of ward 7", description="Writes letters.")
    basic, loss = made["deployment"]["basic"], made["deployment"]["privacy_loss"]
    assert made["url_slug"] == "letters_of_ward_7"
    assert (basic["name"], basic["description"]) == ("Letters of ward 7", "Writes letters.")
    assert (basic["data_curators"], basic["intended_use"]) == ([SAID["curator"]], SAID["intended_use"])
    assert (basic["data_product_sector"], basic["data_product_region"]) == ("Healthcare", "Bavaria")
    assert loss["privacy_parameters"] == {"epsilon": EPSILON, "delta": 1e-05}
    text = " ".join(reworded(leaf, "", "") for leaf in leaves(made).values())
    for value in SAID.values():
        assert value in text
    assert text.count(ABSENT) == 5  # tuning, preparation of the data, their readers, contact, who wrote the entry
    assert "4.25" in made["deployment"]["accounting"]["composition"]


@pytest.mark.parametrize("key", SAID)
def test_without_a_key_an_entry_says_that_it_is_not_stated(key: str) -> None:
    """In its place, or its field is left out; everything else is the same, but for the hash of the statement."""
    expected = {name: reworded(leaf, SAID[key], ABSENT) for name, leaf in leaves(entry(SAID)).items()}
    if key == "sector":
        del expected[".deployment.basic.data_product_sector"]
    without = leaves(entry({name: value for name, value in SAID.items() if name != key}))
    assert {name: reworded(leaf, "", "") for name, leaf in without.items()} == expected


def reworded(leaf: Any, old: str, new: str) -> str:
    text = leaf[0] if isinstance(leaf, list) else str(leaf)
    return re.sub("[0-9a-f]{64}", "HASH", text.replace(old, new))


def test_no_word_of_dpllm_calls_anything_anonymous() -> None:
    """In no branch of any page or message; what an author writes is the author's."""
    package = Path(registry.__file__).parents[1]
    pages = [path for kind in ("*.py", "*.j2") for path in package.rglob(kind)]
    assert len(pages) > 150
    assert [path for path in pages if "anonym" in path.read_text("utf-8").lower()] == []
