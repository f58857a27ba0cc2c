"""Files for the node exporter's textfile collector: which there are, and how they are written.

Comes in: values. Goes out: ``.prom`` files. The collector refuses everything where one series stands in two files, so each
file holds what no other does: one for each model's run, one for each dataset, one for the ledger.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
import threading
from collections.abc import Iterable
from pathlib import Path

from prometheus_client.core import Metric

from dpllm.config import RunConfig
from dpllm.errors import ConfigError, DpllmError
from dpllm.ledger import Ledger
from dpllm.rundir import RunDir
from dpllm.telemetry.ledger import dataset_families, ledger_families, read
from dpllm.telemetry.metrics import exposition, run_families
from dpllm.telemetry.record import of_record

LEDGER = "dpllm-ledger.prom"


def check(directory: str, run: RunDir) -> Path:
    """Makes sure that metrics can be written where the recipe says.

    Raises:
        ConfigError: No directory, not writable, or a part of the run directory that a new run replaces.
    """
    path = Path(directory)
    if any(path.resolve().is_relative_to(part.resolve()) for part in (run.private, run.export)):
        raise ConfigError(
            f"telemetry.textfile {directory} lies in a part of the run directory that a new run replaces, or that is published. "
            "Set it to the directory that the node exporter reads."
        )
    if not path.is_dir():
        raise ConfigError(
            f"telemetry.textfile {directory}: no such directory, so nobody would read the metrics. Make it, or set it to "
            "the directory that the node exporter reads."
        )
    if not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError(
            f"telemetry.textfile {directory}: cannot be written to, so there would be no metrics. Ask for write access, or set "
            "another directory."
        )
    return path


def run_file(directory: Path, model: str) -> Path:
    """The file of a run; runs of one name share it, because their series do."""
    return directory / f"dpllm-run-{_slug(model)}.prom"


def dataset_file(directory: Path, dataset: str) -> Path:
    """The file of a dataset's account."""
    return directory / f"dpllm-dataset-{_slug(dataset)}.prom"


def _slug(name: str) -> str:
    """A name as a part of a file name, different for different names."""
    return f"{re.sub(r'[^A-Za-z0-9._-]+', '_', name)[:80]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def write(path: Path, families: Iterable[Metric]) -> None:
    """Writes a file atomically, readable by everyone: the collector runs as another user.

    Raises:
        OSError: The disk refuses.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        with open(temporary, "wb") as file:
            file.write(exposition(families))
            os.fchmod(file.fileno(), 0o644)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_ledger(directory: Path, book: Ledger) -> None:
    """Writes the ledger's file, and those of its datasets.

    Args:
        directory: That of the collector.
        book: An open ledger.

    Raises:
        OSError: The disk refuses.
        DpllmError: The ledger cannot be read.
    """
    ledger, accounts = read(book)
    write(directory / LEDGER, ledger_families(ledger))
    for account in accounts:
        write(dataset_file(directory, account.dataset), dataset_families(account))


def ledger_text(book: Ledger) -> str:
    """All metrics of a ledger in Prometheus' exposition format.

    Raises:
        DpllmError: It cannot be read.
    """
    ledger, accounts = read(book)
    return exposition([*ledger_families(ledger), *dataset_families(*accounts)]).decode("utf-8")


def publish_audit(run: RunDir, config: RunConfig) -> None:
    """After an audit: the run's file, with what the audit published. A failure is told, and ends nothing.

    Args:
        run: An audited run. An audit that stayed in private/ is left out.
        config: Its recipe; without a directory nothing is written.
    """
    if not config.telemetry.textfile:
        return
    try:
        values = of_record(run, config)
        write(run_file(Path(config.telemetry.textfile), values.model), run_families(values))
    except (OSError, DpllmError) as error:
        tell(error)


def tell(error: Exception) -> None:
    """One line on standard error."""
    why = error.strerror if isinstance(error, OSError) else str(error)
    print(f"dpllm: metrics could not be written ({why or type(error).__name__}); all else goes on.", file=sys.stderr)
