"""Score tables: the scores of two models for every trained token, every secret and every row, without any token or text.

Comes in: scores, or the folder of an audit. Goes out: a parquet file with one row for each token, and one row for each
candidate and reference. Must not import torch, so that anyone can recompute a published audit from the files.
"""

from __future__ import annotations

import io
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpllm.canaries.texts import REJECTED
from dpllm.errors import ConfigError
from dpllm.files import write_whole

# A legend of shapes: S sequences, N tokens of all of them, one sequence after the other.

TOP_K = 40
"""How many of the likeliest tokens the usual sampling keeps."""


@dataclass(frozen=True, eq=False)  # compared by identity: == of arrays is not a single bool
class TokenTable:
    """Scored tokens of S sequences; every sequence has at least one.

    Attributes:
        canary_ids: Id of each sequence. The chosen answer of a preference pair has the canary's id; see ``REJECTED``.
        zlib_bytes_S: Length in bytes of the scored text, compressed by zlib.
        sequence_N: The sequence that a token belongs to: 0 to S - 1, in rising order.
        tuned_log_prob_N: log p(token | tokens before it), in nats, by the tuned model; ``base_...`` by the base model.
        tuned_mean_N: Mean of log p over the vocabulary, each token weighted by its p.
        tuned_variance_N: Variance of log p under p, >= 0.
        tuned_argmax_N: Whether greedy decoding would have chosen the token.
        tuned_top_k_log_prob_N: The token's log-probability, in nats, if only the ``TOP_K`` likeliest tokens may be sampled,
            at temperature 1; -inf if it is not one of them.
        groups: For canaries: how often each is repeated, 0 for a reference.
        coins: For canaries: the coin, None for a reference.
        secret_N: For canaries: whether a token belongs to the secret.
        word_N: For canaries: a number from 0 that replaces the token's id; equal tokens have equal numbers.
    """

    canary_ids: tuple[str, ...]
    zlib_bytes_S: NDArray[np.int64]
    sequence_N: NDArray[np.int64]
    tuned_log_prob_N: NDArray[np.float64]
    tuned_mean_N: NDArray[np.float64]
    tuned_variance_N: NDArray[np.float64]
    tuned_argmax_N: NDArray[np.bool_]
    tuned_top_k_log_prob_N: NDArray[np.float64]
    base_log_prob_N: NDArray[np.float64]
    base_mean_N: NDArray[np.float64]
    base_variance_N: NDArray[np.float64]
    base_argmax_N: NDArray[np.bool_]
    base_top_k_log_prob_N: NDArray[np.float64]
    groups: tuple[int, ...] = ()
    coins: tuple[bool | None, ...] = ()
    secret_N: NDArray[np.bool_] | None = None
    word_N: NDArray[np.int64] | None = None

    def secrets(self) -> TokenTable:
        """The same table with only the tokens of the secrets."""
        assert self.secret_N is not None
        names = [field.name for field in fields(self) if field.name.endswith("_N")]
        columns = {name: getattr(self, name)[self.secret_N] for name in names}
        return replace(self, **columns)

    def starts(self) -> NDArray[np.int64]:
        """Shape (S,): where each sequence begins."""
        return np.searchsorted(self.sequence_N, np.arange(len(self.canary_ids))).astype(np.int64)

    def lengths(self) -> NDArray[np.int64]:
        """Shape (S,): number of tokens of each sequence."""
        return np.diff(np.append(self.starts(), len(self.sequence_N)))

    def sums(self, values_N: NDArray[Any]) -> NDArray[np.float64]:
        """Shape (S,): the sum of the values over each sequence."""
        return np.bincount(self.sequence_N, weights=values_N, minlength=len(self.canary_ids)).astype(np.float64)

    @property
    def answers(self) -> int:
        """Sequences of each canary: 2 for a preference pair, else 1."""
        return 1 + any(name.endswith(REJECTED) for name in self.canary_ids)

    def by_canary(self, values_S: NDArray[np.float64]) -> dict[str, float]:
        """The value of each canary; for a pair, the chosen answer's value minus the rejected one's."""
        sums = dict(zip(self.canary_ids, values_S.tolist(), strict=True))
        return {name: value - sums.get(name + REJECTED, 0.0) for name, value in sums.items() if name[-1:] != REJECTED}


@dataclass(frozen=True)
class CanaryScores:
    """Scores of one secret, or of its whole row, by two models. Log-probabilities are sums over its tokens, in nats.

    For a preference pair they are the chosen answer's minus the rejected one's, so tuned minus base is the margin of its
    implicit rewards divided by beta.
    """

    canary_id: str
    group: int
    """Repetitions; 0 for a reference."""
    inserted: bool | None
    """The coin; None for a reference, which has none."""
    tuned_log_prob: float
    base_log_prob: float
    tuned_greedy: bool
    """Whether greedy decoding of the tuned model after the carrier yields the secret."""
    base_greedy: bool
    """The same for the base model, which never saw it: the control."""
    tuned_left: float
    """For a whole row, the part of its log-probability, in nats, that ``attacks.unexplained`` leaves; for a secret, all."""
    base_left: float


_TOKEN_COLUMNS = tuple(field.name for field in fields(TokenTable) if field.name.startswith(("tuned_", "base_")))


def by_group(table: Iterable[CanaryScores]) -> dict[int, list[CanaryScores]]:
    """The rows of each group, in rising order of repetitions; group 0 holds the references."""
    groups: dict[int, list[CanaryScores]] = {}
    for row in sorted(table, key=lambda row: (row.group, row.canary_id)):
        groups.setdefault(row.group, []).append(row)
    return groups


def sum_up(tokens: TokenTable) -> tuple[CanaryScores, ...]:
    """Sums a token table of canaries to a score table, with one row for each canary in the same order.

    Raises:
        ConfigError: An answer of a pair is missing, or its two answers have different groups or coins.
    """
    secrets = tokens.secrets()
    about = dict(zip(tokens.canary_ids, zip(tokens.groups, tokens.coins, strict=True), strict=True))
    paired = {name[:-1]: kind for name, kind in about.items() if name[-1:] == REJECTED}
    if paired and paired != {name: kind for name, kind in about.items() if name[-1:] != REJECTED}:
        raise ConfigError("the token table holds half a preference pair; the file is damaged. Run dpllm audit again.")
    cuts = secrets.starts()[1:]
    tuned, base = (
        secrets.by_canary(np.array([part.sum() for part in np.split(log_prob_N, cuts)]))
        for log_prob_N in (secrets.tuned_log_prob_N, secrets.base_log_prob_N)
    )
    tuned_greedy, base_greedy = (
        dict(zip(tokens.canary_ids, [bool(part.all()) for part in np.split(argmax_N, cuts)], strict=True))
        for argmax_N in (secrets.tuned_argmax_N, secrets.base_argmax_N)
    )
    return tuple(
        CanaryScores(
            canary_id=name,
            group=about[name][0],
            inserted=about[name][1],
            tuned_log_prob=tuned[name],
            base_log_prob=base[name],
            tuned_greedy=tuned_greedy[name],
            base_greedy=base_greedy[name],
            tuned_left=tuned[name],
            base_left=base[name],
        )
        for name in tuned
    )


def write_tokens(table: TokenTable, path: Path) -> None:
    """Writes the table of canaries atomically; floats read back exactly."""
    import pyarrow
    from pyarrow import parquet

    columns = {
        "canary_id": np.array(table.canary_ids, dtype=object)[table.sequence_N],
        "group": np.array(table.groups, dtype=np.int64)[table.sequence_N],
        "inserted": pyarrow.array(np.array(table.coins, dtype=object)[table.sequence_N], pyarrow.bool_()),
        "zlib_bytes": table.zlib_bytes_S[table.sequence_N],
        **{name.removesuffix("_N"): getattr(table, name) for name in _TOKEN_COLUMNS},
        "secret": table.secret_N,
        "word": table.word_N,
    }
    content, written = io.BytesIO(), pyarrow.table(columns)
    # Log-probabilities are float32 values in float64, so half of the split byte streams are zeros.
    floats = {field.name: "BYTE_STREAM_SPLIT" for field in written.schema if field.type == pyarrow.float64()}
    compressed = [name for name in written.column_names if name not in floats]
    parquet.write_table(written, content, compression="zstd", use_dictionary=compressed, column_encoding=floats)
    write_whole(path, content.getvalue())


def read_tokens(path: Path) -> TokenTable:
    """Reads what ``write_tokens`` wrote.

    Raises:
        ConfigError: Missing or damaged file.
    """
    import pyarrow
    from pyarrow import parquet

    try:
        with open(path, "rb") as file:  # pyarrow opens no name that is not UTF-8
            read = parquet.read_table(file, use_threads=False)
        names_N = np.array(read["canary_id"].to_pylist(), dtype=object)
        first_N = np.append(True, names_N[1:] != names_N[:-1])
        ids = tuple(str(name) for name in names_N[first_N])
        if len(set(ids)) != len(ids):
            raise ValueError("a sequence in two parts")
        values: dict[str, Any] = {name: read[name.removesuffix("_N")].to_numpy() for name in _TOKEN_COLUMNS}
        first = read.select(["group", "inserted"]).filter(first_N)
        if first["group"].null_count:
            raise ValueError("a canary without a group")
        values["groups"] = tuple(first["group"].cast(pyarrow.int64()).to_pylist())
        values["coins"] = tuple(first["inserted"].cast(pyarrow.bool_()).to_pylist())
        values["secret_N"] = _one_run(read["secret"].cast(pyarrow.bool_()).to_numpy(), first_N)
        values["word_N"] = read["word"].cast(pyarrow.int64()).to_numpy()
        if not np.isin(values["word_N"], np.arange(len(first_N))).all():  # a null among them
            raise ValueError("a number for a token that is none")
        return TokenTable(ids, read["zlib_bytes"].to_numpy()[first_N], np.cumsum(first_N) - 1, **values)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such token table; run dpllm audit first.") from None
    except (OSError, pyarrow.ArrowException, KeyError, IndexError, ValueError):
        raise ConfigError(f"{path}: is not a token table; the file is damaged. Run dpllm audit again.") from None


def _one_run(secret_N: NDArray[Any], first_N: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Checks that the secret of each sequence is one contiguous run of its tokens, and returns the flags."""
    if secret_N.dtype != np.bool_:  # there are nulls
        raise ValueError("a token that is neither of the secret nor of the rest")
    begins_N = secret_N & (first_N | ~np.append(False, secret_N[:-1]))
    if (np.add.reduceat(begins_N.astype(np.int64), np.flatnonzero(first_N)) != 1).any():
        raise ValueError("a sequence without a secret, or with two")
    return secret_N
