"""Shadow runs: the recipe of a finished run, trained again with other coins, so that an audit can see what coins change.

Comes in: a run directory and its canaries. Goes out: K runs under private/shadows/, their scores, and a report. A shadow has
the same canaries and Plan; its coins, sample and noise are drawn anew. Each is trained by ``train`` like any run, one after
the other in this process.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from rich.console import Console

from dpllm import ledger
from dpllm.auditing import attacks
from dpllm.auditing.scores import score_canaries
from dpllm.auditing.table import CanaryScores, by_group
from dpllm.canaries import canaries
from dpllm.canaries.canaries import CanaryPlan
from dpllm.errors import ConfigError, DpllmError, Refused
from dpllm.lab.shadow_attacks import ShadowScores, summarise_shadows
from dpllm.model import loading
from dpllm.recipe.config import RunConfig, dump_config
from dpllm.run import checkpoint
from dpllm.run.directory import RunDir
from dpllm.run.loop import train
from dpllm.run.promise import read_subject
from dpllm.statement.run_files import read_plan, read_run

MECHANISM = ("event", "delta", "dataset_size", "expected_batch_size", "max_grad_norm", "clipping", "adaptive")
"""Of plan.json: what two runs of one recipe and one mechanism have in common, beside the coefficients of banded noise."""
SAME = 1e-5  # up to which a coefficient is the same: processors round the search for it differently, by about 1e-7


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
    whole_rows = any(row.tuned_left is not None for row in table)
    scores = score_shadows(train_shadows(run, config, plan, num_shadows, console), version=2 if whole_rows else 1)
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
            f"{run.root}: the run did not complete, or lost steps in a crash, so no shadow of its recipe would be like it. "
            "Audit it without --shadows, or train it again."
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
                "together they would show more of it than the promise of one run covers, and no exception of the ledger permits "
                "them. Audit without --shadows, or set data.public: true if it is public and train again.",
                dataset=policy.dataset,
                reason="no_privacy",
            )
        registered = book.records.of_account(record.ledger.dataset) if book and record.ledger else None
        if registered and policy.records and policy.records.digest not in registered:
            raise ConfigError(
                f"{run.root}: data.train no longer holds the records that the run was trained on, so its shadows would be runs "
                "of another mechanism. Put the file of that time back, or train again."
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
                    f"shadow {number} of {num_shadows} was interrupted, so it cannot be compared with. Type the same command "
                    "again: the shadows before it are kept, and it is started over."
                )
            console.print(f"Shadow {number} of {num_shadows}: trained")
    for shadow in runs if config.privacy.enabled else ():
        _same_mechanism(run, shadow)
    return runs


def score_shadows(runs: Sequence[RunDir], version: int = 1) -> ShadowScores:
    """Scores the canaries under each of K completed shadows of one run, one model at a time, by a version of the score."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tables, coins = [], []
    for shadow in runs:
        config, plan = shadow.load_config(), canaries.load(shadow.canaries)
        assert config.data.format != "auto"  # training writes the format that it found
        models = loading.load_for_scoring(config, shadow.export, device)
        own = score_canaries(models, plan, config.data.format, config.data.max_length, config.data.long_examples)
        tables.append(attacks.of_version(*own, version))
        coins.append([canary.inserted for canary in plan.canaries])
    ids, count = tuple(row.canary_id for row in tables[0]), len(coins[0])  # candidates stand before references
    log_prob = np.array([[row.tuned_log_prob for row in table] for table in tables])
    num_tokens = np.array([row.num_tokens for row in tables[0]])
    return ShadowScores(
        canary_ids=ids[:count],
        coins_KM=np.array(coins, dtype=np.bool_),
        log_prob_KM=log_prob[:, :count],
        num_tokens_M=num_tokens[:count],
        reference_ids=ids[count:],
        references_KQ=log_prob[:, count:],
        reference_tokens_Q=num_tokens[count:],
    )


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
            [(one.canary_id, one.group, one.carrier, one.secret) for one in (*which.canaries, *which.references)]
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
            f"{shadow.root}: its Plan has another {changed[0]} than that of {run.root}, so they are runs of different mechanisms "
            f"and comparing them would show nothing. Train the run again, or remove {shadow.root.parent}."
        )
