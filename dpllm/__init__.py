"""dpllm: fine-tune causal language models with differential privacy, audit them, publish the card.

The Python interface. Nothing heavy is imported before it is used:

    recipe = dpllm.load_recipe("recipes/smoke/clinic.yaml", {"privacy.epsilon": 3})
    print(dpllm.plan(recipe))           # the promise, without weights
    run = dpllm.train(recipe)
    run.epsilon, run.delta, run.status, run.export_dir
    report = dpllm.audit(run)
    dpllm.write_card(run)
    dpllm.verify(run.export_dir)
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Mapping, Sequence
from copy import deepcopy
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from dpllm.errors import ConfigError

if TYPE_CHECKING:
    from transformers import TrainerCallback

    from dpllm.comparison.compare import Comparison
    from dpllm.ledger import Ledger as Ledger
    from dpllm.privacy.schedule import TokenSequence as TokenSequence
    from dpllm.privacy.schedule import Unit as Unit
    from dpllm.recipe.config import RunConfig
    from dpllm.releases.quality import Tell
    from dpllm.run.directory import Run
    from dpllm.run.own_loop import Engine as Engine
    from dpllm.run.own_loop import promise as promise
    from dpllm.run.promise import Decision
    from dpllm.statement.audit import AuditRecord
    from dpllm.text.prompts import Sample
    from dpllm.verification.values import Verification

    Recipe: TypeAlias = str | os.PathLike[str] | Mapping[str, Any] | RunConfig

__version__ = "0.2.0"
# bitsandbytes up to 0.50.2 warns at each import that it has no kernel for 4-bit weights on a CPU; its other warnings stay.
logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(lambda record: "gemm_4bit_forward" not in str(record.msg))
__all__ = [
    "Engine",
    "Ledger",
    "TokenSequence",
    "Unit",
    "__version__",
    "audit",
    "compare",
    "generate",
    "load_recipe",
    "plan",
    "promise",
    "synthesize",
    "train",
    "verify",
    "write_card",
]

_LAZY = {
    "Engine": ("dpllm.run.own_loop", "Engine"),
    "Ledger": ("dpllm.ledger", "Ledger"),
    "TokenSequence": ("dpllm.privacy.schedule", "TokenSequence"),
    "Unit": ("dpllm.privacy.schedule", "Unit"),
    "promise": ("dpllm.run.own_loop", "promise"),
    "builtin": ("dpllm.text.builtin", None),
}
"""Name -> module and attribute; published cards name ``builtin``."""


def __getattr__(name: str) -> Any:
    """Imports heavy names on first use, so that ``import dpllm`` stays quick."""
    if name not in _LAZY:
        raise AttributeError(f"module 'dpllm' has no attribute {name!r}")
    module, attribute = _LAZY[name]
    imported = import_module(module)
    return imported if attribute is None else getattr(imported, attribute)


def load_recipe(recipe: Recipe, overrides: Mapping[str, Any] | None = None) -> RunConfig:
    """Reads a recipe.

    Args:
        recipe: A YAML file, a dict of its sections, or a recipe that is already read.
        overrides: Dotted key -> value, as in ``{"privacy.epsilon": 3}``.

    Raises:
        ConfigError: A key is unknown, or a value is not allowed.
    """
    from dpllm.recipe.config import RunConfig, load_config, make_config

    if isinstance(recipe, str | os.PathLike):
        return load_config(os.fspath(recipe), dict(overrides or {}))
    if isinstance(recipe, RunConfig):
        return make_config(recipe.model_dump(mode="json"), overrides, "recipe") if overrides else recipe
    if isinstance(recipe, Mapping):
        return make_config(deepcopy(dict(recipe)), overrides, "recipe")
    raise ConfigError(
        f"a recipe is a YAML file, a dict or what dpllm.load_recipe returns, and a {type(recipe).__name__} was given. Type "
        'dpllm.load_recipe("recipe.yaml", {"privacy.epsilon": 3}).'
    )


def _with_rows(recipe: Recipe, folder: Path | None = None, resume: bool = False, **rows: Any) -> RunConfig:
    """The recipe after writing in-memory rows to files in ``folder``, which it reads; None: OUTPUT_DIR-rows.

    With ``resume``, the files of the resumed run are used if they contain these rows.
    """
    in_memory = {name: table for name, table in rows.items() if table is not None}
    if not in_memory:
        return load_recipe(recipe)
    from dpllm.recipe.config import RunConfig
    from dpllm.recipe.section import read_recipe

    raw = read_recipe(Path(recipe)) if isinstance(recipe, str | os.PathLike) else recipe
    raw = raw.model_dump(mode="json") if isinstance(raw, RunConfig) else raw
    section = raw.get("data") if isinstance(raw, Mapping) else None
    changes: dict[str, Any] = {f"data.{name}": "rows.jsonl" for name in in_memory}
    for name in in_memory:  # the recipe declares its own file public, not these rows
        if isinstance(section, Mapping) and section.get(name) is not None:
            changes["data.public" if name == "train" else "data.eval_public"] = False
    config = load_recipe(raw, changes)
    if config.privacy.dataset is None and "train" in in_memory:
        raise ConfigError(
            "train: rows in memory have no name under which the ledger could keep their budget. Set "
            'privacy.dataset, as in {"privacy": {"dataset": "clinic_notes", ...}}; use the same name for the same people.'
        )
    from dpllm.text.in_memory import write_rows

    data, root = config.data, Path(config.output_dir)
    named = {data.unit, *data.control, *filter(None, data.columns.values())}
    target = folder or Path(f"{root}-rows")
    previous = root / "config.yaml"
    before = load_recipe(previous).data if resume and previous.exists() else None
    paths = {}
    for name, table in in_memory.items():
        file = Path(path) if isinstance(path := getattr(before, name, None), str) else None
        paths[f"data.{name}"] = str(write_rows(table, named, target, name, file))
    return config.changed(paths)


def plan(recipe: Recipe, *, train: Any = None, eval: Any = None) -> Decision:
    """The guarantee that a run of a recipe would have, and all reasons to refuse it; reads no weights and charges nothing.

    Args:
        recipe: See ``load_recipe``.
        train: Rows in place of data.train; see ``train``.
        eval: Rows in place of data.eval.

    Returns:
        The decision: ``plan``, ``schedule``, ``ledger``, ``refusals``; it prints as a few lines.
    """
    from dpllm.files import scratch
    from dpllm.run.promise import Start, decide

    with scratch() as folder:  # removes the copy of the rows
        return decide(_with_rows(recipe, folder, train=train, eval=eval), Start())


def train(
    recipe: Recipe,
    *,
    train: Any = None,
    eval: Any = None,
    callbacks: Sequence[TrainerCallback] = (),
    resume: bool = False,
    overwrite: bool = False,
) -> Run:
    """Runs a recipe from data to export/; works in a notebook too.

    Args:
        recipe: See ``load_recipe``.
        train: Rows in place of data.train: a list of dicts, a pandas DataFrame or a datasets.Dataset. They are written to a file
            in OUTPUT_DIR-rows, which only you can read, for resuming and auditing; delete it afterwards. They are private, unless
            the recipe is a dict without data.train that declares data.public.
        eval: Rows in place of data.eval.
        callbacks: Callbacks of transformers' Trainer. They are called when training begins and ends and after each step, see
            what the step released, and may stop the run by ``control.should_training_stop``.
        resume: Continue the interrupted run in ``output_dir``.
        overwrite: Replace the run in ``output_dir``. What it spent stays in the ledger.

    Returns:
        The run; look at its ``status``.

    Raises:
        ConfigError: The recipe or the data cannot be used.
        Refused: A guard or the ledger's budget refuses.
    """
    from dpllm.run import loop
    from dpllm.run.directory import Run, RunDir
    from dpllm.run.promise import Start

    config = _with_rows(recipe, resume=resume, train=train, eval=eval)
    record = loop.train(config, Start(resume, overwrite), callbacks=callbacks)
    return Run(RunDir(Path(config.output_dir)), record, config)


def audit(run: Run | str | os.PathLike[str]) -> AuditRecord:
    """Audits a finished run by its canaries; see ``dpllm audit``.

    Args:
        run: A run, or its directory.

    Returns:
        The audit; its ``to_json()`` is the content of audit.json. A falsified claim is reported in ``verdict``, not raised.

    Raises:
        ConfigError: The recipe has no canaries, or the run has no weights.
    """
    from dpllm.auditing.run import audit as attack

    return attack(_directory(run))


def compare(
    runs: Sequence[Run | str | os.PathLike[str]], output: str | os.PathLike[str] | None = None, *, public: bool = False
) -> Comparison:
    """Compares runs: their figures as ``values``, and a ``table()``.

    Args:
        runs: Two or more runs, or their directories.
        output: Directory for table and picture; None: a default, as for ``dpllm compare``.
        public: Leave out figures that may not be published.

    Raises:
        ConfigError: The runs cannot be compared.
    """
    from dpllm.comparison.compare import compare as side_by_side

    return side_by_side([_directory(run) for run in runs], Path(output) if output else None, public=public)


def write_card(run: Run | str | os.PathLike[str]) -> Path:
    """Writes the model card of a run and returns the path of ``export/README.md``.

    Raises:
        ConfigError: The run was refused, or its files are damaged.
        Refused: ``verify`` would fail; nothing was changed.
    """
    from dpllm.card.card import write_card as write
    from dpllm.verification.verify import undone_unless_verified

    with undone_unless_verified(_directory(run).root):
        return write(_directory(run))


def verify(
    path: Run | str | os.PathLike[str], *, ledger: str | None = None, public_key: str | os.PathLike[str] | None = None
) -> Verification:
    """Recomputes what a run or an export states; imports no torch.

    Args:
        path: A run, a run directory, or an export.
        ledger: A ledger's file, an export of one, or a PostgreSQL URL.
        public_key: PEM file of the author's key, for a signed card.

    Returns:
        ``checks``, each verified, asserted or failed.
    """
    from dpllm.verification.verify import verify as check

    return check(_directory(path).root, ledger=ledger, public_key=Path(public_key) if public_key else None)


def generate(
    run: Run | str | os.PathLike[str], prompts: str | Sequence[str] | None = None, num: int = 1, **settings: Any
) -> list[Sample]:
    """Samples text from a tuned model; post-processing, which costs no privacy.

    Args:
        run: A run, its directory or export, or what ``dpllm merge`` wrote.
        prompts: One prompt or several; None: texts are written from their beginning.
        num: Texts for each prompt.
        settings: ``max_new_tokens``, ``temperature``, ``top_p``, ``seed``.

    Raises:
        ConfigError: There is no model, or its base cannot be found.
    """
    from dpllm.publish.generate import load, sample

    return sample(load(_directory(run).root), [prompts] if isinstance(prompts, str) else prompts, num, **settings)


def synthesize(
    source: Any,
    rows: int,
    output: str | os.PathLike[str] | None = None,
    *,
    by: str = "training",
    quality: bool = True,
    **settings: Any,
) -> Path:
    """Writes a data set and returns its folder: with a tuned model, at no privacy cost, or by private inference, at a cost.

    Args:
        source: A run with its card, or its directory; by inference a recipe (see ``load_recipe``), the value of data.train, or
            rows as ``train`` takes them, which are private and are written to a file in OUTPUT-private for resuming.
        rows: Number of rows; by inference the maximum.
        output: A new folder; None: ``synthetic`` in the run directory, or by inference in the working directory.
        by: ``training`` or ``inference``.
        quality: Whether to measure the rows: figures that may be published are on their card, the others in the run's private/,
            or in OUTPUT-private. Warns about figures that cannot be measured.
        settings: Further options of the command with _ for -, as ``max_new_tokens``: fields of ``SynthesisRequest``, or by
            inference of ``InferenceRequest``, ``model``, ``unit`` and keys of a recipe, as ``**{"data.control": [...]}``.

    Raises:
        ConfigError: There is no card, the settings allow no text, the folder is not empty, or too few texts passed the filters.
        BudgetExceeded: The budget does not allow rows by inference; nothing is spent.
        Refused: The run has no guarantee and its data are not public; or the model is not batch-invariant.
    """
    if by not in ("training", "inference"):
        raise ConfigError(f"by: is {by!r}. Type training or inference.")

    def not_measured(line: str) -> None:
        warnings.warn(f"not measured: {line}", stacklevel=5)

    tell = not_measured if quality else None
    folder = Path(output) if output else None
    if by == "inference":
        return _infer(source, folder or Path("synthetic"), tell, {"rows": rows, **settings})
    from dpllm.publish.synthesize import SynthesisRequest
    from dpllm.publish.synthesize import synthesize as write
    from dpllm.releases.draft import request_of

    request = request_of(SynthesisRequest, "training", {"rows": rows, **settings})
    return write(_directory(source), request, folder, not_measured=tell)


def _infer(source: Any, output: Path, tell: Tell | None, settings: dict[str, Any]) -> Path:
    from dpllm.recipe.config import OF_MODEL, RunConfig, around
    from dpllm.releases.draft import request_of
    from dpllm.releases.inference import infer, private_of
    from dpllm.releases.inference_budget import InferenceRequest

    keys = {OF_MODEL.get(name, name): value for name, value in settings.items() if name in OF_MODEL or "." in name}
    options = {name: value for name, value in settings.items() if OF_MODEL.get(name, name) not in keys}
    if isinstance(source, RunConfig | Mapping):
        config = load_recipe(source, keys)
    elif isinstance(source, str | os.PathLike):
        config = around(os.fspath(source), keys, "dpllm.synthesize")
    else:
        config = _with_rows(around("rows", keys, "dpllm.synthesize"), private_of(output), train=source)
    return infer(config, request_of(InferenceRequest, "inference", options), output, not_measured=tell)


def _directory(run: Any) -> Any:
    from dpllm.run.directory import Run, RunDir

    return run.directory if isinstance(run, Run) else RunDir(Path(run))
