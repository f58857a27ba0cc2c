"""BLEU of texts, each against all references of its prompt, as the E2E challenge defines it.

Comes in: texts, and for each its references, one or more. Goes out: a figure. Must know no model and no file.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from dpllm.statement.fields import Json

RESAMPLES = 1000


def bleu(texts: Sequence[str], references: Sequence[Sequence[str]]) -> Json:
    """Corpus BLEU, without regard to case and without smoothing.

    Returns:
        ``value`` in 0..100, a 95 % ``interval`` by sacrebleu's bootstrap over texts (None for one text), and its ``signature``.

    References:
        Papineni et al. 2002; Post 2018, "A Call for Clarity in Reporting BLEU Scores"; Koehn 2004 for the bootstrap.
    """
    from sacrebleu.metrics import BLEU  # type: ignore[import-not-found,unused-ignore]

    streams = [list(stream) for stream in zip_longest(*references)]
    metric = BLEU(lowercase=True, tokenize="13a", smooth_method="none")
    whole = metric.corpus_score(list(texts), streams)
    limits = None
    if len(texts) > 1:
        drawn = metric.corpus_score(list(texts), streams, n_bootstrap=RESAMPLES)
        limits = [min(100.0, max(0.0, drawn._mean - drawn._ci)), min(100.0, drawn._mean + drawn._ci)]
    return {"value": min(100.0, whole.score), "interval": limits, "signature": str(metric.get_signature())}
