"""Shadow runs: the recipe of a finished run, trained again with fresh coins, so that an audit can measure their effect.

Comes in: a run directory and its canaries. Goes out: K runs under private/shadows/, and a report: LiRA, higher = more likely a
member, for each group, and a lower bound on epsilon from one score of each run. A shadow has the same canaries and Plan; its
coins, sample and noise are drawn anew. ``train`` trains each like any run, one after the other in this process.

Shape suffixes: K shadows, M candidates, R runs: the target and its shadows.
"""

from __future__ import annotations

import contextlib
import math
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from rich.console import Console

from dpllm import ledger
from dpllm.auditing import attacks
from dpllm.auditing.bounds import Rates, epsilon_from_rates, many_runs
from dpllm.auditing.scores import score_canaries
from dpllm.auditing.statistics import Floats
from dpllm.auditing.summary import CONFIDENCE, separation
from dpllm.auditing.table import CanaryScores, TokenTable, by_group
from dpllm.canaries import canaries
from dpllm.canaries.canaries import CanaryPlan
from dpllm.errors import ConfigError, DpllmError, Refused
from dpllm.model import loading
from dpllm.privacy.plan import Plan
from dpllm.recipe import names
from dpllm.recipe.config import RunConfig
from dpllm.run.directory import Run, RunDir, open_run
from dpllm.run.loop import train
from dpllm.run.subject import read_subject

MECHANISM = (
    "num_steps",
    "noise_multiplier",
    "sampling",
    "delta",
    "dataset_size",
    "expected_batch_size",
    "max_grad_norm",
    "clipping",
)
"""Fields of a Plan that two runs of one recipe and mechanism share, besides the coefficients of banded noise."""
SAME = 1e-5  # tolerance for equal coefficients: their search differs by about 1e-7 between processors
VARIANCE_FLOOR = 1e-6  # nats squared: differences between runs below a thousandth of a nat are ignored
LIFT_FLOOR = 1e-3  # standard deviations: minimum effect of training assumed for a candidate

Coins = NDArray[np.bool_]


@dataclass(frozen=True)
class ShadowScores:
    """Scores of the target's canaries in K shadow runs. Log-probabilities are sums over a secret, in nats."""

    canary_ids: tuple[str, ...]  # of the M candidates
    coins_KM: Coins  # True if the shadow's own coin inserted the candidate
    log_prob_KM: Floats


def may_train(run: Run) -> None:
    """Raises unless shadows of a run may be trained.

    Every shadow is another run on data.train that was not planned, and together they reveal more than the guarantee of one run
    covers, so the data must be public.

    Raises:
        ConfigError: The run is not complete, lost steps, has labels as canaries, or its data have changed since.
        Refused: The data are not declared public, or have a budget.
    """
    config, record, folder = run.config, run.record, run.directory
    if run.canaries and run.canaries.label_epsilon:
        raise ConfigError(
            f"{folder.root}: its canaries are labels, which shadow runs do not know. Audit it without --shadows."
        )
    if record.status != "completed" or record.resumes:
        raise ConfigError(
            f"{folder.root}: the run did not complete, or lost steps in a crash, so shadow runs of its recipe would not be "
            "comparable. Audit it without --shadows, or train it again."
        )
    policy = read_subject(
        config.changed({"data.eval": None, "data.eval_public": False}), folder.private / "cache"
    ).policy
    assert policy is not None
    book = ledger.open_ledger(config.privacy.ledger, create=False)
    with contextlib.ExitStack() as stack:
        if book:
            stack.enter_context(book)
            stack.enter_context(book.counting())
        budget = book.budget(book.records.charged_to(policy.dataset, policy.derived_from)) if book else None
        if budget or not config.data.public:
            raise Refused(
                f"--shadows trains more runs on {config.data.train}, which is not declared public or has a privacy budget: "
                "together the runs reveal more than one run's guarantee covers, and no exception of the ledger permits them. "
                "Audit without --shadows, or set data.public: true if it is public and train again.",
                dataset=policy.dataset,
                reason="no_privacy",
            )
        registered = book.records.of_account(record.ledger.dataset) if book and record.ledger else None
        if registered and policy.records and policy.records.digest not in registered:
            raise ConfigError(
                f"{folder.root}: data.train no longer holds the records that the run was trained on, so its shadows would be "
                "runs of another mechanism. Restore the file, or train again."
            )


def train_shadows(run: Run, num_shadows: int, console: Console) -> tuple[Run, ...]:
    """Trains the first K shadows of a run; finished shadows are kept, unfinished ones are trained from the start.

    Guarantee:
        The coins of each shadow are drawn by ``canaries.redraw_coins`` before it is trained. Nothing is booked in the ledger
        of the run: the shadows have one of their own.

    Raises:
        ConfigError, Refused: See ``may_train``; or a shadow's Plan differs from the run's.
        DpllmError: A shadow was interrupted.
    """
    may_train(run)
    assert run.canaries is not None
    folder = RunDir(run.directory.private / "shadows")
    folder.root.mkdir(mode=0o700, exist_ok=True)
    runs = tuple(RunDir(folder.root / f"{index:02d}") for index in range(num_shadows))
    with folder.locked():
        for number, shadow in enumerate(runs, start=1):
            recipe = _recipe(run, shadow)
            if _finished(shadow, recipe, run.canaries):
                console.print(f"Shadow {number} of {num_shadows}: trained earlier")
                continue
            shutil.rmtree(shadow.root, ignore_errors=True)
            shadow.root.mkdir(mode=0o700)
            shadow.private.mkdir(mode=0o700)
            canaries.save(canaries.redraw_coins(run.canaries), shadow.canaries)
            if train(recipe, console=Console(quiet=True)).status != "completed":
                raise DpllmError(
                    f"shadow {number} of {num_shadows} was interrupted. Type the same command again: earlier shadows are kept, "
                    "and this one starts over."
                )
            console.print(f"Shadow {number} of {num_shadows}: trained")
    opened = tuple(open_run(shadow) for shadow in runs)
    for trained in opened:
        _same_mechanism(run.plan, trained.plan, trained.directory)
    return opened


def score_shadows(runs: Sequence[Run]) -> ShadowScores:
    """Scores the canaries under each of K completed shadows of one run, one model at a time."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    log_probs, coins, ids = [], [], tuple[str, ...]()
    for shadow in runs:
        config, plan = shadow.config, shadow.canaries
        assert plan is not None
        assert config.data.format != "auto"  # training writes the format that it found
        models = loading.load_for_scoring(config, shadow.export_dir, device)
        table = attacks.whole_rows(score_canaries(models, plan, config.data.format, config.data))
        log_probs.append(attacks.loss(table[: len(plan.canaries)]))  # candidates precede references
        coins.append([canary.inserted for canary in plan.canaries])
        ids = tuple(row.canary_id for row in table[: len(plan.canaries)])
    return ShadowScores(ids, np.array(coins, dtype=np.bool_), np.array(log_probs))


def _recipe(run: Run, shadow: RunDir) -> RunConfig:
    """The run's recipe with the noise of its Plan, without evaluations, checkpoints, generated samples and telemetry."""
    changes: dict[str, Any] = {
        "data.eval": None,
        "data.eval_public": False,
        "privacy.insecure_seed": None,  # or all shadows would have the same noise
        "privacy.ledger": str(shadow.root.parent / "ledger.sqlite"),
        "privacy.derived_from": None,  # that ledger knows no parent
        "privacy.final": False,  # all shadows share that ledger
        "train.eval_every": None,
        "train.checkpoint_every": None,
        "train.sample_prompts": None,
        "train.sample_every": None,
        "telemetry.textfile": None,
        "telemetry.port": None,
        "telemetry.trackers": [],
        "output_dir": str(shadow.root),
    }
    if plan := run.plan:
        changes |= {"privacy.noise_multiplier": plan.noise_multiplier, "privacy.delta": plan.delta}
        if run.config.privacy.noise == "banded":
            changes["privacy.bands"] = plan.bands  # as auto chose them for the run
    return run.config.changed(changes)


def _finished(shadow: RunDir, recipe: RunConfig, plan: CanaryPlan) -> bool:
    """Whether a shadow of exactly this recipe and these canaries is complete, and its files are unchanged."""
    with contextlib.suppress(DpllmError):
        opened = open_run(shadow)
        planned, trained = (
            [(each.canary_id, each.group, each.text) for each in (*which.canaries, *which.references)]
            if which
            else None
            for which in (plan, opened.canaries)
        )
        same_training = names.of_training(opened.config) == names.of_training(recipe) and trained == planned
        return same_training and opened.status == "completed" and any(shadow.export.glob("*.safetensors"))
    return False


def _same_mechanism(ours: Plan | None, theirs: Plan | None, shadow: RunDir) -> None:
    if ours is None or theirs is None:  # the recipes are the same, so neither run has a Plan
        return
    changed = [key for key in MECHANISM if getattr(ours, key) != getattr(theirs, key)]
    same_bands = len(ours.coefficients) == len(theirs.coefficients)
    if not same_bands or not np.allclose(ours.coefficients, theirs.coefficients, rtol=0, atol=SAME):
        changed.append("coefficients")
    if changed:
        raise ConfigError(
            f"{shadow.root}: its Plan has another {changed[0]} than that of the run, so they are runs of different "
            f"mechanisms and cannot be compared. Train the run again, or remove {shadow.root.parent}."
        )


# Results. Scores do not depend on the target's coins, which only sort them afterwards.


def shadow_scores(candidates: Sequence[CanaryScores], shadows: ShadowScores) -> dict[str, Floats]:
    """LiRA on the candidates of one group, all repeated equally often, and the ratio, which needs no shadow.

    Returns:
        Scores by name, shape (M,), higher = more likely a member.
    """
    own_M = [shadows.canary_ids.index(row.canary_id) for row in candidates]
    coins_KM, log_prob_KM = shadows.coins_KM[:, own_M], shadows.log_prob_KM[:, own_M]
    ratio_M = attacks.ratio(candidates)
    return {"ratio": ratio_M, "lira": lira(ratio_M, log_prob_KM - attacks.base_loss(candidates), coins_KM)}


def summarise_shadows(tokens: TokenTable, shadows: ShadowScores, *, delta: float, alpha: float) -> dict[str, Any]:
    """The report on the shadows of the target whose token table is given, JSON-ready.

    The negatives of each attack are the held-out candidates, because only these differ from the inserted ones by a coin alone.
    """
    groups, tested = by_group(attacks.whole_rows(tokens)), {}
    for group, rows in groups.items():
        if not group:  # references, which have no coin
            continue
        in_M = np.array([bool(row.inserted) for row in rows])
        positives = int(in_M.sum())
        shared = {"group": group, "positives": positives, "negatives": len(rows) - positives, "confidence": CONFIDENCE}
        tested[str(group)] = {
            name: {**shared, **separation(score_M[in_M], score_M[~in_M])}
            for name, score_M in shadow_scores(rows, shadows).items()
        }
    many_runs = one_canary_bound(groups.get(1, []), shadows, delta=delta, alpha=alpha)
    return {"shadows": len(shadows.coins_KM), "attacks": tested, "many_runs": many_runs}


def lira(target: ArrayLike, shadows: ArrayLike, coins: ArrayLike) -> Floats:
    """Gaussian log-likelihood ratio of in against out, score_M from target_M, shadows_KM and coins_KM (LiRA).

    A candidate's score in a shadow is modelled as level + coin * lift + noise. Its lift is estimated from its own shadows and
    shrunk towards the mean lift of all candidates, the more the fewer shadows there are (moment estimate of the lifts'
    variance); the level is then the mean of the remainder. A candidate without an in shadow, or without an out shadow, has the
    mean lift. If no shadow has any candidate in, or none out, no lift is known, and the score is the distance from the
    mean in standard deviations.

    Guarantee:
        A candidate's score rises with its target score: the direction is never learned. If some candidate has shadows of both
        kinds, adding a constant to one candidate's scores in target and shadows changes nothing.

    References:
        Carlini et al. 2022, "Membership Inference Attacks From First Principles", which uses each candidate's own in and
        out means however few shadows there are; one variance for all is also theirs.
    """
    target_M, shadow_KM = np.asarray(target, dtype=np.float64), np.asarray(shadows, dtype=np.float64)
    in_KM = np.asarray(coins, dtype=np.bool_)
    ins_M, outs_M = in_KM.sum(0), (~in_KM).sum(0)
    mean_in_M, mean_out_M = _mean(shadow_KM, in_KM), _mean(shadow_KM, ~in_KM)
    # One variance for all: few shadows estimate a candidate's own so badly that dividing by it would rank by chance.
    square = float(((shadow_KM - np.where(in_KM, mean_in_M, mean_out_M)) ** 2).sum())
    freedom = int(np.maximum(ins_M - 1, 0).sum() + np.maximum(outs_M - 1, 0).sum())
    # Unless two shadows agree on a candidate's coin the variance is unknown; it does not change the order.
    variance = max(square / freedom, VARIANCE_FLOOR) if freedom else 1.0
    if in_KM.all() or not in_KM.any():
        distance_M: Floats = (target_M - shadow_KM.mean(0)) / math.sqrt(variance)
        return distance_M

    both_M = (ins_M > 0) & (outs_M > 0)
    found_M = np.where(both_M, mean_in_M - mean_out_M, 0.0)
    error_M = variance * (1 / np.maximum(ins_M, 1) + 1 / np.maximum(outs_M, 1))
    if both_M.any():
        lift = float(found_M[both_M].mean())
        # The variance of estimated lifts is that of the true lifts plus that of the errors.
        true_variance = max(0.0, float(((found_M - lift) ** 2 - error_M)[both_M].mean()))
    else:
        lift, true_variance = float(shadow_KM[in_KM].mean() - shadow_KM[~in_KM].mean()), 0.0
    trust_M = np.where(both_M, true_variance / (true_variance + error_M), 0.0)
    # Always above 0, so that the direction is never learned from the shadows.
    lift_M = np.maximum(lift + trust_M * (found_M - lift), LIFT_FLOOR * math.sqrt(variance))
    level_M = (shadow_KM - in_KM * lift_M).mean(0)
    ratio_M: Floats = lift_M * (target_M - level_M - lift_M / 2) / variance
    return ratio_M


def _mean(values_KM: Floats, counted_KM: Coins) -> Floats:
    """Mean over the counted entries of each column; 0 if a column has none."""
    result: Floats = np.where(counted_KM, values_KM, 0.0).sum(0) / np.maximum(counted_KM.sum(0), 1)
    return result


def one_canary_bound(
    once: Sequence[CanaryScores], shadows: ShadowScores, *, delta: float, alpha: float
) -> dict[str, Any]:
    """A lower bound on epsilon from the first candidate of group 1: one score of the target and one of each shadow.

    Guarantee:
        That of ``many_runs``: P[value > epsilon] <= alpha if every run draws its coins, sample and noise anew from one
        (epsilon, delta)-DP mechanism. The canary is the one with the smallest id, whatever the scores.
    """
    runs: dict[str, Any] = {"value": None, "ceiling": None, "alpha": alpha, "delta": delta}
    if not once:
        return {**runs, "reason": "no canary is inserted once"}
    first = min(once, key=lambda row: row.canary_id)
    column = shadows.canary_ids.index(first.canary_id)
    score_R = np.append(first.tuned_log_prob, shadows.log_prob_KM[:, column])
    coin_R = np.append(bool(first.inserted), shadows.coins_KM[:, column])
    having, lacking = int(coin_R.sum()), int((~coin_R).sum())
    runs |= {"canary_id": first.canary_id, "runs_with": having, "runs_without": lacking}
    if min(having, lacking) < 2:
        return {**runs, "reason": "it takes two runs with the canary and two without"}
    bound = many_runs(score_R[coin_R], score_R[~coin_R], delta=delta, alpha=alpha)
    # The bound if the score made no error; the first, third, fifth ... run of each kind chose the threshold.
    ceiling = epsilon_from_rates(Rates(having // 2, 0, 0, lacking // 2), delta=delta, alpha=alpha).value
    assumes = (
        "target and shadows are independent runs of one mechanism: same recipe and Plan, coins, sample and noise drawn anew; "
        f"{bound.assumes}; the number of shadows was not chosen by what they showed"
    )
    return {**runs, **asdict(bound), "assumes": assumes, "ceiling": ceiling}
