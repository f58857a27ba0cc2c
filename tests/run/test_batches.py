"""What a step brings: the quantile is Binomial's."""

from hypothesis import given, settings
from hypothesis import strategies as st

from dpllm.cli.plan import largest_batch
from dpllm.privacy.schedule import Schedule


@settings(derandomize=True, deadline=None, max_examples=50)
@given(size=st.integers(2, 5000), data=st.data())
def test_the_largest_batch_is_exceeded_once_in_a_thousand_steps_at_most(size: int, data: st.DataObject) -> None:
    from scipy import stats

    batch = data.draw(st.integers(1, size))
    largest = largest_batch(Schedule(size, 0, batch, batch / size, 10))
    tail = stats.binom(size, batch / size)
    assert tail.sf(largest) <= 1e-3 + 1e-12
    assert largest == 0 or tail.sf(largest - 1) > 1e-3 - 1e-12


def test_the_smoke_recipe_by_hand() -> None:
    assert largest_batch(Schedule(3790, 600, 128, 128 / 3790, 60)) == 164
