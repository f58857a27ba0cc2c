"""Progress of long tasks.

Comes in: a task's name, parts done and total. Goes out: the same, to the current listener.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar

Listener = Callable[[str, int, int, str, bool], None]
"""Shows progress; its arguments are what, done, total, note and public of ``tell``."""
_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)


def tell(what: str, done: int = 0, total: int = 0, *, note: str = "", public: bool = False) -> None:
    """Reports that ``done`` of ``total`` parts of a task are done.

    Args:
        what: The task; the same text at each call.
        done: Number of finished parts.
        total: Number of parts; 0 if unknown.
        note: Text that changes from call to call.
        public: Whether the duration depends on public values alone, so a log may show it; otherwise only a terminal does.
    """
    if (listener := _listener.get()) is not None:
        listener(what, done, total, note, public)


@contextlib.contextmanager
def heard_by(listener: Listener | None) -> Iterator[None]:
    """Sends progress reported inside the block, in this thread, to ``listener``; None discards it."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)
