"""A step has a deadline, and what lies between two steps has none; ranks that fail are in tests/distributed."""

import time

from dpllm.run.failures import StepDeadline


def test_a_step_has_its_time_and_what_lies_between_has_as_much_as_it_wants() -> None:
    watch = StepDeadline(0.02)
    assert watch.overdue() is None
    watch.step(3)
    assert watch.overdue() is None
    time.sleep(0.05)
    assert watch.overdue() == "step 3"
    watch.rest()
    assert watch.overdue() is None
