"""What becomes of rows that do not fit into data.max_length: counts, which are private, and what is said of them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from dpllm.errors import DataError
from dpllm.recipe.config import DataConfig


@dataclass
class Lengths:
    """Counts of texts (rows, or answers of pairs) and of units."""

    texts: int = 0
    lost: int = 0  # of which nothing is learned
    short: int = 0  # these, and those that lost their end
    full: int = 0  # units with a text that fills max_length, cut or not

    def add(self, texts: Collection[tuple[int, bool]], data: DataConfig) -> None:
        """One unit more: the tokens of each of its texts, and whether any is learned."""
        cut = data.max_length if data.long_examples == "truncate" else float("inf")
        self.texts += len(texts)
        self.lost += sum(not learned for _, learned in texts)
        self.short += sum(tokens > cut or not learned for tokens, learned in texts)
        self.full += any(tokens >= data.max_length for tokens, _ in texts)

    def check(self, data: DataConfig) -> None:
        """Refuses, with a DataError, texts of which nothing is learned. The operator alone hears of it: no record, no ledger."""
        if self.texts and self.lost == self.texts:
            raise DataError(f"data.train: a run would be charged for nothing, because {self.told(data)}")

    def told(self, data: DataConfig) -> str:
        """What a terminal alone may say where more than half of the texts are lost or cut; else nothing."""
        if 2 * self.short <= self.texts:
            return ""
        many = "no row has" if self.lost == self.texts else "more than half of the rows have not"
        what = (
            "a token left to learn" if 2 * self.lost > self.texts else "all their tokens, of which the ends are cut off"
        )
        return (
            f"{many} {what}: a prompt alone fills data.max_length ({data.max_length} tokens), a row is longer, or no turn is the "
            "assistant's. Raise data.max_length, shorten the rows, or set data.long_examples: chunk."
        )
