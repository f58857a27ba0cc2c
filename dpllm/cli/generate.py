"""``dpllm generate``: sample text from a tuned model."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

NOTE = (
    "dpllm generate: sampling is post-processing and spends no further budget, however much is sampled; text that you put into "
    "a prompt is not covered by the guarantee."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``dpllm generate``."""
    parser.add_argument("run", help="run directory, its export, or a merged model")
    given = parser.add_mutually_exclusive_group()
    given.add_argument("--prompt", metavar="TEXT", help="what the model continues (a user's turn, for a chat model)")
    given.add_argument("--prompts", metavar="FILE", help="jsonl file with a prompt, or messages, on each line")
    parser.add_argument("--num", type=int, default=8, help="texts for each prompt (default: 8)")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="longest text, in tokens (default: 64)")
    parser.add_argument("--temperature", type=float, default=1.0, help="0: the likeliest token each time (default: 1)")
    parser.add_argument("--top-p", type=float, default=1.0, help="share of probability to sample from (default: 1)")
    parser.add_argument("--seed", type=int, help="the same seed gives the same texts")
    parser.add_argument("--chat", action=argparse.BooleanOptionalAction, help="whether prompts are a user's turns")
    parser.add_argument("--base", metavar="MODEL", help="base model of an adapter that lies elsewhere than it says")
    parser.add_argument("--json", action="store_true", help="one JSON object")


def run(known: argparse.Namespace, rest: list[str]) -> int:
    """Prints the samples; on standard error, what they cost and what they may hold."""
    from dpllm.publish.generate import load, read_prompts, sample

    prompts = read_prompts(Path(known.prompts)) if known.prompts else [known.prompt] if known.prompt else None
    generator = load(Path(known.run), base=known.base, chat=known.chat)
    if generator.unprotected is None:
        print(NOTE, file=sys.stderr)
    else:
        reason = " ".join(generator.unprotected.split())
        print(
            f"dpllm generate: no differential privacy guarantee ({reason}): what is printed may repeat training text.",
            file=sys.stderr,
        )
    found = sample(
        generator,
        prompts,
        known.num,
        max_new_tokens=known.max_new_tokens,
        temperature=known.temperature,
        top_p=known.top_p,
        seed=known.seed,
    )
    if known.json:
        print(json.dumps({"seed": known.seed, "samples": [asdict(one) for one in found]}, ensure_ascii=False, indent=2))
        return 0
    several = prompts is not None and len(prompts) > 1
    for number, one in enumerate(found):
        of = f"prompt {one.number + 1}, " if several else ""
        print(f"--- {of}sample {number % known.num + 1}\n{_printable(one.text)}")
    return 0


def _printable(text: str) -> str:
    """Without control characters: what a model writes must not steer a terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)
