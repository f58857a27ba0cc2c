"""Membership inference on real rows: what the tuned model gives away about rows that trained, beside rows that did not.

Comes in: two models, the rows of both sides. Goes out: a report of counts and areas, computed from private rows and covered
by no guarantee, for private/ alone. It names no row and quotes no text. It must not speak about epsilon: real rows became
members by nobody's coin.
"""

from __future__ import annotations

import random
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from dpllm.auditing import attacks, statistics
from dpllm.auditing.blind import blind
from dpllm.auditing.statistics import Estimate, Floats, shown
from dpllm.auditing.summary import CONFIDENCE, separation
from dpllm.auditing.table import TokenTable
from dpllm.errors import ConfigError
from dpllm.files import write_json
from dpllm.recipe.config import DataConfig, RunConfig
from dpllm.run.directory import RunDir
from dpllm.text import data
from dpllm.text.data import Unit, unit_name
from dpllm.text.layouts import FIELDS, Format

if TYPE_CHECKING:
    from dpllm.model.loading import ScoringModels

# A legend of shapes: S privacy units of both sides, members first; N tokens.

Rows = list[dict[str, Any]]
"""The rows of one privacy unit."""

LIMIT = 1000
"""Units of each side that are scored, unless told otherwise."""
FEWEST = 50
"""On each side; with fewer, no control could tell a shift from chance."""
NGRAM = 13
"""Words in a row that two texts hardly share by chance."""
NEAR_COPY = 0.5
"""A row that has more than this share of its 13-word runs in common with members is a copy of theirs."""
PRIMARY_SCORE = "calibrated"
NOTE = (
    "Computed from private rows and not covered by the privacy guarantee: it must not be published. It says nothing about "
    "epsilon, because nobody drew by coins which of these rows trained."
)
SIDES = ("members", "non-members")
MEMBERSHIP, SHIFT = "membership inference", "distribution shift"


@dataclass(frozen=True)
class MembersReport:
    """What scores separate members from non-members, and whether that may be called membership inference."""

    word: str
    """membership inference, or distribution shift where a control separates the sides without the tuned model."""
    reason: str
    unit: str
    """What was counted as one: a row, or everything of one value of the unit column."""
    members: int
    non_members: int
    members_available: int
    non_members_available: int
    confidence: float
    """Of every interval."""
    scores: dict[str, dict[str, Any]]
    """By name: area under the curve, true positive rates, and the same area with the base model in the tuned one's place."""
    controls: dict[str, Any]
    overlap: dict[str, Any]
    note: str = NOTE
    primary_score: str = PRIMARY_SCORE
    """Fixed in advance; the best of all the others would look better than it is."""

    def to_json(self) -> dict[str, Any]:
        """As private/audit_members.json holds it."""
        return asdict(self)


def audit_members(
    models: ScoringModels,
    members: Sequence[Rows],
    non_members: Sequence[Rows],
    fmt: Format,
    settings: DataConfig,
    *,
    limit: int = LIMIT,
    end_tokens: bool = True,
) -> MembersReport:
    """Scores rows that trained and rows that did not, beside two controls that have not seen the tuned model.

    One privacy unit is one observation: all its tokens together, whatever number of rows and sequences they stand in.

    Guarantee:
        Where members and non-members are exchangeable, the word is "distribution shift" with probability at most about
        7.5 %: both sides of the base model's interval, one of the blind control's. Neither proves that there is no shift.

    Args:
        models: Tuned and base.
        members: Everything that trained, by unit; at most ``limit`` of them, drawn with a fixed public seed, are scored.
        non_members: The same kind of rows that did not train.
        fmt: How the rows of both read.
        settings: The data section that training used: unit, template, max_length, long_examples.
        limit: Units of each side that are scored, at least 50.
        end_tokens: Score the token that ends a text, as dpllm trains it. Where training may have gone without it, what it
            scores would drown the rest.

    Raises:
        ConfigError: Fewer than 50 units on a side, non-members that are members too, or scores that are not finite.
        DataError: A row that cannot be encoded.
    """
    drawn = [_draw(members, limit), _draw(non_members, limit)]
    _check_counts(drawn)
    overlap = check_overlap(members, drawn[1], fmt, settings.unit)
    sides = [
        _encode(groups, fmt, models.tokenizer, settings, name=name, end_tokens=end_tokens)
        for name, groups in zip(SIDES, drawn, strict=True)
    ]
    _check_counts(sides)
    units, first = [*sides[0], *sides[1]], len(sides[0])
    texts = [_read(unit, models.tokenizer) for unit in units]
    tokens = _score(models, units, texts)
    base_S = _mean(tokens, tokens.base_log_prob_N)  # the control: the base model saw neither side
    base = statistics.auc(base_S[:first], base_S[first:], CONFIDENCE)
    words = blind(texts[:first], texts[first:], CONFIDENCE)
    word, reason = _judge(base, words, settings.unit)
    return MembersReport(
        word=word,
        reason=reason,
        unit="row" if settings.unit == "example" else settings.unit,
        members=first,
        non_members=len(units) - first,
        members_available=len(members),
        non_members_available=len(non_members),
        confidence=CONFIDENCE,
        scores=_separations(tokens, first),
        controls={"base_model": shown("auc", base), "blind": words and shown("auc", words)},
        overlap=overlap,
    )


def audit_run_members(run: RunDir, models: ScoringModels) -> MembersReport:
    """The same for a finished run: rows of data.train, as they trained, against rows of data.eval.

    The report goes to private/audit_members.json.

    Raises:
        ConfigError: The recipe names no evaluation data; see also ``audit_members``.
    """
    config = run.load_config()
    members, non_members, fmt = rows_of_run(config, run)
    report = audit_members(models, members, non_members, fmt, config.data)
    write_json(run.private / "audit_members.json", report.to_json())
    return report


def rows_of_run(config: RunConfig, run: RunDir) -> tuple[Sequence[Rows], Sequence[Rows], Format]:
    """Members and non-members of a run by privacy unit, and how they read."""
    if config.data.eval is None:
        raise ConfigError(
            f"{run.config}: data.eval is not set, so there are no non-members to compare with. Name held-out rows in data.eval "
            "and train again."
        )
    cache = run.private / "cache"
    trained = data.load_table(config.data.train, config.data, config.data.train_split, cache)
    rest = data.load_table(config.data.eval, config.data, config.data.eval_split, cache)
    if rest.format != trained.format:
        raise ConfigError(
            f"{rest.name}: is read as {rest.format} and the training data as {trained.format}, so any difference could come "
            "from the format. Set data.format, or evaluation data of the same columns."
        )
    return data.group_rows(trained, config.data), data.group_rows(rest, config.data), trained.format


def check_overlap(members: Sequence[Rows], non_members: Sequence[Rows], fmt: Format, unit: str) -> dict[str, Any]:
    """Looks for non-members that trained: the same text, a near copy, or another row of the same unit.

    Case and white space make no difference. A near copy has more than half of its runs of 13 words in common with members.

    Returns:
        Counts, and the mean share of 13-word runs of non-members that members have too.

    Raises:
        ConfigError: There are some; how many is said, and not which.
    """
    rows = [row for group in non_members for row in group]
    words = [_words(row, fmt) for row in rows]
    whole = {" ".join(found) for found in words}
    runs = [_runs(found) for found in words]
    wanted: set[int] = set().union(*runs)
    seen: set[int] = set()
    copied: set[str] = set()
    units: set[str | None] = set()
    for row in (row for group in members for row in group):
        found = _words(row, fmt)
        text = " ".join(found)
        if text in whole:
            copied.add(text)
        seen |= _runs(found) & wanted
        units.add(unit_name(row.get(unit)))
    shares = [len(run & seen) / len(run) if run else 0.0 for run in runs]
    exact = sum(" ".join(found) in copied for found in words)
    near = sum(share > NEAR_COPY for share in shares)
    shared_units = 0 if unit == "example" else sum(unit_name(group[0].get(unit)) in units for group in non_members)
    if exact or near or shared_units:
        counts = (
            (exact, f"{exact} of {len(rows)} rows are identical to members"),
            (near, f"{near} of {len(rows)} have most of their runs of {NGRAM} words in common with members"),
            (shared_units, f"{shared_units} of {len(non_members)} units are units of members too"),
        )
        shared = "; ".join(words for number, words in counts if number)
        raise ConfigError(
            f"non-members overlap with members: {shared}. Rows that were trained on are not non-members; remove them."
        )
    return {"rows": len(rows), "exact": 0, "near_copies": 0, "mean_share_of_13_word_runs": sum(shares) / len(rows)}


def _words(row: Mapping[str, Any], fmt: Format) -> list[str]:
    parts = [row[field] for field in FIELDS[fmt]]
    if fmt == "messages":
        parts = [turn.get("content", "") if isinstance(turn, dict) else turn for turn in parts[0]]
    return unicodedata.normalize("NFC", "\n".join(map(str, parts))).casefold().split()


def _runs(words: Sequence[str]) -> set[int]:
    """Hashes of all runs of 13 words."""
    return {hash(tuple(words[start : start + NGRAM])) for start in range(len(words) - NGRAM + 1)}


def scores(table: TokenTable) -> dict[str, Floats]:
    """Shape (S,) by name; higher = more likely a member.

    Log-probabilities are means over a unit's tokens, in nats: real texts differ in length, secrets do not. The slope of
    ``calibrated`` is fitted on members and others alike, without knowing which is which (see ``attacks.slope``).
    """
    after, before = _mean(table, table.tuned_log_prob_N), _mean(table, table.base_log_prob_N)
    return {
        "calibrated": after - statistics.fit_slope(before, after) * before,
        "ratio": _mean(table, table.tuned_log_prob_N - table.base_log_prob_N),
        "loss": after,
        **{name: attack(table) for name, attack in attacks.TOKEN_ATTACKS.items()},
    }


def _draw(groups: Sequence[Rows], limit: int) -> list[Rows]:
    if limit < FEWEST:
        raise ConfigError(
            f"a limit of {limit} rows is too few to tell a difference from chance; give {FEWEST} or more."
        )
    chosen = random.Random(0).sample(range(len(groups)), min(limit, len(groups)))
    return [groups[index] for index in sorted(chosen)]


def _check_counts(sides: Sequence[Sequence[Any]]) -> None:
    for name, side in zip(SIDES, sides, strict=True):
        if len(side) < FEWEST:
            raise ConfigError(
                f"{len(side)} {name} with something to predict are too few: below {FEWEST} on each side, no control can tell a "
                "difference in the data from chance. Give more rows."
            )


def _encode(
    groups: Sequence[Rows], fmt: Format, tokenizer: Any, settings: DataConfig, *, name: str, end_tokens: bool
) -> list[Unit]:
    """The units that have something to predict."""
    units = data.encode_units(list(groups), fmt, tokenizer, settings, name=name)
    if not end_tokens:
        units = [_without_end(unit, tokenizer.eos_token_id) for unit in units]
    return [unit for unit in units if unit.sequences]


def _without_end(unit: Unit, end: int | None) -> Unit:
    kept = []
    for one in unit.sequences:
        mask = (*one.loss_mask[:-1], one.loss_mask[-1] and one.input_ids[-1] != end)
        if any(mask):
            kept.append(replace(one, loss_mask=mask))
    return Unit(tuple(kept))


def _read(unit: Unit, tokenizer: Any) -> str:
    """What the models read of a unit, which is all that the controls may use: no more, and no less."""
    return "\n".join(tokenizer.decode(sequence.input_ids, skip_special_tokens=True) for sequence in unit.sequences)


def _score(models: ScoringModels, units: Sequence[Unit], texts: Sequence[str]) -> TokenTable:
    """The token table with one entry for each unit."""
    from dpllm.auditing.scores import score_sequences, zlib_bytes

    sequences = [sequence for unit in units for sequence in unit.sequences]
    masks = [one.loss_mask for one in sequences]
    owners = np.repeat(np.arange(len(units)), [len(unit.sequences) for unit in units])
    return TokenTable(
        canary_ids=tuple(f"u{index:06d}" for index in range(len(units))),
        zlib_bytes_S=np.array([zlib_bytes(text) for text in texts], dtype=np.int64),
        sequence_N=np.repeat(owners, [sum(mask) for mask in masks]),
        **score_sequences(models, sequences, masks),
    )


def _separations(tokens: TokenTable, first: int) -> dict[str, dict[str, Any]]:
    """Each score on the tuned model, and on the base model in its place; None where a score compares the two."""
    columns = [field.name.removeprefix("base_") for field in fields(tokens) if field.name.startswith("base_")]
    before = replace(tokens, **{f"tuned_{name}": getattr(tokens, f"base_{name}") for name in columns})
    result, before_S = {}, scores(before)
    for name, after_S in scores(tokens).items():
        own_S = before_S[name]
        control = statistics.auc(own_S[:first], own_S[first:], CONFIDENCE) if np.ptp(own_S) > 1e-9 else None
        result[name] = {**separation(after_S[:first], after_S[first:]), **shown("base_auc", control)}
    return result


def _judge(base: Estimate | None, words: Estimate | None, unit: str) -> tuple[str, str]:
    seen = []
    if words is None or words.above_half:
        found = f"AUC {words.value:.3f} ({words.low:.3f} to {words.high:.3f})" if words else "too few texts"
        seen.append(f"a classifier that sees the words and no model separates them ({found})")
    # On both sides of 1/2: an attack's direction is fixed, that of a control is not.
    if base is None or not base.low <= 0.5 <= base.high:
        found = f"AUC {base.value:.3f} ({base.low:.3f} to {base.high:.3f})" if base else "no score"
        seen.append(f"the base model, which saw neither, separates them ({found})")
    if not seen:
        return MEMBERSHIP, (
            "Neither the words nor the base model tell members from non-members, so what the tuned model tells apart is what "
            "it learned. Small differences between the sides may be left."
        )
    advice = "" if unit != "example" else "; if several rows come from one author, name the column in data.unit"
    return SHIFT, (
        f"Members and non-members are of different kinds: {'; and '.join(seen)}. No score below is membership inference. Split "
        f"one set of rows at random before training{advice}."
    )


def _mean(table: TokenTable, values_N: Floats) -> Floats:
    result: Floats = table.sums(values_N) / table.lengths()
    return result
