"""Drawing many texts at a time against one prompt at a time, printed as JSON.

python scripts/bench_synthesize.py [--rows 32] [--tokens 96] [--repeats 5] > FILE

The embedded model with a new adapter, as ``dpllm synthesize`` draws it: the same prompts (control codes of four kinds of visit),
the same number of tokens for each text, in turns in one process. Medians of wall-clock time. The bar: 5 times as fast.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from _machine import commit, machine
from peft import LoraConfig, get_peft_model

from dpllm.model import loading, processes
from dpllm.publish import generate
from dpllm.recipe.config import ModelConfig
from dpllm.text import layouts

BAR = 5.0
VISITS = ("clinic", "home", "phone", "urgent")


def model(folder: Path) -> generate.Generator:
    """Loads the embedded model with a new adapter like an export; no text ends early, so that all have equal lengths."""
    wanted = ModelConfig(name_or_path="builtin:tiny")
    tuned = get_peft_model(loading.load_base(wanted, torch.device("cpu")), LoraConfig(task_type="CAUSAL_LM", r=8))
    tuned.save_pretrained(folder)
    loading.load_tokenizer(wanted).save_pretrained(folder)
    loaded = generate.load(folder, base="builtin:tiny")
    head = loaded.model.get_output_embeddings()
    end = loaded.tokenizer.eos_token_id
    head.register_forward_hook(lambda module, inputs, output: output.index_fill(-1, torch.tensor([end]), -1e9))
    return loaded


def main() -> None:
    """Measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    prompts = [layouts.code_line(["visit"], [VISITS[row % len(VISITS)]]) for row in range(options.rows)]
    seconds: dict[str, list[float]] = {"together": [], "one at a time": []}
    with tempfile.TemporaryDirectory() as folder:
        generator = model(Path(folder))

        def draw(prompts: list[str], seed: int) -> None:
            generate.sample(generator, prompts, 1, max_new_tokens=options.tokens, seed=seed)

        draw(prompts[:2], 0)
        for repeat in range(options.repeats):
            began = time.perf_counter()
            draw(prompts, repeat)
            seconds["together"].append(time.perf_counter() - began)
            began = time.perf_counter()
            for number, prompt in enumerate(prompts):
                draw([prompt], number)
            seconds["one at a time"].append(time.perf_counter() - began)
    median = {name: statistics.median(values) for name, values in seconds.items()}
    faster = median["one at a time"] / median["together"]
    results = {
        "rows": options.rows,
        "tokens": options.tokens,
        "seconds": seconds,
        "rows_per_second": {name: options.rows / value for name, value in median.items()},
        "times_as_fast": faster,
        "bar": BAR,
        "met": faster >= BAR,
        "commit": commit(),
        "machine": machine(),
        "hardware": processes.hardware(),
        "versions": processes.versions(),
    }
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
