"""The card as a page: its schema, its front matter, and the marked parts that follow from the block.

Comes in: README.md and privacy.json. Goes out: checks. What an author writes outside the markers is not looked at;
nothing of it may stand before the banner.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import dpllm
from dpllm.errors import ConfigError
from dpllm.statement import privacy_record, section, tradeoff_figure
from dpllm.statement.fields import NotAStatement
from dpllm.verification.reading import read_text
from dpllm.verification.values import Check, Published, Wrong, asserted, failed, plain, verified

_AGAIN = "Write the card again: dpllm card RUN."
ASSERTED = {
    "training": (
        "optimizer clipping max_grad_norm adaptive neighbouring_relation randomness status steps.taken",
        "the author's word that these steps ran with this sampler, this clipping and noise from the operating system",
    ),
    "data": (
        "unit dataset data_public sampling.expected_batch_size sampling.dataset_size max_examples_per_unit",
        "the author's word on what was trained on and who is a unit; of N and batch only the ratio enters epsilon",
    ),
    "circumstances": (
        "base_model software hardware date recipe_digest accountant.version cross_check.version deviations",
        "the author's word on where, when, from what and with which versions it ran",
    ),
    "words": ("not_covered tuning contact", "text that nobody can compute"),
}
"""Name of a line -> fields of a block that nobody can compute from what is published, and what they say."""


def schema(found: Published) -> Iterator[Check]:
    """privacy.json against the schema that the package ships."""
    try:
        record = privacy_record.read(found.block)
    except NotAStatement as error:
        raise Wrong(f"privacy.json does not follow its schema: {'; '.join(error.problems[:3])}. {_AGAIN}") from None
    yield verified("schema", f"privacy.json follows schema version {record.schema_version}.")


def said(found: Published) -> Iterator[Check]:
    """The fields that are the author's word."""
    stated = found.record.to_json()
    stated |= stated.get("attempted") or {}
    for name, (listed_fields, what) in ASSERTED.items():
        there = [field for field in listed_fields.split() if _stated(stated, field)]
        if there:
            yield asserted(name, f"{', '.join(there)}: {what}.")


def _stated(block: Any, field: str) -> bool:
    name, _, inner = field.partition(".")
    return isinstance(block, dict) and name in block and (not inner or _stated(block[name], inner))


def front_matter(found: Published) -> Iterator[Check]:
    """The ``privacy`` entry of the front matter against privacy.json."""
    stated = section.front_matter(found.card)
    if _text(stated.get("privacy")) != _text(found.block):
        raise Wrong(f"the front matter of README.md and privacy.json state different things. {_AGAIN}")
    yield verified("front matter", "the privacy entry of README.md is privacy.json.")
    tags = stated.get("tags") or []
    claims = isinstance(tags, list) and any(tag in ("differential-privacy", "dp-sgd") for tag in tags)
    if claims and not found.record.guarantee:
        yield failed(
            "tags",
            "the tags say differential privacy, and the block says that there is no guarantee: who searches the Hub would find "
            f"it. {_AGAIN}",
        )


def marked(found: Published) -> Iterator[Check]:
    """The banner and the privacy part against what the block renders to, byte for byte."""
    try:
        parts, expected = section.parts(found.card), section.render(found.record)
    except ConfigError as error:
        raise Wrong(str(error)) from None
    if not section.body(found.card).startswith("<!-- dpllm:banner -->"):
        yield failed("what is seen first", f"something stands before the banner, and could hide it. {_AGAIN}")
    for name in expected:
        label = f"{name} in README.md"
        if parts.get(name) == expected[name]:
            yield verified(label, "is what privacy.json renders to, byte for byte.")
            continue
        line = _first_difference(parts.get(name, ""), expected[name])
        yield failed(label, f"is not what privacy.json renders to, from line {line} of the part on. {_version(found)}")
    yield asserted(
        "text of the author",
        "title, description, use, training and citation stand outside the marked parts, and nobody checks them.",
    )


def figure(found: Published) -> Iterator[Check]:
    """The picture of what a tester can do against what the block draws."""
    there = tradeoff_figure.FILE in found.hashes
    if not found.record.guarantee:
        if there:
            raise Wrong(f"{tradeoff_figure.FILE} shows a guarantee, and there is none. {_AGAIN}")
        return
    if not there or read_text(found.directory / tradeoff_figure.FILE) != tradeoff_figure.figure(found.record.terms):
        raise Wrong(f"{tradeoff_figure.FILE} is not the figure that privacy.json draws. {_version(found)}")
    yield verified("figure", f"{tradeoff_figure.FILE} is what privacy.json draws, byte for byte.")


def _version(found: Published) -> str:
    """What to do about a page that is not as this version writes it."""
    wrote = found.record.software.get("dpllm")
    if wrote == dpllm.__version__:
        return _AGAIN
    return f"The card names dpllm {wrote}, and this is {dpllm.__version__}, which words it anew: verify it with that version."


def _text(value: object) -> str:
    try:
        return json.dumps(value, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError):
        return plain(type(value))


def _first_difference(one: str, other: str) -> int:
    lines, expected = one.split("\n"), other.split("\n")
    for number, pair in enumerate(zip(lines, expected, strict=False), start=1):
        if pair[0] != pair[1]:
            return number
    return min(len(lines), len(expected)) + 1
