"""Merges a run's adapter into its base model: plain transformers weights for servers that do not support adapters.

Comes in: a finished run directory with its card. Goes out: a directory of safetensors, tokenizer, the same card and the same
privacy statement for the new files. Must not read training text or anything in ``private/``, nor state another epsilon:
merging reads only released files.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import ModulesToSaveWrapper

from dpllm.card import card
from dpllm.errors import ConfigError, Refused
from dpllm.files import BLOCK, CARD, UNHASHED, hashes, keep_publishable, read_json, whole_directory
from dpllm.model import loading
from dpllm.recipe.config import LoraConfig, RunConfig
from dpllm.run.base_model import of_base, same_base
from dpllm.run.directory import Run, RunDir, open_run
from dpllm.statement import privacy_record
from dpllm.statement.privacy_record import PrivacyRecord

SHARD = "5GB"
TOLERANCE = {torch.float32: 1e-4, torch.float16: 0.1, torch.bfloat16: 0.1}  # RMS error of logits over their deviation


def merge(run: RunDir, output: Path | None = None) -> Path:
    """Writes a run's base model with its adapter merged in.

    Args:
        run: A finished run that trained an adapter, with its card.
        output: Directory; None: ``merged`` in the run directory. A merged model that is already there is replaced.

    Returns:
        The directory. Weights have the dtype in which the recipe loads the base, or else that of its checkpoint.

    Raises:
        ConfigError: There is no such run or no card, its files have changed, it trained whole layers, or the output
            directory holds other files.
        Refused: The base model is quantised, its own privacy statement changed since the run, or the merged model computes
            other logits.

    Guarantee:
        The guarantee of the run, unchanged: the output is a function of the released adapter and of public files
        (post-processing; Dwork and Roth 2014, "The Algorithmic Foundations of Differential Privacy", proposition 2.1).
    """
    opened, statement = carded(run)
    config, output = opened.config, output or run.root / "merged"
    if not isinstance(config.adapter, LoraConfig):
        raise ConfigError(
            f"{run.root}: trained whole layers, so there is no adapter to merge: {run.export} already is a plain transformers "
            f"model. Use {run.export} as it is."
        )
    _check_output(run, output)
    # Pin the commit of the base model that the run used.
    pinned = config.changed({"model.revision": opened.record.model.commit or config.model.revision})
    base = of_base(pinned.changed({"model.adapter": None}))
    if statement.lineage and not same_base(base, statement.lineage):
        raise Refused(
            f"model.name_or_path {config.model.name_or_path}: is not the base model that the run was trained on (its privacy "
            "block differs), so merging would give a model that nobody trained. Restore the original base."
        )
    with whole_directory(output) as part:
        merge_weights(pinned, run.export, part)
        _write_statement(opened, statement, part)
    return output


def carded(run: RunDir) -> tuple[Run, PrivacyRecord]:
    """Opens a run whose files have not changed, and reads its privacy statement.

    Raises:
        ConfigError: Files have changed, there is no card, or the card is older than the latest audit.
    """
    opened = open_run(run, released=True)
    if not all((run.export / name).exists() for name in (BLOCK, CARD)):
        raise ConfigError(
            f"{run.export}: has no card yet, which says what is promised. Type dpllm card {run.root} first."
        )
    statement = privacy_record.read(read_json(run.export / BLOCK))
    if statement.files != hashes(run.export, UNHASHED):
        raise ConfigError(
            f"{run.export}: its card was written before what lies there now, such as an audit. Type dpllm card {run.root} again."
        )
    return opened, statement


def _check_output(run: RunDir, output: Path) -> None:
    run.outside(output)
    if not output.exists():
        return
    merged_from = (output / BLOCK).is_file() and read_json(output / BLOCK).get("merged_from")
    if not merged_from and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(
            f"{output}: already holds files that dpllm merge did not write and that would be lost. Type another --output."
        )


def merge_weights(config: RunConfig, adapter: Path, output: Path) -> None:
    """Merges an adapter into its base model, writes the result, and compares its logits with those of base and adapter.

    Raises:
        Refused: The base is quantised, or the written model computes other logits than base and adapter.
    """
    model = config.model
    stored = transformers.AutoConfig.from_pretrained(
        loading.source(model.name_or_path), revision=model.revision, trust_remote_code=False
    )
    if model.quantization is not None or getattr(stored, "quantization_config", None) is not None:
        raise Refused(
            f"{model.name_or_path}: is quantised, so an adapter cannot be added to its weights exactly, and one that was trained "
            "on it fits no others. Serve base and adapter together, as the card's Use says."
        )
    dtypes = {dtype: name for name, dtype in loading.DTYPES.items()}
    dtype = loading.DTYPES.get(model.dtype, stored.dtype if stored.dtype in dtypes else torch.float32)
    base = loading.load_base(model.changed({"dtype": dtypes[dtype]}), torch.device("cpu"))
    tuned: Any = PeftModel.from_pretrained(base, str(adapter)).eval()
    probe_BT = torch.randint(
        base.config.get_text_config().vocab_size, (2, 16), generator=torch.Generator().manual_seed(0)
    )
    with torch.inference_mode():
        before = tuned(input_ids=probe_BT).logits.float()
    _untie(tuned)
    merged = tuned.merge_and_unload(safe_merge=True)
    merged.save_pretrained(output, max_shard_size=SHARD)
    del base, tuned, merged  # before the written model is loaded: one copy in memory at a time
    written = transformers.AutoModelForCausalLM.from_pretrained(output, dtype=dtype, trust_remote_code=False).eval()
    with torch.inference_mode():
        after = written(input_ids=probe_BT).logits.float()
    error = float((after - before).square().mean().sqrt() / before.std().clamp_min(1e-12))
    if not error <= TOLERANCE[dtype]:
        raise Refused(
            f"{config.model.name_or_path}: the merged model's logits differ from those of base and adapter (by {error:.1e} of "
            "their spread), so its card would be about another model. Nothing was written; serve base and adapter together, as "
            "the card's Use says, and report the architecture."
        )


def _untie(tuned: Any) -> None:
    """Unties head and input embedding if either of them was tuned.

    Merging changes a weight in place, so a tied weight would change in both layers.
    """
    ends = (tuned.get_input_embeddings(), tuned.get_output_embeddings())
    settings = tuned.config.get_text_config()
    if not settings.tie_word_embeddings or None in ends:
        return
    if not any(isinstance(end, BaseTunerLayer | ModulesToSaveWrapper) for end in ends):
        return
    head = ends[1].get_base_layer() if isinstance(ends[1], BaseTunerLayer) else ends[1]
    if not isinstance(head, ModulesToSaveWrapper):  # a wrapper has its own copy of the weights
        head.weight = torch.nn.Parameter(head.weight.detach().clone(), requires_grad=False)
    settings.tie_word_embeddings = tuned.config.tie_word_embeddings = False


def _write_statement(run: Run, statement: PrivacyRecord, output: Path) -> None:
    """Writes tokenizer, audit, card, and the privacy statement with the hashes of the new files."""
    adapter = {name for name in statement.files if Path(name).name.startswith("adapter_")}
    for name in statement.files.keys() - adapter:
        (output / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(run.export_dir / name, output / name)
    keep_publishable(output)
    merged_from = privacy_record.MergedFrom(files={name: statement.files[name] for name in sorted(adapter)})
    merged = statement.model_copy(update={"merged_from": merged_from})
    for name, text in card.pages(run.config, run.record, merged, hashes(output, UNHASHED)).items():
        (output / name).write_text(text, encoding="utf-8", newline="\n")
