"""How far something is that takes long.

Comes in: from wherever work is done, what is being done and how much of it is. Goes out: the same, to whoever listens.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar

Listener = Callable[[str, int, int, str, bool], None]
"""Shows it: what, done, total, note, public of ``tell``."""
_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)


def tell(what: str, done: int = 0, total: int = 0, *, note: str = "", public: bool = False) -> None:
    """Says that ``done`` of ``total`` parts of something are done.

    Args:
        what: What is being done; the same words at each call.
        done: Parts.
        total: Of them; 0 where that is not known.
        note: What changes meanwhile.
        public: How long it takes follows from public values alone, so that a log may tell; else only a terminal does.
    """
    if (listener := _listener.get()) is not None:
        listener(what, done, total, note, public)


@contextlib.contextmanager
def heard_by(listener: Listener | None) -> Iterator[None]:
    """Whatever is told inside, in this thread, goes to ``listener``; to nobody, for None."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)
