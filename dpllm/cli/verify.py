"""``dpllm verify``: recompute every number that a card states.

Comes in: arguments. Goes out: one line for each check. A Hub id is downloaded to a temporary directory first; nothing else
uses the network.
"""

from __future__ import annotations

import argparse
import re
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from dpllm.errors import AuditContradiction, ConfigError

if TYPE_CHECKING:
    from dpllm.verification.verify import Verification

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of ``dpllm verify``."""
    parser.add_argument("path", help="run directory, export directory, or Hub id (a path that exists comes first)")
    parser.add_argument(
        "--ledger",
        metavar="FILE",
        help="a ledger, an export of one, or a postgresql:// URL (default: what the run names)",
    )
    parser.add_argument("--signers", metavar="FILE", help="allowed signers, as ssh-keygen(1) describes them")
    parser.add_argument("--revision", help="of a Hub id: branch, tag or commit")
    parser.add_argument("--json", action="store_true", help="print the checks as one JSON object")


def run(known: argparse.Namespace, rest: list[str]) -> int:
    """Prints every check; exit code 4 where one failed."""
    from dpllm.verification.verify import as_json, verify

    with ExitStack() as stack:
        path = Path(known.path)
        if not path.exists() and _HUB_ID.fullmatch(known.path):
            path = _download(known.path, known.revision, Path(stack.enter_context(TemporaryDirectory())))
            if not any((path / name).is_file() for name in ("README.md", "privacy.json")):
                raise ConfigError(
                    f"{known.path}: has no card at its top, where weights are loaded from, so nothing can be verified. Ask its "
                    "author to publish with dpllm push."
                )
        elif known.revision is not None:
            raise ConfigError(f"--revision {known.revision}: {known.path} is no Hub id. Leave it out.")
        signers = Path(known.signers) if known.signers else None
        found = verify(path, ledger=known.ledger, signers=signers)
    if known.json:
        print(as_json(found))
    else:
        print(as_text(found))
    if found.failed:
        names = ", ".join(check.name for check in found.checks if check.status == "failed")
        raise AuditContradiction(f"{known.path}: does not verify ({names}). Do not rely on its card.")
    return 0


def as_text(found: Verification) -> str:
    """One line for each check, and how many there are of each kind."""
    lines = [f"{check.status:<8}  {check.name}: {check.detail}" for check in found.checks]
    counts = found.to_json()["counts"]
    lines.append(f"{counts['verified']} verified, {counts['asserted']} asserted, {counts['failed']} failed")
    return "\n".join(lines)


def _download(repository: str, revision: str | None, directory: Path) -> Path:
    """A snapshot of a model on the Hub.

    Raises:
        ConfigError: There is none, or it is private and nobody is logged in.
        DpllmError: The Hub cannot be reached.
    """
    try:
        from huggingface_hub import snapshot_download

        from dpllm.publish import hub
    except ImportError:
        raise ConfigError(
            f"{repository}: no such path here, and huggingface_hub, which would download it, is not installed. Type pip install "
            "huggingface_hub, or a local path."
        ) from None
    with hub.asking(repository):
        snapshot_download(repository, revision=revision, local_dir=directory, endpoint=hub.endpoint())
    return directory
