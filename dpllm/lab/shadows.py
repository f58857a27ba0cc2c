"""Shadow runs: the recipe of a finished run, trained again with other coins, so that an audit can see what coins change.

Comes in: a run directory and its canaries. Goes out: K runs under private/shadows/, and a report: LiRA and RMIA, higher = more
likely a member, group by group, and a lower bound on epsilon from one score of each run. A shadow has the same canaries and
Plan; its coins, sample and noise are drawn anew. Each is trained by ``train`` like any run, one after the other in this process.

Shape suffixes: K shadows, M candidates, Q references, R runs: the target and its shadows.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from rich.console import Console

from dpllm import ledger
from dpllm.auditing import attacks
from dpllm.auditing.rates import Rates, epsilon_from_rates, many_runs
from dpllm.auditing.scores import score_canaries
from dpllm.auditing.statistics import Floats
from dpllm.auditing.summary import CONFIDENCE, separation
from dpllm.auditing.table import CanaryScores, by_group
from dpllm.canaries import canaries
from dpllm.canaries.canaries import CanaryPlan
from dpllm.errors import ConfigError, DpllmError, Refused
from dpllm.model import loading
from dpllm.recipe.config import RunConfig, dump_config
from dpllm.run import checkpoint
from dpllm.run.directory import RunDir
from dpllm.run.loop import train
from dpllm.run.promise import read_subject
from dpllm.statement.run_files import read_plan, read_run

MECHANISM = ("event", "delta", "dataset_size", "expected_batch_size", "max_grad_norm", "clipping")
"""Of plan.json: what two runs of one recipe and one mechanism have in common, beside the coefficients of banded noise."""
SAME = 1e-5  # up to which a coefficient is the same: processors round the search for it differently, by about 1e-7


@dataclass(frozen=True)
class ShadowScores:
    """What K shadow runs say about the canaries of the target. Log-probabilities are sums over a secret, in nats."""

    canary_ids: tuple[str, ...]  # of the M candidates
    coins_KM: attacks.Coins  # whether the shadow's own coin said in
    log_prob_KM: Floats
    reference_ids: tuple[str, ...]  # of the Q references, which no run was trained on
    references_KQ: Floats


def audit_shadows(
    run: RunDir,
    config: RunConfig,
    plan: CanaryPlan,
    table: Sequence[CanaryScores],
    delta: float,
    *,
    num_shadows: int,
    console: Console,
) -> dict[str, Any]:
    """Trains what is missing of K shadows of a completed run, scores them, and says what they show about the run.

    Config, plan and table are the run's recipe, canaries and scores; delta is the claim's; console takes a line a shadow.

    Raises:
        ConfigError, Refused: See ``may_train``; or a shadow's Plan is not the run's.
        DpllmError: A shadow was interrupted.
    """
    scores = score_shadows(train_shadows(run, config, plan, num_shadows, console))
    return summarise_shadows(by_group(table), scores, delta=delta, alpha=config.audit.alpha)


def may_train(run: RunDir, config: RunConfig) -> None:
    """Makes sure that shadows of a run may be trained at all.

    Every shadow is one more run on data.train that nobody planned for, and together they show more of it than the promise of
    one run covers. So the data have to be public.

    Raises:
        ConfigError: The run is not complete, lost steps, or the data are other ones by now.
        Refused: The data are not declared public, or have a budget.
    """
    record = read_run(run)
    if record.status != "completed" or record.resumes:
        raise ConfigError(
            f"{run.root}: the run did not complete, or lost steps in a crash, so shadow runs of its recipe would not be "
            "comparable. Audit it without --shadows, or train it again."
        )
    policy = read_subject(_changed(config, data={"eval": None, "eval_public": False}), run.private / "cache").policy
    assert policy is not None
    book = ledger.open_ledger(config.privacy.ledger, create=False)
    with contextlib.ExitStack() as held:
        if book:
            held.enter_context(book)
            held.enter_context(book.counting())
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
                f"{run.root}: data.train no longer holds the records that the run was trained on, so its shadows would be runs "
                "of another mechanism. Restore the file, or train again."
            )


def train_shadows(
    run: RunDir, config: RunConfig, plan: CanaryPlan, num_shadows: int, console: Console
) -> tuple[RunDir, ...]:
    """Trains what is missing of the first K shadows of a run; what is finished stays, what is not is started over.

    Guarantee:
        The coins of each shadow are drawn by ``canaries.redraw_coins`` before it is trained. Nothing is booked in the ledger
        of the run: the shadows have one of their own.
    """
    may_train(run, config)
    folder = RunDir(run.private / "shadows")
    folder.root.mkdir(mode=0o700, exist_ok=True)
    runs = tuple(RunDir(folder.root / f"{index:02d}") for index in range(num_shadows))
    with folder.locked():
        for number, shadow in enumerate(runs, start=1):
            recipe = _recipe(run, config, shadow)
            if _finished(shadow, recipe, plan):
                console.print(f"Shadow {number} of {num_shadows}: trained earlier")
                continue
            shutil.rmtree(shadow.root, ignore_errors=True)
            shadow.root.mkdir(mode=0o700)
            shadow.private.mkdir(mode=0o700)
            canaries.save(canaries.redraw_coins(plan), shadow.canaries)
            if train(recipe, console=Console(quiet=True)).status != "completed":
                raise DpllmError(
                    f"shadow {number} of {num_shadows} was interrupted. Type the same command again: earlier shadows are kept, "
                    "and this one starts over."
                )
            console.print(f"Shadow {number} of {num_shadows}: trained")
    for shadow in runs if config.privacy.enabled else ():
        _same_mechanism(run, shadow)
    return runs


def score_shadows(runs: Sequence[RunDir]) -> ShadowScores:
    """Scores the canaries under each of K completed shadows of one run, one model at a time."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tables, coins = [], []
    for shadow in runs:
        config, plan = shadow.load_config(), canaries.load(shadow.canaries)
        assert config.data.format != "auto"  # training writes the format that it found
        models = loading.load_for_scoring(config, shadow.export, device)
        own = score_canaries(models, plan, config.data.format, config.data)
        tables.append(attacks.of_whole_rows(*own))
        coins.append([canary.inserted for canary in plan.canaries])
    ids, count = tuple(row.canary_id for row in tables[0]), len(coins[0])  # candidates stand before references
    scores, coins_KM = np.array([attacks.loss(table) for table in tables]), np.array(coins, dtype=np.bool_)
    return ShadowScores(ids[:count], coins_KM, scores[:, :count], ids[count:], scores[:, count:])


def _recipe(run: RunDir, config: RunConfig, shadow: RunDir) -> RunConfig:
    """The run's recipe, with the noise that its Plan found, without what is measured or saved on the way."""
    privacy: dict[str, Any] = {
        "insecure_seed": None,  # or all shadows would have the same noise
        "ledger": str(shadow.root.parent / "ledger.sqlite"),
        "derived_from": None,  # that ledger knows no parent
    }
    if config.privacy.enabled:
        promise = read_plan(run)
        privacy |= {"noise_multiplier": promise.noise_multiplier, "delta": promise.delta}
        if config.privacy.noise == "banded":
            privacy["bands"] = max(1, len(promise.coefficients))  # which auto found, and need not find here
    return _changed(
        config,
        data={"eval": None, "eval_public": False},
        privacy=privacy,
        train={"eval_every": None, "checkpoint_every": None, "sample_prompts": None, "sample_every": None},
        telemetry={"textfile": None, "port": None, "trackers": []},
    ).model_copy(update={"output_dir": str(shadow.root)})


def _changed(config: RunConfig, **sections: dict[str, Any]) -> RunConfig:
    return config.model_copy(
        update={name: getattr(config, name).model_copy(update=values) for name, values in sections.items()}
    )


def _finished(shadow: RunDir, recipe: RunConfig, plan: CanaryPlan) -> bool:
    """Whether this very recipe was trained to its end with these canaries, and its weights are those that it exported."""
    with contextlib.suppress(ConfigError):
        record = read_run(shadow)
        planned, trained = (
            [(one.canary_id, one.group, one.text) for one in (*which.canaries, *which.references)]
            for which in (plan, canaries.load(shadow.canaries))
        )
        moved = _changed(shadow.load_config(), privacy={"ledger": recipe.privacy.ledger})
        moved = moved.model_copy(update={"output_dir": recipe.output_dir})  # however the run's path is typed today
        return bool(
            record.status == "completed"
            and dump_config(moved) == dump_config(recipe)
            and trained == planned
            and (weights := checkpoint.weight_hashes(shadow.export))
            and weights.items() <= record.artifacts.items()
        )
    return False


def _same_mechanism(run: RunDir, shadow: RunDir) -> None:
    mine, other = read_plan(run).to_json(), read_plan(shadow).to_json()
    changed = [key for key in MECHANISM if mine.get(key) != other.get(key)]
    pairs = zip_longest(mine.get("coefficients", ()), other.get("coefficients", ()), fillvalue=0.0)
    changed += ["coefficients"] if any(abs(one - two) > SAME for one, two in pairs) else []
    if changed:
        raise ConfigError(
            f"{shadow.root}: its Plan has another {changed[0]} than that of {run.root}, so they are runs of different "
            f"mechanisms and cannot be compared. Train the run again, or remove {shadow.root.parent}."
        )


# What they show. Scores do not depend on the target's coins, which only sort them afterwards.


def shadow_scores(
    candidates: Sequence[CanaryScores], references: Sequence[CanaryScores], shadows: ShadowScores
) -> dict[str, Floats]:
    """Every attack on candidates of one group, which are repeated equally often.

    Returns:
        Scores by name, shape (M,), higher = more likely a member. ratio: what needs no shadow, to compare with.
        rmia_base: RMIA with the base model as the only out model. rmia_offline: with the shadows that lack the candidate.
        rmia_online: with those that have it too.
    """
    own_M = [shadows.canary_ids.index(row.canary_id) for row in candidates]
    coins_KM, log_prob_KM = shadows.coins_KM[:, own_M], shadows.log_prob_KM[:, own_M]
    place = {row.canary_id: row for row in references}
    known = [place[canary_id] for canary_id in shadows.reference_ids]
    # All runs read the same texts, so that a text has as many tokens in a shadow as in the target.
    tokens_M, tokens_Q = (np.array([row.num_tokens for row in side]) for side in (candidates, known))
    tuned_M, tuned_Q = attacks.loss(candidates) / tokens_M, attacks.loss(known) / tokens_Q
    in_M, out_M, lift = attacks.sides(log_prob_KM / tokens_M, coins_KM)
    references_KQ = shadows.references_KQ / tokens_Q
    out_Q = attacks.log_mean(references_KQ, np.ones(references_KQ.shape, dtype=np.bool_))
    return {
        "ratio": attacks.ratio(candidates),
        "rmia_base": attacks.rmia_base(candidates, references),
        "rmia_offline": attacks.rmia(tuned_M, attacks.average_offline(out_M), tuned_Q, attacks.average_offline(out_Q)),
        # p(x) = (p_in + p_out) / 2, whose half cancels. No model saw a reference; what it would have gained is the candidates'
        # lift, or their scales would differ.
        "rmia_online": attacks.rmia(tuned_M, np.logaddexp(in_M, out_M), tuned_Q, np.logaddexp(out_Q + lift, out_Q)),
        "lira": attacks.lira(attacks.ratio(candidates), log_prob_KM - attacks.base_loss(candidates), coins_KM),
    }


def summarise_shadows(
    groups: Mapping[int, Sequence[CanaryScores]], shadows: ShadowScores, *, delta: float, alpha: float
) -> dict[str, Any]:
    """What follows from shadows of the target whose table by repetitions these groups are, JSON-ready.

    Of each attack the held-out candidates are the negatives, for only they differ from the others by nothing but a coin.
    """
    tested: dict[str, Any] = {}
    for group, rows in ((group, rows) for group, rows in groups.items() if group):
        in_M = np.array([bool(row.inserted) for row in rows])
        scores = shadow_scores(rows, groups[0], shadows)
        positives = int(in_M.sum())
        shared = {"group": group, "positives": positives, "negatives": len(rows) - positives, "confidence": CONFIDENCE}
        tested[str(group)] = {
            name: {**shared, **separation(found_M[in_M], found_M[~in_M])} for name, found_M in scores.items()
        }
    many = one_canary_bound(groups.get(1, []), shadows, delta=delta, alpha=alpha)
    return {"shadows": len(shadows.coins_KM), "attacks": tested, "many_runs": many}


def one_canary_bound(
    once: Sequence[CanaryScores], shadows: ShadowScores, *, delta: float, alpha: float
) -> dict[str, Any]:
    """A lower bound on epsilon from the first candidate that is inserted once: one score of the target, one of each shadow.

    Guarantee:
        That of ``rates.many_runs``: P[value > epsilon] <= alpha if every run draws its coins, sample and noise anew from one
        (epsilon, delta)-DP mechanism. The canary is the one with the smallest id, whatever the scores.
    """
    runs: dict[str, Any] = {"value": None, "ceiling": None, "alpha": alpha, "delta": delta}
    if not once:
        return {**runs, "reason": "no canary is inserted once"}
    first = min(once, key=lambda row: row.canary_id)
    own = shadows.canary_ids.index(first.canary_id)
    score_R = np.append(first.tuned_log_prob, shadows.log_prob_KM[:, own])
    coin_R = np.append(bool(first.inserted), shadows.coins_KM[:, own])
    having, lacking = int(coin_R.sum()), int((~coin_R).sum())
    runs |= {"canary_id": first.canary_id, "runs_with": having, "runs_without": lacking}
    if min(having, lacking) < 2:
        return {**runs, "reason": "it takes two runs with the canary and two without"}
    bound = many_runs(score_R[coin_R], score_R[~coin_R], delta=delta, alpha=alpha)
    # If the score told them apart without an error; of each kind the first, third, fifth ... chose the threshold.
    ceiling = epsilon_from_rates(Rates(having // 2, 0, 0, lacking // 2), delta=delta, alpha=alpha).value
    assumes = (
        "target and shadows are independent runs of one mechanism: same recipe and Plan, coins, sample and noise drawn anew; "
        f"{bound.assumes}; the number of shadows was not chosen by what they showed"
    )
    return {**runs, **asdict(bound), "assumes": assumes, "ceiling": ceiling}
