"""The model card: Hugging Face front matter with the main fields of the privacy statement, and the whole statement in words.

Comes in: a privacy statement; or ``config.yaml``, ``plan.json``, ``run.json``, the audits under ``export/audit`` of a run, and
hashes of the other files in ``export/``. Goes out: ``export/README.md``, ``export/privacy.json`` and, with a guarantee,
``export/privacy.svg``. The marked parts are a function of the statement: anyone with ``privacy.json`` can render the same text.
Must not read ``private/``, since all output is published.
"""

from __future__ import annotations

import filecmp
import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from jinja2 import TemplateError

from dpllm.errors import ConfigError
from dpllm.files import BLOCK, CARD, SIGNATURE, hashes, read_json, write_whole
from dpllm.privacy.limits import attacker_limits
from dpllm.recipe import names
from dpllm.recipe.config import LoraConfig, RunConfig
from dpllm.recipe.names import is_builtin
from dpllm.records import Json
from dpllm.run.directory import RunDir, open_run
from dpllm.statement import audit_rows, formatting, section, tradeoff_figure
from dpllm.statement.privacy_record import PrivacyRecord
from dpllm.statement.run_files import RunRecord
from dpllm.statement.state import statement_of

if TYPE_CHECKING:
    from huggingface_hub import CardData, ModelCardData  # not needed to verify a card

DP_TAGS = ("differential-privacy", "dp-sgd")
_MAIN = ("guarantee", "reason", "epsilon", "delta", "unit", "neighbouring_relation", "released", "dataset")
"""Fields of a statement that the front matter contains."""
_WHOLE = ", over all trained parameters together"
CLIPPING_WORDS = {
    "flat": f"{_WHOLE} (flat clipping), was scaled down to an L2 norm of at most C",
    "automatic": f"{_WHOLE}, was multiplied by C / (its L2 norm + 0.01) (automatic clipping), so that its norm was below C",
}
"""What each clipping function does to a gradient, as a continuation of "The gradient of each row"."""


def write_card(run: RunDir, describe: Path | None = None) -> Path:
    """Writes the model card of a run, the same privacy statement as JSON, and its figure.

    A signature of other files is removed.

    Args:
        run: A finished or interrupted run. The audit of a run without differential privacy is in ``private/``, so it is not
            read.
        describe: Output of ``dpllm describe`` for the training data; later cards show it too.

    Returns:
        The path of ``export/README.md``.

    Raises:
        ConfigError: A file is missing or not what the run wrote, the run was refused, export/audit contains a private file, or
            the audit belongs to other weights.
    """
    texts = rendered(run, describe)
    if describe is not None:
        write_whole(run.describe, describe.read_bytes())
    previous = {name: run.export / name for name in texts}
    if any(not path.exists() or path.read_bytes() != texts[name].encode() for name, path in previous.items()):
        (run.export / SIGNATURE).unlink(missing_ok=True)
    if tradeoff_figure.FILE not in texts:
        (run.export / tradeoff_figure.FILE).unlink(missing_ok=True)
    for name, text in texts.items():
        write_whole(run.export / name, text)
    return run.export / CARD


def rendered(run: RunDir, describe: Path | None = None) -> dict[str, str]:
    """The files that ``write_card`` writes, byte for byte, also without the weights.

    Args:
        run: Contains config.yaml, run.json, plan.json (with differential privacy), describe.json if statistics are shown and, in
            export/, the published folder audit/. Hashes of the other files of export/ come from run.json, so that a file that
            the run did not write cannot verify. ``names.publishable`` makes a config.yaml that may be published.
        describe: See ``write_card``; None: describe.json of the run, if it exists.

    Returns:
        File name -> text of README.md, privacy.json and, with a guarantee, privacy.svg.

    Raises:
        ConfigError: See ``write_card``.
    """
    opened = open_run(run)
    config, record = opened.config, opened.record
    if not record.artifacts:
        raise ConfigError(
            f"{run.root}: the run ended before it exported weights, so there is nothing to describe. Type "
            "dpllm train RECIPE --resume, or train again."
        )
    statistics = read_json(describe or run.describe) if describe or run.describe.exists() else None
    audits = {f"audit/{name}": digest for name, digest in hashes(run.export / "audit").items()}
    # An audit with a positive control writes its tables twice: private with the control, public without it.
    twice = [run.audit_dir(False) / name for name in TABLES] if config.privacy.enabled else []
    if copied := [name for name in audits if _is_copy_of_private(run, run.export / name, except_for=twice)]:
        raise ConfigError(
            f"{run.export}: {copied[0]} is a copy of a file in private/, and would be published with the card. Remove it, and "
            "type the command again."
        )
    audit = opened.audit if config.privacy.enabled else None
    statement = statement_of(config, opened.plan, record, audit, {}, statistics)
    return pages(config, record, statement, {**record.artifacts, **audits})


TABLES = ("tokens.parquet", "gradient.parquet")
"""Scores of an audit."""


def _is_copy_of_private(run: RunDir, path: Path, *, except_for: Sequence[Path]) -> bool:
    size, files = path.stat().st_size, set(filter(Path.is_file, run.private.rglob("*"))).difference(except_for)
    return any(filecmp.cmp(file, path, shallow=False) for file in files if file.stat().st_size == size)


def pages(config: RunConfig, record: RunRecord, statement: PrivacyRecord, others: Mapping[str, str]) -> dict[str, str]:
    """README.md, privacy.json and, with a guarantee, privacy.svg of a statement, by name.

    Args:
        config: The resolved recipe.
        record: ``run.json``.
        statement: With ``merged_from`` the card is that of a merged model.
        others: SHA-256 of the other files, by path; they and the figure become ``files`` of the statement.

    Raises:
        ConfigError: A text of the recipe contains one of the card's markers.
    """
    texts, listed = {}, dict(others)
    if statement.guarantee:
        texts[tradeoff_figure.FILE] = tradeoff_figure.figure(statement.plan)
        listed[tradeoff_figure.FILE] = hashlib.sha256(texts[tradeoff_figure.FILE].encode()).hexdigest()
    statement = statement.model_copy(update={"files": dict(sorted(listed.items()))})
    return {**texts, CARD: compose(config, record, statement), BLOCK: dump_statement(statement.to_json())}


def compose(config: RunConfig, record: RunRecord, statement: PrivacyRecord) -> str:
    """README.md around a privacy statement, see ``pages``."""
    record = RunRecord.pick(names.without_paths(record.to_json()))
    base = config.model.name_or_path
    hub_base = base if record.model.commit and names.is_hub_id(base) else None
    return page(
        "card.md.j2",
        _front_matter(config, statement, hub_base),
        render(statement),
        config,
        b=statement,
        record=record,
        description=section.escaped(config.card.description or ""),
        base_model=hub_base,
        base_name=base if is_builtin(base) else section.escaped(names.shown(names.last_part(base))),
    )


def render(record: PrivacyRecord) -> dict[str, str]:
    """The marked parts of a card.

    Args:
        record: The privacy statement, as ``privacy_record.read`` returns it for ``privacy.json``.

    Returns:
        "banner" and "privacy": the Markdown between the markers. Equal statements give equal text, whatever the order of their
        keys, and different statements give different text: the last line contains ``digest``.

    Raises:
        ConfigError: A number cannot be put into words, or a text contains a marker.
    """
    return filled(
        section.PARTS,
        lambda: {
            "w": formatting,
            "clipping_words": CLIPPING_WORDS,
            "rows": audit_rows,
            "b": record,
            "t": record.plan,
            "holds": record.guarantee,
            "figure": tradeoff_figure,
            "recognised": recognised(record),
            "digest": digest(record.to_json()),
        },
    )


def recognised(statement: PrivacyRecord) -> float | None:
    """The largest share of units that a test of the weights can recognise, see ``tradeoff_figure.recognised``.

    None without a guarantee that covers what they started from. No curve contains the events of several runs.
    """
    plan, epsilon = statement.plan, statement.weights_epsilon
    if plan is None or epsilon is None:
        return None
    if statement.lineage and statement.lineage.same_dataset:
        return attacker_limits(epsilon, plan.delta)["tpr_at_fpr_0.01"]
    return tradeoff_figure.recognised(plan)


def filled(parts: Sequence[str], context: Callable[[], Json]) -> dict[str, str]:
    """Marked parts of a page: the template of each name, filled with a context, which may be untrusted.

    Raises:
        ConfigError: See ``render``.
    """
    try:
        values = context()
        texts = {name: _tidy(formatting.template(f"{name}.md.j2").render(values)) for name in parts}
    # An untrusted statement may follow the schema and still have exposure of one group and extraction of another.
    except (ArithmeticError, LookupError, TypeError, ValueError, TemplateError) as error:
        raise ConfigError(
            f"the privacy statement cannot be put into words ({type(error).__name__}), so no card can be made of it. Restore "
            "privacy.json, or write the card again: dpllm card RUN."
        ) from None
    for name, text in texts.items():
        if section.has_marker(text, parts):
            raise ConfigError(
                f"a text in the privacy block holds a marker of the card's {name}, so the card could not be read back. Take "
                "<!-- dpllm: ... --> out of card.contact, card.tuning and the names in the recipe."
            )
    return {name: section.escaped(text) for name, text in texts.items()}


def _tidy(text: str) -> str:
    lines = "\n".join(line.rstrip() for line in text.splitlines())
    return re.sub(r"\n{3,}", "\n\n", lines).strip("\n")


def page(template: str, front: CardData, parts: Mapping[str, str], config: RunConfig, **context: Any) -> str:
    """A card of a model or of a data set, which is checked to read back as it was written.

    Raises:
        ConfigError: A text of the recipe would change how the card is read.
    """
    body = formatting.template(template).render(
        **{name: section.marked(name, part) for name, part in parts.items()},
        w=formatting,
        config=config,
        title=section.escaped(" ".join((config.card.title or names.last_part(config.output_dir)).split())),
        **context,
    )
    text = f"---\n{yaml_of(front)}\n---\n" + re.sub(r"\n{3,}", "\n\n", body.strip("\n")) + "\n"
    try:
        is_complete = section.parts(text, tuple(parts)) == parts and not section.ambiguous(text)
        is_complete = is_complete and section.front_matter(text)["privacy"] == front["privacy"]
    except ConfigError:
        is_complete = False
    if not is_complete:
        raise ConfigError(
            "the card does not read back as it was written, so it could not be verified. Change card.license, card.language "
            "or card.tags, whose text looks like a part of the card."
        )
    return text


def matter(record: PrivacyRecord) -> Json:
    """The ``privacy`` entry of a card's front matter: the statement's main fields, and its file and SHA-256."""
    main = fields(record, _MAIN)
    if record.guarantee:
        main["epsilon"] = record.weights_epsilon  # null: not stated
    return {**main, "statement": BLOCK, "sha256": digest(record.to_json())}


def fields(record: PrivacyRecord, names: Sequence[str]) -> Json:
    """Fields of a statement and of its Plan, by ``names``; names that it lacks are left out."""
    statement = record.to_json()
    available = {**statement.get("plan", {}), **statement}
    return {name: available[name] for name in names if name in available}


def dump_statement(statement: Json) -> str:
    """The text of a statement's file, or of another record's."""
    return json.dumps(statement, indent=2, sort_keys=True, allow_nan=False) + "\n"


def digest(statement: Json) -> str:
    """SHA-256 of a statement's file."""
    return hashlib.sha256(dump_statement(statement).encode()).hexdigest()


def _front_matter(config: RunConfig, statement: PrivacyRecord, base_model: str | None) -> ModelCardData:
    from huggingface_hub import ModelCardData

    holds, lora = statement.guarantee, isinstance(config.adapter, LoraConfig)
    # A search for models with differential privacy must not find those that have none.
    authors_tags = [tag for tag in config.card.tags if holds or tag not in DP_TAGS]
    tags = [*(DP_TAGS if holds else ()), "dpllm", *(["lora"] if lora else []), *authors_tags]
    data = config.data
    of_hub = [name for name in names.listed(data.train) if data.public and "/" in name and names.is_hub_id(name)]
    return ModelCardData(
        base_model=base_model,
        library_name="peft" if lora and statement.merged_from is None else "transformers",
        pipeline_tag="text-generation",
        tags=list(dict.fromkeys(tags)),
        license=config.card.license,
        language=config.card.language,
        datasets=of_hub or None,
        privacy=matter(statement),
    )


def yaml_of(data: CardData) -> str:
    """YAML as the Hub writes it, or with quotes and escapes if readers could interpret that differently."""
    text = data.to_yaml()
    if not section.ambiguous(f"---\n{text}\n---\n"):
        return text

    class Quoting(yaml.SafeDumper):
        pass

    Quoting.add_representer(str, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"'))
    values = data.to_dict()  # type: ignore[no-untyped-call]
    quoted: str = yaml.dump(values, Dumper=Quoting, sort_keys=False, width=math.inf)
    return quoted.rstrip("\n")
