"""Checks that an audit is about these weights and that its numbers follow from the published scores.

Comes in: export/audit/, and private/ if the run is available. Goes out: checks. Results of shadow runs cannot be recomputed
without these runs, so they are asserted.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import fields
from functools import lru_cache
from pathlib import Path

from dpllm.auditing.gradient import COLUMNS, OPTIONAL, GradientTable, read_gradient
from dpllm.auditing.statistics import words_control
from dpllm.auditing.summary import AuditContext, summarise
from dpllm.auditing.table import CanaryScores, TokenTable, by_group, read_tokens, sum_up
from dpllm.canaries import canaries
from dpllm.files import of_model
from dpllm.privacy import banded
from dpllm.privacy.limits import MechanismLimits, rounded_down
from dpllm.privacy.plan import AuditSettings, Plan
from dpllm.run.directory import RunDir
from dpllm.statement import state
from dpllm.statement.audit import CONTROL_LEVEL, AuditRecord, CanaryGroup, Summary, WordsControl, parse_audit
from dpllm.statement.audit_bounds import Claim
from dpllm.statement.privacy_record import PrivacyRecord
from dpllm.verification import values
from dpllm.verification.check_promise import MAGNIFIED, MOST_STEPS
from dpllm.verification.values import WRITE_AGAIN, Check, Published, Wrong

MOST_ROWS = 100_000
MOST_FOOTER, MOST_UNPACKED, MOST_MEMORY = 2**20, 2**27, 2**29
"""Bytes of a table: its footer, its columns according to the footer, and memory while it is read."""
_ID = re.compile(r"[cr]\d{5,8}-?")  # with a dash: the rejected answer of a pair
AUDIT_AGAIN = "Audit again, then write the card again: dpllm audit RUN, dpllm card RUN."
_NUMBERS = {"bool", "int8", "int16", "int32", "int64", "float", "double"}
_MOST_TESTS = 32  # of one kind; each takes seconds if there are many canaries


def check(export: Published[PrivacyRecord]) -> Iterator[Check]:
    """Checks the audit of the weights."""
    folder, statement = export.directory / "audit", export.record
    files = sorted(name for name in export.hashes if name.startswith("audit/"))
    if statement.audit is None:
        if files:
            raise Wrong(f"{values.listed(files)} are in export/, but the card names no audit. {WRITE_AGAIN}")
        fixed = "; canary_slots, canary_commitment and audit of the Plan are the author's word"
        yield values.asserted("audit", f"no audit of these weights is published{fixed if statement.plan else ''}.")
        return
    if statement.plan is None:
        raise Wrong("audits of runs without differential privacy are private. Delete export/audit.")
    report = published_audit(folder)
    yield _same_weights_and_claim(export, statement.plan, report)
    yield _in_statement(statement, statement.audit, report)
    table, tokens = tables(folder)
    gradient_table = gradient(folder, statement, report)
    yield _scores(statement.plan, table, tokens, report)
    yield _statistics(statement.plan, report, tokens, gradient_table)
    controls, twin = report.controls, "the twin on which the attack is said to work"
    optional = {"shadows": report.shadows, "the control by words": controls.words, twin: controls.twin}
    unchecked = ["kind, length and place of the secrets", *(name for name, present in optional.items() if present)]
    yield values.asserted(
        "audit: what needs the models",
        f"that these scores are those of these weights, that the coins were fair, that there were {report.audits_run} audits, "
        f"{', '.join(unchecked)}, and alpha, tests, score and commitment, which training fixed. Whoever has weights and "
        "canaries can score.",
    )


def published_audit(folder: Path) -> AuditRecord:
    """audit.json of a folder; a ``ConfigError`` names a damaged field."""
    return parse_audit(values.read_object(folder / "audit.json"), "audit.json")


def _same_weights_and_claim(export: Published[PrivacyRecord], plan: Plan, report: AuditRecord) -> Check:
    merged = export.record.merged_from
    files = merged.files if merged else export.hashes
    if problem := state.other_than_audited(report, plan, files):
        raise Wrong(f"audit.json {problem} these. {AUDIT_AGAIN}")
    if not report.published:
        raise Wrong("audit.json reports on other, private runs and must not be published. Delete it, and audit again.")
    about = f"it is about {values.listed(sorted(report.weights))}"
    if merged:
        return values.asserted("audit: weights", "it is about the adapter; that these weights contain it is asserted.")
    if missing := [name for name in of_model(files) if name not in report.weights]:
        unnamed = f"does not name {values.listed(missing)}, which says how they are applied: that these were the same"
        return values.asserted("audit: weights", f"{about}, and {unnamed} is the author's word.")
    return values.verified("audit: weights", f"{about} and about the epsilon that is stated.")


def _in_statement(statement: PrivacyRecord, published: AuditRecord, report: AuditRecord) -> Check:
    if wrong := list(values.differences(published.to_json(), report.to_json(), tolerance=0.0)):
        raise Wrong(f"privacy.json and audit.json differ in audit.{values.listed(wrong)}. {WRITE_AGAIN}")
    if statement.guarantee and state.contradicts(report, statement.plan.epsilon):
        raise Wrong("the audit contradicts the stated guarantee. Do not rely on it.")
    return values.verified("audit: in the card", "the card shows what audit.json says.")


def tables(folder: Path) -> tuple[tuple[CanaryScores, ...], TokenTable]:
    """The scores of an audit, read only after their size is known to be small; raises ``Wrong`` if they are not valid."""
    path = folder / "tokens.parquet"
    with values.bounded_memory(MOST_MEMORY):
        _only_numbers(path)
        return _read_tables(folder, path.stat().st_size, path.stat().st_mtime_ns)


@lru_cache(maxsize=8)
def _read_tables(folder: Path, size: int, changed: int) -> tuple[tuple[CanaryScores, ...], TokenTable]:
    tokens = read_tokens(folder / "tokens.parquet")
    table = sum_up(tokens)
    if len(table) > canaries.MOST_CANARIES:
        raise Wrong(f"it scored {len(table):,} canaries, more than any audit of dpllm. {AUDIT_AGAIN}")
    return table, tokens


def _only_numbers(path: Path) -> None:
    """Refuses a token table with other columns than dpllm writes, before any of it is decompressed."""
    from pyarrow import parquet

    scored = {field.name.removesuffix("_N") for field in fields(TokenTable) if field.name.startswith(("tuned", "base"))}
    described(path, {"canary_id", "zlib_bytes", "group", "inserted", "secret", "word"} | scored, canaries.MOST_TOKENS)
    # Read as a dictionary, because a few bytes can encode any number of long names.
    with path.open("rb") as file:
        table = parquet.read_table(file, columns=["canary_id"], read_dictionary=["canary_id"], use_threads=False)
    names = table["canary_id"]
    if sum(len(chunk.dictionary) for chunk in names.chunks) > canaries.MOST_TOKENS:
        raise Wrong(f"{path.name} names more canaries than any audit of dpllm. {AUDIT_AGAIN}")
    if any(len(str(name)) > 10 for chunk in names.chunks for name in chunk.dictionary):
        raise Wrong(f"{path.name} has a canary name that dpllm never writes. {AUDIT_AGAIN}")


def described(path: Path, required: set[str], max_rows: int, optional: Sequence[str] = ()) -> None:
    """Refuses a parquet file with other columns, with text in its metadata, or with more rows, before decompressing it."""
    from pyarrow import ArrowException, parquet

    with values.regular(path) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 8))
        footer = int.from_bytes(file.read(4), "little")
    try:
        if footer > min(size, MOST_FOOTER):
            raise ArrowException
        with path.open("rb") as file:  # the file's name may not be valid text
            table = parquet.read_metadata(file)
    except (ArrowException, OSError):
        raise Wrong(f"{path.name} is not a parquet file. {AUDIT_AGAIN}") from None
    names = set(table.schema.names)
    if not required <= names <= {*required, *optional} or (table.metadata or {}).keys() - {b"ARROW:schema"}:
        raise Wrong(f"{path.name} has other columns than dpllm writes; these could be text. {AUDIT_AGAIN}")
    columns = table.schema.to_arrow_schema()
    if columns.metadata or any(field.metadata for field in columns):
        raise Wrong(f"{path.name} has descriptions of its columns, which could be text. {AUDIT_AGAIN}")
    # A row of lists could decompress to any number of values; only a token table has names.
    texts = [field.name for field in columns if str(field.type) not in _NUMBERS and field.name != "canary_id"]
    if texts or any(table.schema.column(i).max_repetition_level for i in range(len(table.schema.names))):
        raise Wrong(f"{path.name} holds something other than numbers and flags. {AUDIT_AGAIN}")
    unpacked = sum(table.row_group(number).total_byte_size for number in range(table.num_row_groups))
    if table.num_rows > max_rows or unpacked > MOST_UNPACKED:
        raise Wrong(
            f"{path.name} is larger than any audit writes: {table.num_rows:,} rows, {unpacked:,} bytes unpacked. {AUDIT_AGAIN}"
        )


def _scores(plan: Plan, table: tuple[CanaryScores, ...], tokens: TokenTable, report: AuditRecord) -> Check:
    names = {row.canary_id for row in table}
    scores = (tokens.tuned_log_prob_N, tokens.base_log_prob_N)
    extreme_scores = [float(edge) for log_prob_N in scores for edge in (log_prob_N.min(), log_prob_N.max())]
    groups = by_group(table)
    references = len(groups.pop(0, []))
    counted = {
        str(group): CanaryGroup(candidates=len(rows), inserted=sum(bool(row.inserted) for row in rows))
        for group, rows in groups.items()
    }
    row_by_row = plan.unit == "example" or plan.sampling == "example"
    slots = sum(len(rows) * (group if row_by_row else 1) for group, rows in groups.items())
    slots += report.gradient.canaries if report.gradient else 0
    planned = report.canaries.settings
    counts_match = (report.canaries.groups, report.canaries.references) == (counted, references)
    counts_match &= planned.groups == {group: counts.candidates for group, counts in counted.items()}
    rules = {
        "its table has a canary name that dpllm never writes, which could be text": all(
            map(_ID.fullmatch, tokens.canary_ids)
        ),
        "its table names a canary twice": len(names) == len(table),
        "its table holds a score that is no log-probability": all(
            math.isfinite(value) and value <= 0 for value in extreme_scores
        ),
        "its table has a coin of a reference, or a candidate without one": all(
            (row.inserted is None) == (row.group == 0) and row.group >= 0 for row in table
        ),
        "its table holds other canaries than audit.json counts": counts_match
        and references in (planned.references, 0),  # audits of labels have none
        f"canary_slots is not the {slots} slots that the scored canaries hold": plan.canary_slots == slots,
    }
    values.hold(rules, AUDIT_AGAIN)
    return values.verified("audit: scores", f"{len(table)} canaries and references, each the sum of its tokens.")


def gradient(folder: Path, statement: PrivacyRecord, report: AuditRecord) -> GradientTable | None:
    """The gradient canaries of an audit, if it names any; raises ``Wrong`` if their table is not valid."""
    path = folder / "gradient.parquet"
    if report.gradient is None:
        if path.exists():
            raise Wrong(f"gradient.parquet is there, but audit.json names no gradient canaries. {AUDIT_AGAIN}")
        return None
    described(path, COLUMNS, MOST_ROWS, OPTIONAL)
    plan, randomness, steps = statement.plan, statement.randomness, statement.steps
    if plan is None or randomness is None:
        raise Wrong(f"gradient canaries are of a private run, and no Plan is stated. {AUDIT_AGAIN}")
    if steps.planned > MOST_STEPS or plan.bands > banded.MOST_BANDS:
        raise Wrong("more steps or bands are stated than an audit by gradient canaries can be computed again for.")
    table = read_gradient(path, plan.sampling_rate, randomness.lattice.noise_over_max_grad_norm, plan.coefficients)
    # A step that the table lacks removes at most one pair.
    taken = max(steps.taken, table.steps)
    if table.steps > steps.planned or not taken // 2 - (taken - table.steps) <= table.pairs <= table.steps // 2:
        raise Wrong(f"gradient.parquet counts other steps, or pairs of them, than the run took. {AUDIT_AGAIN}")
    return table


def _statistics(plan: Plan, report: AuditRecord, tokens: TokenTable, gradient: GradientTable | None) -> Check:
    planted, settings = report.canaries, report.settings
    tests = max(len(settings.falling), len(settings.falling_in))
    if settings.control_level != CONTROL_LEVEL or tests > _MOST_TESTS:
        raise Wrong(f"audit.json has another level of controls, or more tests, than any audit of dpllm. {AUDIT_AGAIN}")
    digits = planted.settings.digits or 0
    if planted.kind == "digits" and not values.close(planted.log2_secrets, digits * math.log2(10), 1e-9):
        raise Wrong(f"audit.json counts other secrets than its digits allow. {AUDIT_AGAIN}")
    words_control, twin = report.controls.words, report.controls.twin
    computed = _summary(tokens, gradient, report.claim, settings, plan.limits, words_control, twin)
    stated = {name: value for name, value in report.to_json().items() if name in Summary.model_fields}
    if wrong := list(values.differences(stated, computed.to_json(), tolerance=MAGNIFIED)):
        raise Wrong(f"{values.listed(wrong)} of audit.json does not follow from the scores. {AUDIT_AGAIN}")
    bound = computed.epsilon_lower_bound
    return values.verified(
        "audit: statistics",
        f"{len(stated)} parts of audit.json follow from the scores; verdict {computed.verdict}, lower bound "
        f"{rounded_down(bound.value, 3):g}, of at most {bound.ceiling:.3g}.",
    )


@lru_cache(maxsize=8)
def _summary(
    tokens: TokenTable,
    gradient: GradientTable | None,
    claim: Claim | None,
    settings: AuditSettings,
    limits: MechanismLimits,
    words: WordsControl | None,
    twin: str | None,
) -> Summary:
    context = AuditContext(limits.to_json(), words.to_json() if words else None, twin, gradient=gradient)
    return summarise(tokens, claim, settings, context)


def check_canaries(export: Published[PrivacyRecord], run: RunDir) -> Iterator[Check]:
    """Checks that canaries and coins are those committed to before training, and that every audit is counted."""
    name, audit = "audit: canaries", export.record.audit
    lines = run.audits.read_text(encoding="utf-8", errors="replace") if run.audits.exists() else ""
    num_audits = len(lines.splitlines())
    if num_audits > (audit.audits_run if audit else 0) and export.record.plan is not None:
        raise Wrong(
            f"{num_audits} audits of this run were made, but the card shows fewer, which may hide a verdict. {AUDIT_AGAIN}"
        )
    if audit is None:
        return
    if not run.canaries.exists():
        yield values.asserted(name, "private/canaries.json is not here, so the commitment cannot be opened.")
        return
    planned, folder = canaries.load(run.canaries), export.directory / "audit"
    table, tokens = tables(folder)
    vectors = gradient(folder, export.record, published_audit(folder)) if export.record.plan else None
    control = audit.controls.words and audit.controls.words.to_json()
    rules = {
        "the commitment": planned.commitment == audit.canaries.commitment,
        "answers": tokens.answers == planned.answers,
        "canaries, groups or coins": {row.canary_id: (row.group, row.inserted) for row in table if row.group}
        == {canary.canary_id: (canary.group, canary.inserted) for canary in planned.canaries},
        "references": {row.canary_id for row in table if not row.group}
        == {reference.canary_id for reference in planned.references},
        "the coins of gradient canaries": not vectors or tuple(vectors.inserted_M) == planned.gradient_coins,
        "the control by words": not any(values.differences(control, words_control(planned.canaries))),
    }
    wrong = [subject for subject, holds in rules.items() if not holds]
    values.hold(
        {f"{values.listed(wrong)}: not those of private/canaries.json, to which training committed": not wrong},
        AUDIT_AGAIN,
    )
    yield values.verified(name, "the commitment opens to these canaries and coins.")
