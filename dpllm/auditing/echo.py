"""Whether texts that a model wrote tell planted canaries from others: the audit of somebody who sees synthetic text and no model.

Comes in: canaries with their coins, texts that the model wrote, texts of others. Goes out: what the audit concludes, with n-grams
of texts in place of models. Must not know how texts are written.

References:
    Meeus et al. 2025, "The Canary's Echo" (arXiv 2502.14921), for scores by n-grams of synthetic text.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from dpllm.auditing.bounds import Claim
from dpllm.auditing.summary import PRIMARY_ATTACK, summarise
from dpllm.auditing.table import CanaryScores
from dpllm.canaries.canaries import CanaryPlan
from dpllm.statement.run_files import AuditSettings

ORDER = 3
"""Tokens of the longest n-grams."""


class Backoff:
    """Token n-grams, each interpolated with the shorter ones.

    References:
        Witten and Bell 1991, "The zero-frequency problem", method C.
    """

    def __init__(self, texts: Sequence[Sequence[int]], vocabulary: int) -> None:
        """Counts n-grams of up to ``ORDER`` tokens; what was never seen has 1 / ``vocabulary``."""
        self._vocabulary = vocabulary
        self._often = Counter(gram for text in texts for place in self._grams(text) for gram in place)
        self._after, self._kinds = Counter[tuple[int, ...]](), Counter(gram[:-1] for gram in self._often)
        for gram, count in self._often.items():
            self._after[gram[:-1]] += count

    @staticmethod
    def _grams(text: Sequence[int]) -> list[list[tuple[int, ...]]]:
        """Of each token and the end (-1), the n-grams that it ends, from the shortest on."""
        ids = (*[-1] * (ORDER - 1), *text, -1)
        return [[ids[end - n : end] for n in range(1, ORDER + 1)] for end in range(ORDER, len(ids) + 1)]

    def log_prob(self, text: Sequence[int]) -> float:
        """Of a whole text, in nats."""
        total = 0.0
        for place in self._grams(text):
            p = 1 / self._vocabulary
            for gram in place:
                if seen := self._after[gram[:-1]]:
                    kinds = self._kinds[gram[:-1]]
                    p = (self._often[gram] + kinds * p) / (seen + kinds)
            total += math.log(p)
        return total


def examine(
    plan: CanaryPlan,
    written: Sequence[str],
    others: Sequence[str],
    tokenizer: Any,
    claim: Claim | None,
    settings: AuditSettings,
) -> dict[str, Any]:
    """Scores every canary by the texts, and concludes as the audit does.

    Its tuned model is n-grams of ``written``, its base model those of ``others``; a secret that stands in a text is given away.

    Returns:
        ``attacks`` by the audit's own score and secrets ``reproduced``, by group; ``epsilon_lower_bound`` of the once-planted,
        ``tests`` of the other groups; and how many ``references`` were found, as a control.

    Guarantee:
        That of ``bounds.epsilon_lower_bound``: the scores depend on the coins through ``written`` alone.
    """
    every = [*plan.canaries, *plan.references]
    encoded = [tokenizer([*texts, ""], add_special_tokens=False)["input_ids"][:-1] for texts in (written, others)]
    tuned, base = (Backoff(ids, len(tokenizer)) for ids in encoded)
    known = ["\n".join(texts) for texts in (written, others)]
    table = []
    for one in every:
        ids = tokenizer(one.text, add_special_tokens=False)["input_ids"]
        coin, said = one.inserted if one.group else None, [one.secret in text for text in known]
        scores = (tuned.log_prob(ids), base.log_prob(ids))
        table.append(CanaryScores(one.canary_id, one.group, coin, len(ids) + 1, *scores, *said))
    found = summarise(table, claim, settings)
    told = found.to_json()
    return {
        "attacks": {group: one[PRIMARY_ATTACK].to_json() for group, one in found.by_group().items()},
        "epsilon_lower_bound": {**told["epsilon_lower_bound"], "method": f"{ORDER}-grams of the texts"},
        "tests": {group: {name: one[name] for name in ("claim", "test")} for group, one in told["repeated"].items()},
        "reproduced": told["extraction"],
        "references": {
            "secrets": len(plan.references),
            "found": sum(one.tuned_greedy for one in table if not one.group),
        },
    }
