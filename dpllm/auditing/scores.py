"""Scoring: one forward pass of each model over every canary and reference.

Comes in: a canary plan and two models, tuned and base. Goes out: the token table. The text is encoded by the
function that encodes training rows, so scored and trained tokens are the same. Coins are copied and do not affect scores.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.utils.rnn import pad_sequence

from dpllm.auditing.table import TOP_K, TokenTable
from dpllm.canaries.canaries import CanaryPlan
from dpllm.canaries.texts import Canary, encode_secret
from dpllm.errors import ConfigError
from dpllm.model.evaluate import rows_at_once
from dpllm.privacy.schedule import TokenSequence
from dpllm.recipe.config import DataConfig
from dpllm.text.layouts import Format

if TYPE_CHECKING:
    from dpllm.model.loading import ScoringModels

# A legend of shapes: B rows of a batch, T tokens, V vocabulary, N scored tokens of a batch, C those of one chunk.

_LOGITS_PER_BATCH = 2**28
"""Elements of one batch's logits: 0.5 GiB in bfloat16, whatever the vocabulary."""
_TOKENS_ON_CPU = 2**12
"""Maximum tokens of a batch on a processor, where larger batches are slower."""
_BLOCK = 64  # logits in one block of ``_largest``
_NEGLIGIBLE = -1e4  # nats below the maximum; exp of it is 0
_LOGITS_PER_CHUNK = {"cpu": 2**20, "cuda": 2**25}
"""Elements of one float32 chunk of the softmax: 4 MiB, which a processor keeps in its cache, and 128 MiB."""


Mask = Sequence[bool] | NDArray[np.bool_]
"""Mask over the tokens of a sequence; True for the selected ones."""


class TokenScores(NamedTuple):
    """One model's scores of the scored tokens of a sequence, in order: columns of a ``TokenTable``."""

    log_prob: NDArray[np.float64]
    argmax: NDArray[np.bool_]
    mean: NDArray[np.float64]
    variance: NDArray[np.float64]
    top_k_log_prob: NDArray[np.float64]


def score(
    model: torch.nn.Module,
    sequences: Sequence[TokenSequence],
    masks: Sequence[Mask],
    token_budget: int,
) -> list[TokenScores]:
    """Scores every selected token, see ``TokenScores``.

    The result does not depend on which sequences share a batch: rows are padded on the right, which earlier positions of a
    causal model cannot see, and each row is read alone if the longest one would affect the others (``rows_at_once``).

    Args:
        model: In eval mode; called as ``model(input_ids=, attention_mask=).logits``.
        sequences: The sequences to score.
        masks: For each sequence, the tokens to score; never the first one.
        token_budget: Padded tokens in one batch; a longer sequence is a batch of its own.

    Raises:
        ConfigError: A score is not a finite number.
    """
    device = next(model.parameters()).device
    results: dict[int, TokenScores] = {}
    lengths = [len(sequence.input_ids) for sequence in sequences]
    order = sorted(range(len(sequences)), key=lambda index: (lengths[index], index))
    budget = rows_at_once(model, token_budget, max(lengths, default=0))
    with torch.inference_mode():
        for rows in _batches(order, lengths, budget):
            ids_BT, real_BT, scored_BT = (
                pad_sequence(parts, batch_first=True).to(device)
                for parts in (
                    [torch.tensor(sequences[row].input_ids) for row in rows],
                    [torch.ones(lengths[row], dtype=torch.long) for row in rows],
                    [torch.tensor(masks[row], dtype=torch.bool) for row in rows],
                )
            )
            # No name holds the logits, so their memory is free for the next batch; page faults cost more than the statistics.
            scored = _gather(model(input_ids=ids_BT, attention_mask=real_BT).logits, ids_BT, scored_BT)
            first = 0
            for row in rows:
                last = first + int(sum(masks[row]))
                columns: list[Any] = [column[first:last] for column in scored]
                results[row] = TokenScores(*columns)
                first = last
    if not all(np.isfinite(result.log_prob).all() for result in results.values()):
        raise ConfigError(
            "the model's scores are not finite, so nothing can be ranked; its training has probably diverged. Train again with "
            "a lower train.learning_rate."
        )
    return [results[row] for row in range(len(sequences))]


def score_canaries(models: ScoringModels, plan: CanaryPlan, fmt: Format, data: DataConfig) -> TokenTable:
    """Scores the tokens of every candidate and reference (both answers of a pair) on the tuned and the base model.

    Every token that entered the loss is scored, which in format text includes the carrier's; if the secret stands in a prompt,
    only its own tokens are scored.

    Raises:
        ConfigError: A canary that training could not have learned (see ``encode_secret``), or scores that are not finite.
    """
    everyone = [answer for canary in (*plan.canaries, *plan.references) for answer in canary.answers]
    encoded = [encode_secret(canary, fmt, models.tokenizer, data) for canary in everyone]
    return score_encoded(models, everyone, encoded)


def score_encoded(
    models: ScoringModels, canaries: Sequence[Canary], encoded: Sequence[tuple[TokenSequence, Sequence[bool]]]
) -> TokenTable:
    """Does the same for canaries that are already encoded, each with the mask of its secret's tokens."""
    sequences, secrets = zip(*encoded, strict=True)
    masks = [np.array(sequence.loss_mask, dtype=np.bool_) for sequence in sequences]
    scored = [np.array(sequence.input_ids)[mask] for sequence, mask in zip(sequences, masks, strict=True)]
    ids_N = np.concatenate(scored)
    return TokenTable(
        canary_ids=tuple(canary.canary_id for canary in canaries),
        zlib_bytes_S=np.array([zlib_bytes(canary.text) for canary in canaries]),
        sequence_N=np.repeat(np.arange(len(masks)), [mask.sum() for mask in masks]),
        **score_sequences(models, sequences, masks),
        groups=tuple(canary.group for canary in canaries),
        coins=tuple(canary.inserted if canary.group else None for canary in canaries),
        secret_N=np.concatenate([np.array(secret)[mask] for secret, mask in zip(secrets, masks, strict=True)]),
        word_N=np.unique(ids_N, return_inverse=True)[1],
    )


def score_sequences(models: ScoringModels, sequences: Sequence[TokenSequence], masks: Sequence[Mask]) -> dict[str, Any]:
    """Runs the tuned and the base model over any sequences; returns the scored columns of a token table by name.

    Args:
        models: Both, in eval mode.
        sequences: Encoded as for training.
        masks: The tokens of each sequence to score: at least one, never the first.

    Raises:
        ConfigError: A model's scores are not finite.
    """
    budget = token_budget(models)
    tuned = score(models.tuned, sequences, masks, budget)
    with models.base() as base_model:
        base = score(base_model, sequences, masks, budget)
    return {
        f"{which}_{name}_N": np.concatenate([getattr(part, name) for part in scores])
        for which, scores in (("tuned", tuned), ("base", base))
        for name in TokenScores._fields
    }


def zlib_bytes(text: str) -> int:
    """Length in bytes of a text that zlib has compressed."""
    return len(zlib.compress(text.encode()))


def token_budget(models: ScoringModels) -> int:
    """Maximum padded tokens of one batch for these models and their device."""
    budget = _LOGITS_PER_BATCH // max(1, len(models.tokenizer))
    on_cpu = next(models.tuned.parameters()).device.type == "cpu"
    return min(budget, _TOKENS_ON_CPU) if on_cpu else budget


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
    """Scores of the selected tokens, row by row; float32 copies exist for only one chunk at a time."""
    row_N, position_N = scored_BT.nonzero(as_tuple=True)
    target_N = ids_BT[row_N, position_N]
    size = max(1, _LOGITS_PER_CHUNK.get(logits_BTV.device.type, 2**25) // logits_BTV.shape[-1])
    columns: list[tuple[torch.Tensor, ...]] = []
    for chunk in range(0, len(row_N), size):
        part = slice(chunk, chunk + size)
        # The token at position t is predicted by the logits at t - 1. Indexing copies, so the copy may be overwritten.
        logits_CV = logits_BTV[row_N[part], position_N[part] - 1].float()
        target_C = target_N[part]
        chosen_C = logits_CV.gather(1, target_C[:, None])[:, 0]
        likeliest_CK = _largest(logits_CV)
        top_C = likeliest_CK.amax(dim=-1)
        greedy_C = chosen_C == top_C
        # Among equal logits greedy decoding chooses one, as argmax does.
        greedy_C[greedy_C.clone()] = logits_CV[greedy_C].argmax(dim=-1) == target_C[greedy_C]
        among_C = chosen_C >= likeliest_CK.amin(dim=-1)
        top_k_C = torch.where(among_C, chosen_C - likeliest_CK.logsumexp(dim=-1), -math.inf)
        # A logit of -inf has weight 0, and 0 * -inf would be nan.
        shifted_CV = logits_CV.sub_(top_C[:, None])
        if shifted_CV.amin() < _NEGLIGIBLE:
            shifted_CV.clamp_(min=_NEGLIGIBLE)
        weight_CV = shifted_CV.exp()
        total_C = weight_CV.sum(dim=-1)
        mean_C = weight_CV.mul_(shifted_CV).sum(dim=-1) / total_C
        square_C = weight_CV.mul_(shifted_CV).sum(dim=-1) / total_C
        variance_C = (square_C - mean_C.square()).clamp_(min=0.0)
        values = (chosen_C - top_C - total_C.log(), mean_C - total_C.log(), variance_C, top_k_C)
        columns.append((greedy_C, *(value.double() for value in values)))
    if not columns:
        return TokenScores(np.zeros(0), np.zeros(0, dtype=np.bool_), np.zeros(0), np.zeros(0), np.zeros(0))
    matches, log_probs, *moments = (torch.cat(column).cpu().numpy() for column in zip(*columns, strict=True))
    return TokenScores(log_probs, matches, *moments)


def _largest(logits_CV: torch.Tensor) -> torch.Tensor:
    """Shape (C, K): the ``TOP_K`` largest logits of each row, in any order.

    They lie in the K blocks with the largest maxima. One fast pass finds these blocks; sorting V numbers is slower.
    """
    vocabulary = logits_CV.shape[1]
    number = vocabulary // _BLOCK
    if number <= TOP_K:
        return logits_CV.topk(min(TOP_K, vocabulary), dim=-1, sorted=False).values
    blocks = logits_CV[:, : number * _BLOCK].reshape(len(logits_CV), number, _BLOCK)
    best_CK = blocks.amax(dim=-1).topk(TOP_K, dim=-1, sorted=False).indices
    inside = blocks.gather(1, best_CK[:, :, None].expand(-1, -1, _BLOCK)).flatten(1)
    remainder_CV = logits_CV[:, number * _BLOCK :]
    return torch.cat((inside, remainder_CV), dim=1).topk(TOP_K, dim=-1, sorted=False).values
