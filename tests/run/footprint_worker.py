"""The peak memory of one real logical step of a model with random weights: run in a process of its own.

Its passes are full of rows of full length, but the last, which has as many rows as a pass may have: each holds a gradient.

Arguments: a directory with config.json, rows of a pass, tokens of a row, passes, lora or frozen. Prints bytes.
"""

import re
import sys
from pathlib import Path
from typing import Any


def kept(name: str) -> int:
    """Bytes, as the kernel counts them: VmRSS now, VmHWM at the peak."""
    return 1024 * int(re.search(rf"{name}:\s+(\d+)", Path("/proc/self/status").read_text())[1])  # type: ignore[index]


def main(folder: str, rows: int, tokens: int, count: int, method: str) -> int:
    import tiny_models as tm
    import torch
    import transformers

    from dpllm.model import adapters, memory
    from dpllm.privacy.engine import StepEngine
    from dpllm.privacy.noise import GaussianNoise
    from dpllm.privacy.packing import passes_of
    from dpllm.privacy.schedule import TokenSequence, Unit
    from dpllm.run.promise import plan_of

    torch.manual_seed(0)
    adapter = {"method": "lora", "r": 16} if method == "lora" else {"method": "frozen", "last_blocks": 2}
    train = {"batch_size": rows * count, "tokens_per_pass": rows * tokens + 1, "steps": 1}
    privacy = {"noise_multiplier": 1.0, "epsilon": 1e6}
    model = {"name_or_path": folder}
    config = tm.recipe(model=model, adapter=adapter, data={"max_length": tokens}, privacy=privacy, train=train)
    before = kept("VmRSS")
    base = transformers.AutoConfig.from_pretrained(folder)
    net: Any = transformers.AutoModelForCausalLM.from_config(base, dtype=torch.float32)
    net.requires_grad_(False)
    net = adapters.attach(net, config).train()
    plan = plan_of(config, 100 * rows * count)
    trains = [p for p in net.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trains, lr=1e-6)
    noise = GaussianNoise(7, torch.device("cpu"))
    packing = memory.packing_for(config, net, base.vocab_size, torch.device("cpu"))
    engine = StepEngine(net, optimizer, plan.schedule, plan, packing, noise=noise)
    generator = torch.Generator().manual_seed(1)

    def unit(tokens: int) -> Unit:
        ids = torch.randint(0, base.vocab_size, (tokens,), generator=generator).tolist()
        return Unit((TokenSequence(tuple(ids), (False,) + (True,) * (tokens - 1), tokens - 1),))

    long = [unit(tokens) for _ in range(rows * count)]
    many = [unit(packing.room // packing.most_units) for _ in range(packing.most_units)]
    passes = [some for units in (long, many) for some in passes_of(range(len(units)), units, packing, 0)]
    assert [some.num_units for some in passes] == [*[rows] * count, packing.most_units]
    engine.step(passes)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    engine.step(passes)
    return kept("VmHWM") - before


if __name__ == "__main__":
    print(main(sys.argv[1], *map(int, sys.argv[2:5]), sys.argv[5]))
