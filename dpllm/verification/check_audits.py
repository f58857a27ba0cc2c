"""The audits: that they are about these weights, and that their numbers follow from the published scores.

Comes in: export/audit/. Goes out: checks. What shadow runs showed cannot be seen
again without them, and is asserted.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

from dpllm.auditing.gradient import COLUMNS, OPTIONAL, GradientTable, read_gradient
from dpllm.auditing.summary import Beside, summarise
from dpllm.auditing.table import CanaryScores, TokenTable, by_group, read_scores
from dpllm.errors import ConfigError, DpllmError
from dpllm.files import SETTINGS, of_model
from dpllm.privacy import banded
from dpllm.privacy.plan import AuditSettings, Plan
from dpllm.statement import state
from dpllm.statement.audit import CONTROL_LEVEL, AuditRecord, CanaryGroup, Summary, parse_audit
from dpllm.statement.audit_bounds import Claim
from dpllm.statement.privacy_record import PrivacyRecord
from dpllm.verification import costs
from dpllm.verification.values import (
    WRITE_AGAIN,
    Check,
    Published,
    Wrong,
    asserted,
    bounded_memory,
    close,
    differences,
    listed,
    read_object,
    regular,
    verified,
)

MOST_ROWS, MOST_CANARIES, MOST_TOKENS = 100_000, 25_000, 400_000
MOST_FOOTER, MOST_UNPACKED, MOST_MEMORY = 2**20, 2**27, 2**29
"""Bytes of a table: of its description, of its columns by what that says, and of memory while it is read."""
_ID = re.compile(r"[cr]\d{5,8}-?")  # with a dash: the rejected answer of a pair
AUDIT_AGAIN = "Audit again, then write the card again: dpllm audit RUN, dpllm card RUN."
_NUMBERS = {"bool", "int8", "int16", "int32", "int64", "float", "double"}
_MOST_TESTS = 32  # of one kind; each takes seconds where canaries are many


def check(found: Published) -> Iterator[Check]:
    """The audit of the weights."""
    folder, stated = found.directory / "audit", found.record
    files = sorted(name for name in found.hashes if name.startswith("audit/"))
    if stated.audit is None:
        if files:
            raise Wrong(f"{listed(files)} are in export/, but the card names no audit. {WRITE_AGAIN}")
        fixed = (
            ", and canary_slots, canary_commitment and audit of the Plan are the author's word" if stated.plan else ""
        )
        yield asserted("audit", f"no audit of these weights is published{fixed}.")
        return
    if stated.plan is None:
        raise Wrong("audits of runs without differential privacy are private. Delete export/audit.")
    report = published_audit(folder)
    yield _belongs(found, stated.plan, report)
    yield _in_block(stated, stated.audit, report)
    table, tokens = tables(folder)
    from_steps = gradient(folder, stated, report)
    yield _rows(stated.plan, table, tokens, report)
    yield _statistics(stated.plan, report, table, tokens, from_steps)
    left = ["shadows"] if report.shadows else []
    if report.controls.words:
        left.append("the control by words")
    if report.controls.twin:
        left.append("the twin on which the attack is said to work")
    left.append("kind, length and place of the secrets and their commitment")
    left.append("alpha, the tests and the score, which training fixed")
    yield asserted(
        "audit: what needs the models",
        f"that these scores are those of these weights, that the coins were fair, that there were {report.audits_run} "
        f"audits, and {', '.join(left)}. Whoever has the weights and the canaries can score them again.",
    )


def published_audit(folder: Path) -> AuditRecord:
    """audit.json of a folder; ``Wrong`` says which field is damaged."""
    try:
        return parse_audit(read_object(folder / "audit.json"), "audit.json")
    except ConfigError as error:
        raise Wrong(str(error)) from None


def _belongs(found: Published, plan: Plan, report: AuditRecord) -> Check:
    """Weights, canaries and claim are those of the block."""
    merged = found.record.merged_from
    hashes = merged.files if merged else found.hashes
    names = of_model(hashes)
    # Audits of earlier versions named no settings; one that left them out would look the same.
    silent = [name for name in names if name in SETTINGS and name not in report.weights]
    weights = {name: hashes[name] for name in names if name not in silent}
    if not weights or report.weights != weights:
        raise Wrong(f"audit.json is about other weights than these. {AUDIT_AGAIN}")
    tested = report.claim
    same = tested is not None and (tested.delta, tested.unit) == (plan.delta, plan.unit)
    if tested is None or not same or not close(tested.epsilon, plan.epsilon):
        raise Wrong(f"audit.json tested another epsilon, delta or unit than the card states. {AUDIT_AGAIN}")
    if (report.settings, report.canaries.commitment) != (plan.audit, plan.canary_commitment):
        raise Wrong(f"audit.json made other tests, or is of other canaries, than the Plan fixed. {AUDIT_AGAIN}")
    if not report.published:
        raise Wrong("audit.json reports on other, private runs and must not be published. Delete it, and audit again.")
    if merged:
        return asserted("audit: weights", "it is about the adapter; that these weights contain it is asserted.")
    if silent:
        said = f"it is about {listed(sorted(weights))}, and does not name {listed(silent)}, which says how they are applied"
        return asserted("audit: weights", f"{said}: that this was the same is the author's word.")
    return verified("audit: weights", f"it is about {listed(sorted(weights))} and about the epsilon that is stated.")


def _in_block(block: PrivacyRecord, stated: AuditRecord, report: AuditRecord) -> Check:
    """What the card shows is what audit.json says, and its verdict goes with the guarantee."""
    if wrong := list(differences(stated.to_json(), report.to_json(), tolerance=0.0)):
        raise Wrong(f"privacy.json and audit.json differ in audit.{listed(wrong)}. {WRITE_AGAIN}")
    if block.guarantee and state.contradicts(report, block.plan.epsilon):
        raise Wrong("the audit contradicts the stated guarantee. Do not rely on it.")
    return verified("audit: in the card", "the card shows what audit.json says.")


def tables(folder: Path) -> tuple[tuple[CanaryScores, ...], TokenTable]:
    """The scores of an audit, whose files are read once they are known to be small; ``Wrong`` says what is wrong with them."""
    path = folder / "tokens.parquet"
    try:
        with bounded_memory(MOST_MEMORY):
            _only_numbers(path)
            return _read_tables(folder, path.stat().st_size, path.stat().st_mtime_ns)
    except DpllmError as error:
        raise Wrong(str(error).replace(f"{folder}/", "")) from None


@lru_cache(maxsize=8)
def _read_tables(folder: Path, size: int, changed: int) -> tuple[tuple[CanaryScores, ...], TokenTable]:
    table, tokens = read_scores(folder)
    if len(table) > MOST_CANARIES:
        raise Wrong(f"it scored {len(table):,} canaries, more than any audit of dpllm. {AUDIT_AGAIN}")
    return table, tokens


def _only_numbers(path: Path) -> None:
    """The columns of a token table and nothing else, before any of it is unpacked."""
    from pyarrow import parquet

    scored = {field.name.removesuffix("_N") for field in fields(TokenTable) if field.name.startswith(("tuned", "base"))}
    described(path, {"canary_id", "zlib_bytes", "group", "inserted", "secret", "word"} | scored, MOST_TOKENS)
    # As a dictionary: a few bytes can stand for any number of long names.
    with path.open("rb") as file:
        table = parquet.read_table(file, columns=["canary_id"], read_dictionary=["canary_id"], use_threads=False)
    names = table["canary_id"]
    if sum(len(chunk.dictionary) for chunk in names.chunks) > MOST_TOKENS:
        raise Wrong(f"{path.name} names more canaries than any audit of dpllm. {AUDIT_AGAIN}")
    if any(len(str(name)) > 10 for chunk in names.chunks for name in chunk.dictionary):
        raise Wrong(f"{path.name} has a canary name that dpllm never writes. {AUDIT_AGAIN}")


def described(path: Path, wanted: set[str], most: int, optional: Sequence[str] = ()) -> None:
    """Refuses a parquet file with other columns, with text beside them, or with more rows, before any of it is unpacked."""
    from pyarrow import ArrowException, parquet

    with regular(path) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 8))
        footer = int.from_bytes(file.read(4), "little")
    try:
        if footer > min(size, MOST_FOOTER):
            raise ArrowException
        with path.open("rb") as file:  # whose name may be no text
            found = parquet.read_metadata(file)
    except (ArrowException, OSError):
        raise Wrong(f"{path.name} is not a parquet file. {AUDIT_AGAIN}") from None
    names = set(found.schema.names)
    if not wanted <= names <= {*wanted, *optional} or (found.metadata or {}).keys() - {b"ARROW:schema"}:
        raise Wrong(f"{path.name} has other columns than dpllm writes; these could be text. {AUDIT_AGAIN}")
    fields_of = found.schema.to_arrow_schema()
    if fields_of.metadata or any(one.metadata for one in fields_of):
        raise Wrong(f"{path.name} has descriptions of its columns, which could be text. {AUDIT_AGAIN}")
    # A row of lists could unpack to any number of values; only a token table names anything.
    texts = [one.name for one in fields_of if str(one.type) not in _NUMBERS and one.name != "canary_id"]
    if texts or any(found.schema.column(i).max_repetition_level for i in range(len(found.schema.names))):
        raise Wrong(f"{path.name} holds something other than numbers and flags. {AUDIT_AGAIN}")
    unpacked = sum(found.row_group(number).total_byte_size for number in range(found.num_row_groups))
    if found.num_rows > most or unpacked > MOST_UNPACKED:
        raise Wrong(
            f"{path.name} is larger than any audit writes: {found.num_rows:,} rows, {unpacked:,} bytes unpacked. {AUDIT_AGAIN}"
        )


def _rows(plan: Plan, table: tuple[CanaryScores, ...], tokens: TokenTable, report: AuditRecord) -> Check:
    """Scores, tokens and the numbers of canaries speak of the same canaries."""
    rows = {row.canary_id: row for row in table}
    values = [
        float(edge) for one in (tokens.tuned_log_prob_N, tokens.base_log_prob_N) for edge in (one.min(), one.max())
    ]
    if not all(map(_ID.fullmatch, tokens.canary_ids)):
        raise Wrong(f"its table has a canary name that dpllm never writes, which could be text. {AUDIT_AGAIN}")
    if len(rows) != len(table) or not all(math.isfinite(value) and value <= 0 for value in values):
        raise Wrong(f"its table names a canary twice, or holds a score that is no log-probability. {AUDIT_AGAIN}")
    if any((row.inserted is None) != (row.group == 0) or row.group < 0 for row in table):
        raise Wrong(f"its table has a coin of a reference, or a candidate without one. {AUDIT_AGAIN}")
    groups = by_group(table)
    references = len(groups.pop(0, []))
    counted = {
        str(group): CanaryGroup(candidates=len(of_group), inserted=sum(bool(row.inserted) for row in of_group))
        for group, of_group in groups.items()
    }
    canaries, planned = report.canaries, report.canaries.settings
    sizes = {group: counts.candidates for group, counts in counted.items()}
    same = (canaries.groups, canaries.references, planned.groups) == (counted, references, sizes)
    if not same or references not in (planned.references, 0):  # labels have none
        raise Wrong(f"its table holds other canaries than audit.json counts. {AUDIT_AGAIN}")
    row_by_row = plan.unit == "example" or plan.sampling == "example"
    slots = sum(len(of_group) * (group if row_by_row else 1) for group, of_group in groups.items())
    slots += report.gradient.canaries if report.gradient else 0
    if plan.canary_slots != slots:
        raise Wrong(f"canary_slots is not the {slots} slots that the scored canaries hold. {AUDIT_AGAIN}")
    of_pairs = " (of a pair, those of its chosen answer less the others)" if tokens.of_pairs else ""
    return verified("audit: scores", f"{len(table)} canaries and references, each the sum of its tokens{of_pairs}.")


def gradient(folder: Path, stated: PrivacyRecord, report: AuditRecord) -> GradientTable | None:
    """The gradient canaries of an audit, where it names some; ``Wrong`` says what is wrong with their table."""
    path = folder / "gradient.parquet"
    if report.gradient is None:
        if path.exists():
            raise Wrong(f"gradient.parquet is there, but audit.json names no gradient canaries. {AUDIT_AGAIN}")
        return None
    described(path, COLUMNS, MOST_ROWS, OPTIONAL)
    plan, randomness, steps = stated.plan, stated.randomness, stated.steps
    if plan is None or randomness is None:
        raise Wrong(f"gradient canaries are of a private run, and no Plan is stated. {AUDIT_AGAIN}")
    if steps.planned > costs.MOST_STEPS or plan.bands > banded.MOST_BANDS:
        raise Wrong("more steps or bands are stated than an audit by gradient canaries can be computed again for.")
    try:
        noise = randomness.lattice.noise_over_max_grad_norm
        table = read_gradient(path, plan.sampling_rate, noise, plan.coefficients)
    except ConfigError as error:
        raise Wrong(str(error).replace(f"{folder}/", "")) from None
    # A step that was not seen takes one pair at most.
    taken = max(steps.taken, table.steps)
    if table.steps > steps.planned or not taken // 2 - (taken - table.steps) <= table.pairs <= table.steps // 2:
        raise Wrong(f"gradient.parquet counts other steps, or pairs of them, than the run took. {AUDIT_AGAIN}")
    return table


def _statistics(
    plan: Plan,
    report: AuditRecord,
    table: tuple[CanaryScores, ...],
    tokens: TokenTable,
    gradient: GradientTable | None,
) -> Check:
    """Everything that the summary of an audit says, computed again from the tables."""
    canaries, controls, settings = report.canaries, report.controls, report.settings
    tests = max(len(settings.falling), len(settings.falling_in))
    if settings.control_level != CONTROL_LEVEL or tests > _MOST_TESTS:
        raise Wrong(f"audit.json has another level of controls, or more tests, than any audit of dpllm. {AUDIT_AGAIN}")
    if canaries.kind == "digits" and not close(
        canaries.log2_secrets, (canaries.settings.digits or 0) * math.log2(10), 1e-9
    ):
        raise Wrong(f"audit.json counts other secrets than its digits allow. {AUDIT_AGAIN}")
    fixed = {
        "claim": asdict(report.claim) if report.claim else None,
        "settings": report.settings.to_json(),
        "beside": {
            "limits": plan.limits.to_json(),
            "words": controls.words.to_json() if controls.words else None,
            "twin": controls.twin,
        },
    }
    fresh = _summary(table, tokens, json.dumps(fixed, sort_keys=True), gradient)
    stated = {name: value for name, value in report.to_json().items() if name in Summary.model_fields}
    if wrong := list(differences(stated, fresh.to_json(), tolerance=costs.MAGNIFIED)):
        raise Wrong(f"{listed(wrong)} of audit.json does not follow from the scores. {AUDIT_AGAIN}")
    bound = fresh.epsilon_lower_bound
    return verified(
        "audit: statistics",
        f"{len(stated)} parts of audit.json follow from the scores; verdict {fresh.verdict}, lower bound {bound.value:.3g}, "
        f"of at most {bound.ceiling:.3g}.",
    )


@lru_cache(maxsize=8)
def _summary(
    table: tuple[CanaryScores, ...], tokens: TokenTable, fixed: str, gradient: GradientTable | None
) -> Summary:
    given: dict[str, Any] = json.loads(fixed)
    claimed, beside = Claim(**given["claim"]), Beside(**given["beside"], gradient=gradient)
    return summarise(table, claimed, AuditSettings.pick(given["settings"]), tokens=tokens, beside=beside)
