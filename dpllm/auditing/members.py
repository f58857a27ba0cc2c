"""Membership inference on real rows: scores of rows that trained against rows that did not.

Comes in: two models, the rows of both sides. Goes out: a report of counts and areas, computed from private rows and not
covered by the guarantee, so only for private/. It names no row and quotes no text. Must not conclude anything about epsilon: no
coins decided which real rows became members.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from dpllm.auditing import attacks, statistics
from dpllm.auditing.scores import score_sequences, zlib_bytes
from dpllm.auditing.statistics import Estimate, Floats, blind, estimate_fields
from dpllm.auditing.summary import CONFIDENCE, separation
from dpllm.auditing.table import TokenTable
from dpllm.errors import ConfigError
from dpllm.files import write_json
from dpllm.ledger.records import words
from dpllm.privacy.schedule import Unit
from dpllm.recipe.config import DataConfig
from dpllm.run.directory import Run
from dpllm.text import data
from dpllm.text.data import owner_names
from dpllm.text.layouts import FIELDS, Format, Row
from dpllm.text.prompts import Side, read_same
from dpllm.text.tokens import encode_units

if TYPE_CHECKING:
    from dpllm.model.loading import ScoringModels

# A legend of shapes: S privacy units of both sides, members first; N tokens.

Rows = list[Row]
"""The rows of one privacy unit."""

LIMIT = 1000
"""Maximum number of scored units of each side."""
FEWEST = 50
"""Minimum units of each side; with fewer, no control can distinguish a shift from chance."""
NOTE = (
    "Computed from private rows and not covered by the privacy guarantee: it must not be published. It says nothing about "
    "epsilon, because nobody drew by coins which of these rows trained."
)
SIDES = ("members", "non-members")
MEMBERSHIP, SHIFT = "membership inference", "distribution shift"


def audit_run_members(run: Run, models: ScoringModels) -> dict[str, Any]:
    """Compares rows that a finished run trained on with rows of data.eval: the report of ``audit_members``.

    It is written to private/audit_members.json.

    Raises:
        ConfigError: The recipe names no evaluation data; see also ``audit_members``.
    """
    members, non_members, fmt = rows_of_run(run)
    report = audit_members(models, members, non_members, fmt, run.config.data)
    write_json(run.directory.private / "audit_members.json", report)
    return report


def rows_of_run(run: Run) -> tuple[Sequence[Rows], Sequence[Rows], Format]:
    """Members and non-members of a run, grouped by privacy unit, and their format."""
    settings = run.config.data
    if settings.eval is None:
        raise ConfigError(
            f"{run.directory.config}: data.eval is not set, so there are no non-members to compare with. Name held-out rows in "
            "data.eval and train again, which is charged again."
        )
    rows_file, cache = run.directory.rows, run.directory.private / "cache"
    trained, held_out = (read_same(rows_file, settings, side, cache) for side in get_args(Side))
    return data.group_rows(trained, settings), data.group_rows(held_out, settings), trained.format


def audit_members(
    models: ScoringModels, members: Sequence[Rows], non_members: Sequence[Rows], fmt: Format, settings: DataConfig
) -> dict[str, Any]:
    """Scores rows that trained and rows that did not, and two controls that do not use the tuned model.

    One privacy unit is one observation: all tokens of all its rows and sequences together.

    Guarantee:
        If members and non-members are exchangeable, the word is "distribution shift" with probability at most about
        7.5 %: both sides of the base model's interval, one of the blind control's. Neither proves that there is no shift.

    Args:
        models: Tuned and base.
        members: All rows that trained, by unit; at most ``LIMIT`` units, drawn with a fixed public seed, are scored.
        non_members: Rows of the same kind that did not train, by unit; likewise.
        fmt: Format of both.
        settings: The data section that training used: unit, template, max_length, long_examples.

    Returns:
        JSON-ready: ``word`` and ``reason``, numbers of units, each score's separation, and the controls.

    Raises:
        ConfigError: A side has fewer than 50 units, some non-members are also members, or scores are not finite.
        DataError: A row cannot be encoded.
    """
    samples = [_draw(members), _draw(non_members)]
    check_overlap(members, samples[1], fmt, settings)
    sides = [
        [unit for unit in encode_units(groups, fmt, models.tokenizer, settings, name=name) if unit.sequences]
        for name, groups in zip(SIDES, samples, strict=True)
    ]
    for name, side in zip(SIDES, sides, strict=True):
        if len(side) < FEWEST:
            raise ConfigError(
                f"{len(side)} {name} with something to predict are too few: below {FEWEST} on each side, no control can tell a "
                "difference in the data from chance. Give more rows."
            )
    units, first = [*sides[0], *sides[1]], len(sides[0])
    # Exactly the text that the models read of a unit: the controls must use neither more nor less.
    ids = [[sequence.input_ids for sequence in unit.sequences] for unit in units]
    texts = ["\n".join(models.tokenizer.batch_decode(token_ids, skip_special_tokens=True)) for token_ids in ids]
    tokens = _score(models, units, texts)
    base_S = _mean(tokens, tokens.base_log_prob_N)  # the control: the base model saw neither side
    base = statistics.auc(base_S[:first], base_S[first:], CONFIDENCE)
    words_control = blind(texts[:first], texts[first:], CONFIDENCE)
    assert base is not None
    assert words_control is not None  # each side has at least FEWEST texts
    verdict, reason = _judge(base, words_control, settings.unit)
    return {
        "word": verdict,
        "reason": reason,
        "note": NOTE,
        "unit": "row" if settings.unit == "example" else settings.unit,
        "members": first,
        "non_members": len(units) - first,
        "confidence": CONFIDENCE,
        "scores": {name: separation(one_S[:first], one_S[first:]) for name, one_S in scores(tokens).items()},
        "controls": {"base_model": estimate_fields("auc", base), "blind": estimate_fields("auc", words_control)},
    }


def check_overlap(members: Sequence[Rows], non_members: Sequence[Rows], fmt: Format, settings: DataConfig) -> None:
    """Looks for non-members that trained: the same text up to case and white space, or another row of a member's unit.

    Raises:
        ConfigError: There are some; the message gives their number, but does not identify them.
    """
    texts = [words(row.parts, FIELDS[fmt]).casefold() for group in non_members for row in group]
    # Of the members' texts only those of non-members are kept; otherwise all training text would be in memory twice.
    member_texts, copied, units = set(texts), set[str](), set[str]()
    for row in (row for group in members for row in group):
        copied |= {words(row.parts, FIELDS[fmt]).casefold()} & member_texts
        units.update(owner_names(row.unit, settings))
    same_text = sum(text in copied for text in texts)
    owners = [owner_names(group[0].unit, settings) for group in non_members]
    same_unit = 0 if settings.unit == "example" else sum(not units.isdisjoint(names) for names in owners)
    if same_text or same_unit:
        raise ConfigError(
            f"non-members overlap with members: {same_text} of {len(texts)} rows are identical to members, {same_unit} of "
            f"{len(non_members)} units are units of members too. Rows that were trained on are not non-members; remove them."
        )


def scores(table: TokenTable) -> dict[str, Floats]:
    """Every score by its name, shape (S,); higher = more likely a member.

    Log-probabilities are means over a unit's tokens, in nats, because real texts, unlike secrets, differ in length. The slope
    of ``calibrated`` is fitted on members and non-members together, without knowing which is which (see ``attacks.slope``).
    """
    tuned, base = _mean(table, table.tuned_log_prob_N), _mean(table, table.base_log_prob_N)
    return {
        "calibrated": tuned - statistics.fit_slope(base, tuned) * base,
        "ratio": _mean(table, table.tuned_log_prob_N - table.base_log_prob_N),
        "loss": tuned,
        **{name: attack(table) for name, attack in attacks.TOKEN_ATTACKS.items()},
    }


def _draw(groups: Sequence[Rows]) -> list[Rows]:
    chosen = random.Random(0).sample(range(len(groups)), min(LIMIT, len(groups)))
    return [groups[index] for index in sorted(chosen)]


def _score(models: ScoringModels, units: Sequence[Unit], texts: Sequence[str]) -> TokenTable:
    sequences = [sequence for unit in units for sequence in unit.sequences]
    masks = [sequence.loss_mask for sequence in sequences]
    owners = np.repeat(np.arange(len(units)), [len(unit.sequences) for unit in units])
    return TokenTable(
        canary_ids=tuple(f"u{index:06d}" for index in range(len(units))),
        zlib_bytes_S=np.array([zlib_bytes(text) for text in texts], dtype=np.int64),
        sequence_N=np.repeat(owners, [sum(mask) for mask in masks]),
        **score_sequences(models, sequences, masks),
    )


def _judge(base: Estimate, words_control: Estimate, unit: str) -> tuple[str, str]:
    signals = []
    if words_control.above_half:
        area = f"AUC {words_control.value:.3f} ({words_control.low:.3f} to {words_control.high:.3f})"
        signals.append(f"a classifier that sees the words and no model separates them ({area})")
    # Two-sided: unlike that of an attack, the direction of a control is not fixed.
    if not base.low <= 0.5 <= base.high:
        area = f"AUC {base.value:.3f} ({base.low:.3f} to {base.high:.3f})"
        signals.append(f"the base model, which saw neither, separates them ({area})")
    if not signals:
        return MEMBERSHIP, (
            "Neither the words nor the base model tell members from non-members, so what the tuned model tells apart is what "
            "it learned. Small differences between the sides may be left."
        )
    advice = "" if unit != "example" else "; if several rows come from one author, name the column in data.unit"
    return SHIFT, (
        f"Members and non-members are of different kinds: {'; and '.join(signals)}. No score below is membership inference. "
        f"Split one set of rows at random before training{advice}."
    )


def _mean(table: TokenTable, values_N: Floats) -> Floats:
    result: Floats = table.sums(values_N) / table.lengths()
    return result
