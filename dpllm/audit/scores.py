"""Scoring: one forward pass of each model over every canary and reference.

Comes in: a canary plan and two models, tuned and base. Goes out: the score table. The text is encoded by the very
function that encodes training rows, so what is scored is what was trained on. Coins play no part: they are only copied.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from dpllm.audit.canaries import Canary, CanaryPlan
from dpllm.audit.table import CanaryScores, read_table, write_table
from dpllm.audit.tokens import TokenTable
from dpllm.data import Format, TokenSequence, encode
from dpllm.errors import ConfigError, DataError, DpllmError

if TYPE_CHECKING:
    from dpllm.model import ScoringModels

__all__ = ["CanaryScores", "TokenScores", "encode_secret", "read_table", "score", "score_canaries", "write_table"]

# A legend of shapes: B rows of a batch, T tokens, V vocabulary, N scored tokens of a batch, C those of one chunk.

_LOGITS_PER_BATCH = 2**28
"""Elements of one batch's logits: 0.5 GiB in bfloat16, whatever the vocabulary."""
_LOGITS_PER_CHUNK = 2**25
"""Elements of one float32 chunk of the softmax: 128 MiB."""


@dataclass(frozen=True)
class TokenScores:
    """The scored tokens of one sequence, in order."""

    log_prob: NDArray[np.float64]
    """log p(token | everything before it), in nats."""
    is_argmax: NDArray[np.bool_]
    """Whether greedy decoding would have chosen it."""
    mean: NDArray[np.float64]
    """Mean of log p over the vocabulary, each token weighted by its p."""
    variance: NDArray[np.float64]
    """Variance of log p under p."""

    def part(self, first: int, last: int) -> TokenScores:
        """Tokens ``first`` to ``last`` - 1."""
        own = slice(first, last)
        return TokenScores(self.log_prob[own], self.is_argmax[own], self.mean[own], self.variance[own])


def encode_secret(
    canary: Canary, fmt: Format, tokenizer: Any, max_length: int, long_examples: str
) -> tuple[TokenSequence, tuple[bool, ...]]:
    """Encodes a canary as training does, and finds the tokens of its secret.

    They are the shortest run of tokens, as far to the right as possible, whose decoding contains the secret.

    Returns:
        The sequence, and a mask over its tokens.

    Raises:
        ConfigError: The canary does not fit into max_length, or its secret is not a training target.
    """
    try:
        sequences = encode(canary.example(fmt), fmt, tokenizer, max_length, long_examples)
    except DataError as error:
        raise ConfigError(f"canary {canary.canary_id} cannot be encoded: {error}") from None
    span = _find(canary.secret, sequences[0].input_ids, tokenizer) if len(sequences) == 1 else None
    if span is None:
        raise ConfigError(
            f"canary {canary.canary_id} does not fit into data.max_length ({max_length} tokens), so its secret would "
            "not be trained on as a whole; raise data.max_length, or lower audit.canaries.digits."
        )
    mask = tuple(span[0] <= position < span[1] for position in range(len(sequences[0].input_ids)))
    if any(scored and not target for scored, target in zip(mask, sequences[0].loss_mask, strict=True)):
        raise ConfigError(
            f"canary {canary.canary_id}: its secret is not a training target in format {fmt}, so there would be "
            "nothing to find; set data.format to text or prompt_completion."
        )
    return sequences[0], mask


def score(
    model: torch.nn.Module, sequences: Sequence[TokenSequence], masks: Sequence[Sequence[bool]], token_budget: int
) -> list[TokenScores]:
    """Log-probability and greedy match of every masked token.

    The result does not depend on which sequences share a batch: rows are padded on the right, where a causal model's
    earlier positions cannot see.

    Args:
        model: In eval mode; called as ``model(input_ids=, attention_mask=).logits``.
        sequences: What to score.
        masks: For each sequence, which tokens; never the first one.
        token_budget: Padded tokens in one batch; a longer sequence is a batch of its own.

    Raises:
        DpllmError: A score is not a finite number.
    """
    device = next(model.parameters()).device
    results: list[TokenScores | None] = [None] * len(sequences)
    order = sorted(range(len(sequences)), key=lambda index: (len(sequences[index].input_ids), index))
    with torch.inference_mode():
        for rows in _batches(order, [len(sequence.input_ids) for sequence in sequences], token_budget):
            width = len(sequences[rows[-1]].input_ids)
            ids_BT = torch.zeros(len(rows), width, dtype=torch.long)
            real_BT = torch.zeros(len(rows), width, dtype=torch.long)
            scored_BT = torch.zeros(len(rows), width, dtype=torch.bool)
            for place, row in enumerate(rows):
                length = len(sequences[row].input_ids)
                ids_BT[place, :length] = torch.tensor(sequences[row].input_ids)
                real_BT[place, :length] = 1
                scored_BT[place, :length] = torch.tensor(masks[row], dtype=torch.bool)
            ids_BT, scored_BT = ids_BT.to(device), scored_BT.to(device)
            logits_BTV = model(input_ids=ids_BT, attention_mask=real_BT.to(device)).logits
            scored = _gather(logits_BTV, ids_BT, scored_BT)
            first = 0
            for row in rows:
                last = first + int(sum(masks[row]))
                results[row] = scored.part(first, last)
                first = last
    done = [result for result in results if result is not None]
    if not all(np.isfinite(result.log_prob).all() for result in done):
        raise DpllmError(
            "the model gives scores that are not finite, so nothing can be ranked; its weights have probably diverged. "
            "Train again with a lower train.learning_rate."
        )
    return done


def score_canaries(
    models: ScoringModels, plan: CanaryPlan, fmt: Format, max_length: int, long_examples: str
) -> tuple[tuple[CanaryScores, ...], TokenTable]:
    """Scores every candidate and reference on the tuned and the base model: secret by secret, and token by token.

    Raises:
        ConfigError: A canary that training could not have learned; see ``encode_secret``.
        DpllmError: A model whose scores are not finite.
    """
    everyone = (*plan.canaries, *plan.references)
    encoded = [encode_secret(canary, fmt, models.tokenizer, max_length, long_examples) for canary in everyone]
    sequences, masks = [sequence for sequence, _ in encoded], [mask for _, mask in encoded]
    budget = _LOGITS_PER_BATCH // max(1, len(models.tokenizer))
    tuned = score(models.tuned, sequences, masks, budget)
    with models.base() as base_model:
        base = score(base_model, sequences, masks, budget)
    rows = tuple(
        CanaryScores(
            canary_id=canary.canary_id,
            group=canary.group,
            inserted=None if canary.group == 0 else canary.inserted,
            num_tokens=len(after.log_prob),
            tuned_log_prob=float(after.log_prob.sum()),
            base_log_prob=float(before.log_prob.sum()),
            tuned_greedy=bool(after.is_argmax.all()),
            base_greedy=bool(before.is_argmax.all()),
        )
        for canary, after, before in zip(everyone, tuned, base, strict=True)
    )
    return rows, _tokens(everyone, tuned, base)


def _tokens(canaries: Sequence[Canary], tuned: Sequence[TokenScores], base: Sequence[TokenScores]) -> TokenTable:
    lengths = [len(scores.log_prob) for scores in tuned]
    values = {
        f"{which}_{name}_N": np.concatenate([getattr(one, field) for one in scores])
        for which, scores in (("tuned", tuned), ("base", base))
        for name, field in (
            ("log_prob", "log_prob"),
            ("mean", "mean"),
            ("variance", "variance"),
            ("argmax", "is_argmax"),
        )
    }
    return TokenTable(
        canary_ids=tuple(canary.canary_id for canary in canaries),
        zlib_bytes_S=np.array([len(zlib.compress(f"{one.carrier} {one.secret}".encode())) for one in canaries]),
        sequence_N=np.repeat(np.arange(len(canaries)), lengths),
        **values,
    )


def _find(secret: str, ids: Sequence[int], tokenizer: Any) -> tuple[int, int] | None:
    """First and last-plus-one token of the secret; a chat template may put tokens of its own behind it."""
    for start in range(len(ids) - 1, -1, -1):
        if secret in tokenizer.decode(ids[start:]):
            end = next(end for end in range(start + 1, len(ids) + 1) if secret in tokenizer.decode(ids[start:end]))
            return start, end
    return None


def _batches(order: Sequence[int], lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """Cuts rows, sorted by length, into batches of at most ``token_budget`` padded tokens."""
    batches: list[list[int]] = []
    for row in order:
        if batches and (len(batches[-1]) + 1) * lengths[row] <= token_budget:
            batches[-1].append(row)
        else:
            batches.append([row])
    return batches


def _gather(logits_BTV: torch.Tensor, ids_BT: torch.Tensor, scored_BT: torch.Tensor) -> TokenScores:
    """Scores of the marked tokens, row by row; float32 copies exist for one chunk at a time."""
    row_N, position_N = scored_BT.nonzero(as_tuple=True)
    target_N = ids_BT[row_N, position_N]
    size = max(1, _LOGITS_PER_CHUNK // logits_BTV.shape[-1])
    log_probs, matches, means, variances = [], [], [], []
    for chunk in range(0, len(row_N), size):
        part = slice(chunk, chunk + size)
        # The token at position t is predicted by the logits at t - 1. Indexing copies, so the copy may be overwritten.
        logits_CV = logits_BTV[row_N[part], position_N[part] - 1].float()
        target_C = target_N[part]
        chosen_C = logits_CV.gather(1, target_C[:, None])[:, 0]
        top_C, argmax_C = logits_CV.max(dim=-1)
        # log sum exp with one pass for the maximum, which the argmax needs anyway. A logit of -inf weighs nothing.
        shifted_CV = logits_CV.sub_(top_C[:, None]).clamp_(min=-1e4)
        weight_CV = shifted_CV.exp()
        total_C = weight_CV.sum(dim=-1)
        weight_CV.mul_(shifted_CV)
        mean_C = weight_CV.sum(dim=-1) / total_C
        square_C = weight_CV.mul_(shifted_CV).sum(dim=-1) / total_C
        log_probs.append((chosen_C - top_C - total_C.log()).double().cpu())
        matches.append((argmax_C == target_C).cpu())
        means.append((mean_C - total_C.log()).double().cpu())
        variances.append((square_C - mean_C.square()).clamp_(min=0.0).double().cpu())
    if not log_probs:
        return TokenScores(np.zeros(0), np.zeros(0, dtype=np.bool_), np.zeros(0), np.zeros(0))
    return TokenScores(
        torch.cat(log_probs).numpy(),
        torch.cat(matches).numpy(),
        torch.cat(means).numpy(),
        torch.cat(variances).numpy(),
    )
