"""An entry for the DP Deployments Registry (third tier), as a draft for the author to complete.

Comes in: the privacy statement of a run with a guarantee, and its recipe. Goes out: YAML. Must not state anything else.

References:
    https://github.com/opendp/deployments-registry-data, schemas/deployments-schema.yaml at 3e9c812a (July 2026).
"""

from __future__ import annotations

import re

import yaml

from dpllm.card.card import digest
from dpllm.errors import ConfigError
from dpllm.recipe import names
from dpllm.recipe.config import RunConfig
from dpllm.recipe.sections import DeploymentConfig
from dpllm.statement import formatting
from dpllm.statement.privacy_record import PrivacyRecord


def entry(statement: PrivacyRecord, config: RunConfig) -> str:
    """The entry as YAML; missing information is left out, or marked as not stated.

    Raises:
        ConfigError: The statement has no guarantee, so there is nothing to register.
    """
    if not statement.guarantee:
        raise ConfigError(
            f"--registry: the run gives no differential privacy guarantee ({statement.reason}), and the registry lists only "
            "deployments that give one. Leave --registry out."
        )
    title, plan, epsilon = (
        config.card.title or names.last_part(config.output_dir),
        statement.plan,
        statement.weights_epsilon,
    )
    if epsilon is None:
        raise ConfigError(
            "--registry: the model started from one that learned the same dataset, and no epsilon is stated for both. Leave "
            "--registry out."
        )
    text = formatting.template("registry.yaml.j2").render(
        w=formatting,
        b=statement,
        d=statement.deployment or DeploymentConfig(),
        title=title,
        slug=re.sub(r"\W+", "_", title.lower()).strip("_"),
        description=config.card.description,
        digest=digest(statement.to_json()),
    )
    parsed = yaml.safe_load(text)
    parsed["deployment"]["privacy_loss"]["privacy_parameters"] = {"epsilon": epsilon, "delta": plan.delta}
    return yaml.safe_dump(parsed, sort_keys=False, allow_unicode=True, width=100)
