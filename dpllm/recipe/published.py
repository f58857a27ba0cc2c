"""The recipe as it may be published: without directories, addresses and the seed of the noise.

Comes in: a ``RunConfig``. Goes out: another one of the same promise, and a digest. Must not open any file.
"""

from __future__ import annotations

from dpllm.files import digest as digest_of
from dpllm.recipe import names
from dpllm.recipe.config import CardConfig, RunConfig, TelemetryConfig
from dpllm.recipe.names import is_builtin


def publishable(config: RunConfig) -> RunConfig:
    """The recipe without what a stranger has no use for, or could use against the run.

    Local paths are cut to their last part; the ledger's address, which may hold a password, and the directory of metrics
    are left out; a seed of the noise, with which the noise can be taken off, becomes 0.

    Args:
        config: The resolved recipe.

    Returns:
        A recipe of which a card says the same, byte for byte.
    """
    model, data, privacy, telemetry = config.model, config.data, config.privacy, config.telemetry
    return config.model_copy(
        update={
            "model": model.model_copy(update={"name_or_path": names.public_name(model.name_or_path)}),
            "data": data.model_copy(
                update={name: names.public_name(path) for name in ("train", "eval") if (path := getattr(data, name))}
            ),
            "privacy": privacy.model_copy(
                update={"ledger": None, "insecure_seed": None if privacy.insecure_seed is None else 0}
            ),
            "telemetry": telemetry.model_copy(update={"textfile": None}),
            "output_dir": names.last_part(config.output_dir),
        }
    )


HOW_IT_RUNS = ("process_timeout",)
"""Keys of ``train`` that are in no digest: they say how long processes wait for each other, and nothing of the result."""


def digest(config: RunConfig) -> str:
    """SHA-256 of the publishable recipe, without output_dir and with every name of a model or dataset cut to its last part.

    So it does not depend on where the run, its data or its model lie, and says that two runs had the same settings.
    """
    recipe = publishable(config).model_dump(mode="json")
    del recipe["output_dir"]
    for key in HOW_IT_RUNS:
        recipe["train"].pop(key, None)
    for section, name in (("model", "name_or_path"), ("data", "train"), ("data", "eval")):
        value = recipe[section][name]
        if value and not is_builtin(value):
            recipe[section][name] = names.last_part(value)
    return digest_of(recipe)


def of_training(config: RunConfig) -> str:
    """The digest of what trained, as run.json keeps it: without the card's words, what is watched, and how often or fast."""
    free = {"physical_batch_size": 1, "eval_every": None, "checkpoint_every": None}
    return digest(
        config.model_copy(
            update={
                "card": CardConfig(),
                "telemetry": TelemetryConfig(),
                "train": config.train.model_copy(update=free),
            }
        )
    )
