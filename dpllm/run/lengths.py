"""Rows that do not fit into data.max_length: what is said of them before a run is charged.

Comes in: counts of rows that were cut or lost, which are private; a recipe. Goes out: a warning, on a terminal alone.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress

from rich.console import Console

from dpllm.errors import DpllmError
from dpllm.files import scratch
from dpllm.model.loading import load_tokenizer
from dpllm.recipe.config import RunConfig
from dpllm.run.screen import only_seen
from dpllm.text import data
from dpllm.text.data import Lengths
from dpllm.text.rows import each_row

SOME = 1000


def tell(lengths: Lengths, config: RunConfig, console: Console) -> None:
    """Warns of rows that are cut or lost; of private ones only where what is printed is seen and not kept."""
    words = lengths.told(config.data)
    if words and (config.data.public or only_seen(console)):
        console.print(f"Beware: {words}", markup=False, highlight=False, soft_wrap=True)


def tell_of_some(config: RunConfig, console: Console) -> None:
    """The same of about ``SOME`` rows, before there are tokens; nothing where the tokenizer or the data cannot be had."""
    if not (config.data.public or only_seen(console)):
        return
    with suppress(DpllmError), scratch() as folder:
        table, lengths = data.load_table(config.data.train, config.data, config.data.train_split, folder), Lengths()
        some = table.rows[:: max(1, len(table.rows) // SOME)]
        tokenizer = load_tokenizer(config.model)
        deque(data.iter_units(each_row(some), table.format, tokenizer, config.data, lengths=lengths), maxlen=0)
        tell(lengths, config, console)
