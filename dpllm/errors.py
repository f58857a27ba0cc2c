"""The errors of dpllm: each says what is wrong, why it matters, and what to type instead.

Comes in: nothing. Goes out: exceptions, each with the exit code of the command line.
"""

import importlib.util


class DpllmError(Exception):
    """Any error that a user can meet and fix; its message is shown as it is, without a traceback."""

    exit_code = 1


class ConfigError(DpllmError):
    """The command or the recipe is wrong."""

    exit_code = 2


class DataError(DpllmError):
    """The data cannot be used as declared; names files, rows and columns, never the text of a row."""

    exit_code = 2


class Refused(DpllmError):
    """A guard or the ledger's budget refuses, because a promise would be broken."""

    exit_code = 3

    def __init__(self, message: str, *, dataset: str = "", reason: str = "") -> None:
        """``dataset``: the account concerned; ``reason``: the code under which the ledger counts refusals."""
        super().__init__(message)
        self.dataset, self.reason = dataset, reason


class NotBatchInvariant(Refused):
    """A layer rounds a row differently in a batch than alone; training on one row at a time may work."""


class BudgetExceeded(Refused):
    """The run would spend more of a dataset's privacy budget than remains."""


class EndedElsewhere(DpllmError):
    """Another process of the run failed, and rank 0 has reported it; this one ends silently with the same exit code."""

    def __init__(self, exit_code: int) -> None:
        """``exit_code``: that of the process that failed."""
        super().__init__("another process of the run failed; rank 0 says why")
        self.exit_code = exit_code


class AuditContradiction(DpllmError):
    """An audit or a verification contradicts the stated guarantee."""

    exit_code = 4


class LedgerContradiction(DpllmError):
    """A chain of entries was edited, cut or reordered."""

    exit_code = 4


def need(package: str, key: str) -> None:
    """Raises a ConfigError if a key of the recipe needs a package that is not installed; imports nothing."""
    if importlib.util.find_spec(package) is None:
        raise ConfigError(f"{key} needs {package}, which is not installed. Type: pip install {package}")
