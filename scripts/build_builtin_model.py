"""Trains `builtin:tiny`: a Llama of 0.7 million parameters and its tokenizer, on public-style text.

    python scripts/build_builtin_model.py [--out dpllm/text/builtin/tiny] [--steps 1200] [--minutes 15]

In: the text of `_public_text.py` and fixed seeds; no file, no download, no private text. Out: a
directory that AutoModelForCausalLM and AutoTokenizer load offline, with a README that states the
loss reached. The run ends at `--steps` or `--minutes`, whichever comes first, and the learning rate
has decayed to zero by then either way. Only a run that ends at `--steps` can be repeated exactly.
"""

from __future__ import annotations

import argparse
import platform
import time
from itertools import islice
from pathlib import Path
from random import Random

import tokenizers
import torch
import transformers
from _public_text import documents
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SEED = 7
TOKENIZER_SEED, TRAIN_SEED, HELD_OUT_SEED = 11, 12, 13  # of the public text
TOKENIZER_DOCUMENTS, HELD_OUT_DOCUMENTS = 60_000, 512

VOCABULARY = 1024
BOS, EOS, PAD = "<s>", "</s>", "<pad>"
SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 320,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}

ROWS, ROW_LENGTH = 32, 128
PEAK_LEARNING_RATE, WARMUP_STEPS, WEIGHT_DECAY = 3e-3, 100, 0.1


def train_tokenizer() -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE in which each digit is a token of its own.

    With single digits a random number has the same number of tokens in every context, which the audits assume.
    The tokenizer adds neither BOS nor EOS: the code that builds rows decides.
    """
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),  # any byte, so any text
        show_progress=False,
    )
    bpe.train_from_iterator(islice(documents(TOKENIZER_SEED), TOKENIZER_DOCUMENTS), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
        model_max_length=SHAPE["max_position_embeddings"],
    )


def new_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """Returns the untrained model."""
    torch.manual_seed(SEED)
    return LlamaForCausalLM(
        LlamaConfig(
            **SHAPE,
            vocab_size=VOCABULARY,
            tie_word_embeddings=True,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def make_rows(tokenizer: PreTrainedTokenizerFast, count: int) -> torch.Tensor:
    """Packs documents, each closed by EOS, into rows of ROW_LENGTH tokens.

    Every row starts where a document starts, as rows do in fine-tuning, and half of them start with
    BOS, so that the model can be prompted with or without it. Text that does not fit is dropped.
    """
    rng, source = Random(SEED), documents(TRAIN_SEED)
    rows_BT: list[list[int]] = []
    while len(rows_BT) < count:
        row: list[int] = [tokenizer.bos_token_id] if rng.random() < 0.5 else []
        for encoding in tokenizer(list(islice(source, 400)))["input_ids"]:
            row += [*encoding, tokenizer.eos_token_id]
            if len(row) >= ROW_LENGTH:
                rows_BT.append(row[:ROW_LENGTH])
                row = [tokenizer.bos_token_id] if rng.random() < 0.5 else []
    return torch.tensor(rows_BT[:count])


def train(model: LlamaForCausalLM, rows_NT: torch.Tensor, minutes: float) -> int:
    """Makes one pass over the rows, or stops early when the minutes are over.

    Returns:
        The number of steps taken.
    """
    matrices = [p for p in model.parameters() if p.ndim == 2]
    norms = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": norms, "weight_decay": 0}],
        betas=(0.9, 0.95),
    )
    batches = rows_NT.split(ROWS)
    start = time.monotonic()
    for step, rows_BT in enumerate(batches):
        spent = max(step / len(batches), (time.monotonic() - start) / (60 * minutes))
        if spent >= 1:
            return step
        for group in optimizer.param_groups:
            group["lr"] = PEAK_LEARNING_RATE * min((step + 1) / WARMUP_STEPS, 1 - spent)
        logits_BTV = model(input_ids=rows_BT).logits
        loss = functional.cross_entropy(logits_BTV[:, :-1].flatten(0, 1), rows_BT[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 0:
            seconds = time.monotonic() - start
            print(f"step {step:5d}  loss {loss.item():.3f}  {seconds:5.0f} s", flush=True)
    return len(batches)


@torch.inference_mode()
def held_out_loss(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> float:
    """Returns the mean loss in nats per token on documents of another seed.

    Each document is scored separately, with EOS and without BOS; its first token is not scored.
    """
    texts = list(islice(documents(HELD_OUT_SEED), HELD_OUT_DOCUMENTS))
    total, tokens = 0.0, 0
    for start in range(0, len(texts), ROWS):
        rows = [[*ids, tokenizer.eos_token_id] for ids in tokenizer(texts[start : start + ROWS])["input_ids"]]
        longest = max(map(len, rows))
        # Padding is on the right, so no position of a document attends to it.
        ids_BT = torch.tensor([row + [tokenizer.pad_token_id] * (longest - len(row)) for row in rows])
        logits_BTV = model(input_ids=ids_BT).logits
        total += functional.cross_entropy(
            logits_BTV[:, :-1].flatten(0, 1),
            ids_BT[:, 1:].flatten(),
            ignore_index=tokenizer.pad_token_id,
            reduction="sum",
        ).item()
        tokens += sum(map(len, rows)) - len(rows)
    return total / tokens


def model_card(parameters: int, loss: float, steps: int, minutes: float, cpu_minutes: float) -> str:
    """Returns the README of the weights' directory."""
    tokens = steps * ROWS * ROW_LENGTH / 1e6
    return f"""---
license: apache-2.0
library_name: transformers
pipeline_tag: text-generation
language: en
---

# builtin:tiny

A Llama of {parameters:,} parameters with a byte-level BPE of {VOCABULARY:,} tokens:
{SHAPE["num_hidden_layers"]} layers, width {SHAPE["hidden_size"]}, tied embeddings, float32. It exists so that the
quickstart and the tests of dpllm can fine-tune and audit a real causal language model within a
minute on a laptop. It is good for nothing else.

| | |
|---|---|
| held-out loss | {loss:.3f} nats per token ({HELD_OUT_DOCUMENTS} documents) |
| training | {steps:,} steps, {tokens:.1f} million tokens, \
{cpu_minutes:.1f} CPU minutes ({minutes:.1f} by the clock) |
| hardware | 2 CPU cores |
| versions | Python {platform.python_version()}, torch {torch.__version__.split("+")[0]}, \
transformers {transformers.__version__}, tokenizers {tokenizers.__version__} |

## How it was made

    python scripts/build_builtin_model.py

The text comes from a grammar of our own (`scripts/_public_text.py`): weather, recipes, timetables,
shop notices, fables and the like, about invented people and places, with many random numbers, so
that random digits are close to equally likely. No text of a person and no downloaded text was used.
It shares no name, no sentence and no number of four or more digits with `builtin:clinic`.

The tokenizer splits every number into single digits, gives any text back unchanged, and adds no
special token by itself: `{BOS}` starts half of the training rows, `{EOS}` ends each document,
`{PAD}` only pads.

## Licence

Apache-2.0
"""


def main() -> None:
    """Trains, measures and saves."""
    default = Path(__file__).resolve().parent.parent / "dpllm" / "text" / "builtin" / "tiny"
    parser = argparse.ArgumentParser(description="Train the embedded language model.")
    parser.add_argument("--out", type=Path, default=default, help="directory to write")
    parser.add_argument("--steps", type=int, default=1200, help="steps to take at most")
    parser.add_argument("--minutes", type=float, default=15.0, help="minutes to train at most")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads; 1 if cores are shared")
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    tokenizer = train_tokenizer()
    model = new_model(tokenizer)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    rows_NT = make_rows(tokenizer, options.steps * ROWS)
    print(f"{parameters:,} parameters, {rows_NT.numel():,} tokens", flush=True)

    start, cpu_start = time.monotonic(), time.process_time()
    steps = train(model, rows_NT, options.minutes)
    minutes, cpu_minutes = (time.monotonic() - start) / 60, (time.process_time() - cpu_start) / 60
    loss = held_out_loss(model.eval(), tokenizer)
    print(f"{steps} steps in {minutes:.1f} minutes, held-out loss {loss:.3f} nats per token")

    model.save_pretrained(options.out)
    (options.out / "model.safetensors").chmod(0o644)  # save_pretrained sets mode 0600
    tokenizer.save_pretrained(options.out)
    card = model_card(parameters, loss, steps, minutes, cpu_minutes)
    (options.out / "README.md").write_text(card, encoding="utf-8")


if __name__ == "__main__":
    main()
