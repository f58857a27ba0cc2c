"""Publishes export/ or a synthetic data set on the Hugging Face Hub, after all checks have passed.

Comes in: a run directory or the folder of a data set, and the name of a repository. Goes out: a commit with exactly the verified
files. Must not upload anything outside that folder or use the network before all checks have passed.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, cast

from huggingface_hub import CommitOperationAdd, DatasetInfo, HfApi, ModelInfo, constants
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

from dpllm.card.synthetic import MODEL_BLOCK, RECORD, ROWS, Synthetic, run_of
from dpllm.errors import ConfigError, DpllmError, Refused
from dpllm.files import BLOCK, CARD, UNHASHED, read_json, sha256
from dpllm.releases import leaks
from dpllm.run.directory import RunDir, open_run
from dpllm.statement import privacy_record
from dpllm.statement.privacy_record import PrivacyRecord
from dpllm.verification.check_rows import OF_MODEL
from dpllm.verification.verify import insist

# The base class of all connection errors: of httpx in huggingface_hub 1, of httpx2 in 2.
_ON_THE_WAY = cast(type[Exception], HfHubHTTPError.__bases__[0])
_UNKNOWN = (401, 403, 404)
_AT_ONCE = 16 * 2**20
_OF_THE_HUB = frozenset({".gitattributes"})


@dataclass(frozen=True)
class Upload:
    """One file of an upload."""

    path: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Push:
    """An upload, or the plan of one for a dry run.

    Attributes:
        repository: Its name on the Hub.
        files: All of export/, or of the data set.
        url: URL of the commit; None for a dry run.
        unsearched: A sentence for each file that could not be searched for private text.
    """

    repository: str
    files: tuple[Upload, ...]
    url: str | None = None
    unsearched: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Source:
    """The source of an upload.

    Attributes:
        folder: The folder with all files of the upload.
        root: The directory that is verified.
        run: The run that trained the model, or the model that wrote the data set; None if it is not on this machine.
        kind: Kind of the repository on the Hub.
    """

    folder: Path
    root: Path
    run: RunDir | None
    kind: Literal["model", "dataset"]


def push(
    path: Path,
    repository: str,
    *,
    dry_run: bool = False,
    private: bool = False,
    without_guarantee: bool = False,
    ledger: str | None = None,
) -> Push:
    """Uploads export/ of a run, or a data set, and nothing else.

    Args:
        path: A finished run with its card, or the folder of a synthetic data set.
        repository: NAME or OWNER/NAME; created if it does not exist. HF_ENDPOINT and HF_TOKEN are honoured.
        dry_run: List the files without using the network.
        private: Create a private repository; an existing public one is refused.
        without_guarantee: Publish a run without a guarantee although its data are not declared public.
        ledger: Current location of the ledger, if it differs from the recipe's.

    Raises:
        Refused: There is no card, a check fails, a file contains private text, the run is not in its ledger, it gives no
            guarantee, or the repository holds other files or is public.
        ConfigError: There is no such run, or the name is not valid.
        DpllmError: The Hub cannot be reached, or refuses.
    """
    with hub_errors(repository):
        validate_repo_id(repository)
    run = RunDir(path)
    source = _Source(run.export, path, run, "model")
    if (path / RECORD).exists():
        source = _Source(path, path, run_of(path), "dataset")
    statement = _statement(source, ledger, without_guarantee)
    try:
        files = _files(source, statement)
        unsearched = _search(source, statement, [file.path for file in files])
    except OSError as error:
        raise Refused(
            f"{error.filename}: cannot be read any more ({error.strerror}), so it was not searched for private text. Restore it, "
            "and type the command again."
        ) from None
    planned = Push(repository, files, unsearched=tuple(unsearched))
    return planned if dry_run else _upload(source, planned, private=private)


def _statement(source: _Source, ledger: str | None, without_guarantee: bool) -> PrivacyRecord:
    """Returns the privacy statement after all checks of the upload have passed."""
    if ledger is None and source.run:
        configured = open_run(source.run).config.privacy.ledger  # the publisher set it
        ledger = configured if configured and "://" in configured else None
    checks = insist(source.root, ledger).checks
    statement = privacy_record.read(read_json(source.folder / (MODEL_BLOCK if source.kind == "dataset" else BLOCK)))
    if statement.plan is not None and statement.composed is None:
        raise Refused(
            f"{source.root}: is in no ledger, so its privacy cost cannot be added to that of other runs on the same data. Set "
            "privacy.ledger and train again."
        )
    verified = {check.name.removeprefix(OF_MODEL) for check in checks if check.status == "verified"}
    if statement.plan is not None and statement.composed and not {"ledger", "ledger: entry"} <= verified:
        raise Refused(
            f"{source.root}: is entry {statement.composed.entry} of a ledger that is not here, so the total on its card cannot "
            "be checked. Type --ledger FILE, or an export of it."
        )
    if not statement.guarantee and not statement.data_public and not without_guarantee:
        raise Refused(
            f"{source.root}: gives no differential privacy guarantee ({statement.reason}), so it may reveal training text to "
            "anyone who downloads it, and that cannot be undone. Declare data.public: true and train again if everybody may "
            "read that text, or type --without-guarantee."
        )
    return statement


def _files(source: _Source, statement: PrivacyRecord) -> tuple[Upload, ...]:
    """All verified files with their verified hashes; the upload refuses other content."""
    stated = Synthetic.checked(read_json(source.folder / RECORD)).files if source.kind == "dataset" else statement.files
    unlisted = {CARD, RECORD} if source.kind == "dataset" else UNHASHED
    paths = {name: source.folder / name for name in unlisted}
    hashes = stated | {name: sha256(path, follow=False) for name, path in paths.items() if path.exists()}
    return tuple(Upload(name, (source.folder / name).stat().st_size, hashes[name]) for name in sorted(hashes))


def _search(source: _Source, statement: PrivacyRecord, names: list[str]) -> list[str]:
    if source.run is None:
        return ["private text: the run directory is not here, so it could not be searched for."]
    lines = leaks.search(source.run, [name for name in names if name != ROWS], source.folder)
    if source.kind == "dataset":
        lines += leaks.in_rows(source.run, source.folder / ROWS, statement)
    return lines


def _upload(source: _Source, planned: Push, *, private: bool) -> Push:
    api = HfApi(endpoint=endpoint())
    with hub_errors(planned.repository):
        name = str(
            api.create_repo(planned.repository, repo_type=source.kind, private=private or None, exist_ok=True).repo_id
        )
        info = api.dataset_info(name) if source.kind == "dataset" else api.model_info(name)
        _check_repository(info, name, planned.files, private=private)
        operations = []
        for file in planned.files:
            path = source.folder / file.path
            # A small file is sent from memory, as hashed here; for a large file the Hub accepts only content with this hash.
            added = CommitOperationAdd(file.path, path.read_bytes() if file.size <= _AT_ONCE else str(path))
            if added.upload_info.sha256.hex() != file.sha256:
                raise Refused(
                    f"{source.folder}: {file.path} changed while it was being checked. Type the command again."
                )
            operations.append(added)
        with warnings.catch_warnings():
            # huggingface_hub mistakes the audit's table of tokens for a data set.
            warnings.filterwarnings("ignore", message="It seems that you are about to commit a data file")
            done = api.create_commit(name, operations, commit_message="Upload with dpllm push", repo_type=source.kind)
    return replace(planned, repository=name, url=str(done.commit_url))


def _check_repository(info: ModelInfo | DatasetInfo, name: str, files: tuple[Upload, ...], *, private: bool) -> None:
    """Refuses a public repository under ``private``, and a repository that holds files outside the upload."""
    if private and info.private is False:
        raise Refused(
            f"{name}: exists and is public, and --private cannot change that. Name another repository, or make that one private "
            "in its settings first."
        )
    own_files = {file.path for file in files} | _OF_THE_HUB
    if foreign := sorted(entry.rfilename for entry in info.siblings or () if entry.rfilename not in own_files):
        raise Refused(
            f"{name}: already holds other files ({', '.join(foreign[:3])}), which the card does not cover, so it would not "
            "verify there. Name another repository, or remove them with hf repo-files delete."
        )


def endpoint() -> str:
    """The address of the Hub: HF_ENDPOINT, or the public one."""
    return os.environ.get("HF_ENDPOINT") or str(constants.ENDPOINT)


@contextmanager
def hub_errors(repository: str) -> Iterator[None]:
    """Turns every error of the Hub inside the block into a one-line message.

    Args:
        repository: Name in the message.

    Raises:
        ConfigError: The Hub rejects the name, or the repository does not exist or may not be read.
        DpllmError: The Hub cannot be reached, or refuses.
    """
    try:
        yield
    except (_ON_THE_WAY, OSError, ValueError) as error:
        answer = getattr(getattr(error, "response", None), "status_code", None)
        first = (str(error).splitlines() or [""])[0]
        reason = f"answered {answer}" if answer else f"refuses, or cannot be reached ({type(error).__name__}: {first})"
        wrong = isinstance(error, HFValidationError) or answer in _UNKNOWN
        raise (ConfigError if wrong else DpllmError)(
            f"{repository}: {endpoint()} {reason}, so nothing was read or changed there. Check the name, such as "
            "alice/notes-dp, the revision, the network and HF_HUB_OFFLINE, log in with hf auth login if it is private, and type "
            "the command again."
        ) from None
