"""Statistics of private data that were released: what describe.json holds, and the same beside a run on its card.

Comes in: JSON. Goes out: typed records, and a release in words. Must not know how one is drawn or checked.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from dpllm.privacy.events import Composed, compose
from dpllm.statement.fields import AtLeast1, Between0And1, NotNegative, Number, Record, Share, Text
from dpllm.statement.stored_events import PureDP


class Declared(Record):
    """What was declared for it, and not read from the data."""

    values: tuple[Text, ...] | None = None
    """Values that are counted; others count as "other"."""
    numbers: tuple[Number, ...] | None = None
    """Candidates of a quantile, or the bounds of a mean."""
    quantile: Share | None = None
    """Which quantile."""


class Release(Record):
    """One statistic, released once."""

    statistic: Text
    """What it is, in words."""
    declared: Declared
    mechanism: Text
    """What drew it; by OpenDP."""
    event: PureDP
    """What it costs, with a delta of 0: by OpenDP's privacy map."""
    error_95: NotNegative
    """With 95% probability it errs by at most this, by its mechanism's theorem."""
    error_of: Text
    """What that counts."""
    value: dict[Text, Number] | None
    """What was drawn: noisy counts by value, the candidate chosen, or a mean with its 95% interval and the rows; null before."""
    entry: Text | None
    """Its entry in the ledger; null before it was drawn."""

    def words(self) -> str:
        """The value and its 95% error, for people; shares are computed of the noisy counts."""
        value, error = self.value, f"± {self.error_95:,.3g} {self.error_of}"
        if value is None:
            return error
        if "mean" in value:
            return f"{value['mean']:.4g} ({value['low']:.4g} to {value['high']:.4g})"
        if self.declared.values is None:
            return f"{next(iter(value.values())):,g} ({error})"
        total = max(1, sum(max(0, count) for count in value.values()))
        found = [(name, value[name]) for name in (*self.declared.values, "other")]
        parts = [f"{name} {count:,} = {max(0, count) / total:.1%}" for name, count in found]
        return f"{', '.join(parts)} ({error})"


class Statistics(Record):
    """All that one call of dpllm describe released."""

    dataset: Text
    """Name of the data in the ledger: the account that was charged."""
    unit: Text
    """Whom the guarantee protects: example (one row), or the column that says whose row it is."""
    max_examples_per_unit: AtLeast1
    """Most rows of one unit that were looked at."""
    neighbouring_relation: Literal["zero_out", "add_or_remove_one"]
    """How two datasets differ between which the guarantee holds."""
    epsilon: NotNegative
    """Of all releases together, by PLD."""
    delta: Between0And1
    """At which that is stated; each release alone has none."""
    date: Annotated[str, Field(pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}$")]
    """Day of the releases, in UTC."""
    software: dict[Text, str]
    """Versions of dpllm and OpenDP."""
    releases: Annotated[tuple[Release, ...], Field(min_length=1, max_length=1000)]
    """Each statistic, declared, mechanism, event (of type pure_dp), error_95, error_of, value and entry in the ledger."""

    def event(self) -> Composed:
        """All releases as one accounting event."""
        return compose([release.event for release in self.releases])

    @property
    def drawn(self) -> bool:
        """Whether everything was released, and this is no dry run."""
        return all(one.value is not None and one.entry is not None for one in self.releases)


class BesideRun(Statistics):
    """What was released about the training data; absent where the author names nothing."""

    with_run: NotNegative | None
    """Epsilon of the run and these releases together, at the run's delta; null where the run gives no guarantee."""
