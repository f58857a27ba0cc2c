"""``dpllm card``, ``verify``, ``push``, ``generate`` and ``merge``: what leaves a run, and whether its card is true."""

from __future__ import annotations

import argparse
import json
import re
import sys
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

from dpllm.cli.plan import AddCommand, show
from dpllm.errors import AuditContradiction, ConfigError

_DATASETS = "datasets/"
_HUB_ID = re.compile(rf"({_DATASETS})?[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
NOTE = (
    "dpllm generate: sampling is post-processing and spends no further budget, however much is sampled; text that you put into "
    "a prompt is not covered by the guarantee."
)


def add_commands(add: AddCommand) -> None:
    """The commands and their arguments."""
    option = add("card", card, "write the model card into RUN/export, and sign it", None).add_argument
    option("run", help="run directory; or RUN/synthetic, for the card of that data set")
    option("--sign", metavar="KEY", help="sign privacy.json with an OpenSSH key, or through ssh-agent")
    option("--describe", metavar="FILE", type=Path, help="show these statistics of the data too")
    option = add("verify", verify, "recompute every number that a card states").add_argument
    option("path", help="run directory, export, data set, or Hub id (datasets/OWNER/NAME); a local path wins")
    option(
        "--ledger",
        metavar="FILE",
        help="a ledger, an export of one, or a postgresql:// URL (default: what the run names)",
    )
    option("--signers", metavar="FILE", help="allowed signers, as ssh-keygen(1) describes them")
    option("--revision", help="of a Hub id: branch, tag or commit")
    option = add("push", push, "verify RUN/export or a data set and upload it to the Hub").add_argument
    option("run", help="run directory, or the folder of a synthetic data set")
    option("repository", help="OWNER/NAME on the Hub; created if it does not exist")
    option("--dry-run", action="store_true", help="list what would be uploaded, and contact nobody")
    option("--private", action="store_true", help="make the repository private")
    option(
        "--without-guarantee",
        action="store_true",
        help="publish a run without a guarantee whose data are not declared public",
    )
    option("--ledger", metavar="FILE", help="current path of the ledger or of an export of it")
    parser = add("generate", generate, "sample text from a tuned model")
    option = parser.add_argument
    option("run", help="run directory, its export, or a merged model")
    given = parser.add_mutually_exclusive_group()
    given.add_argument(
        "--prompt", metavar="TEXT", help="text that the model continues (for a chat model, the user's turn)"
    )
    given.add_argument("--prompts", metavar="FILE", help="file with one prompt per line; jsonl: a prompt, or messages")
    option("--num", type=int, default=8, help="texts for each prompt (default: 8)")
    option("--max-new-tokens", type=int, default=64, help="longest text, in tokens (default: 64)")
    option("--temperature", type=float, default=1.0, help="0: greedy decoding (default: 1)")
    option("--top-p", type=float, default=1.0, help="nucleus sampling, as a probability (default: 1)")
    option("--seed", type=int, help="the same seed and prompts give the same texts")
    option("--chat", action=argparse.BooleanOptionalAction, help="treat prompts as the user's turns, or not")
    option("--base", metavar="MODEL", help="base model of the adapter, if it is not where the adapter says")
    option = add("merge", merge, "merge the adapter into the weights, with the same card", None).add_argument
    option("run", help="run directory of a finished run with a card")
    option("--output", metavar="DIR", help="where the merged model goes (default: RUN/merged)")


def card(known: argparse.Namespace, rest: list[str]) -> int:
    """Writes the card, signs it if asked, and says where."""
    from dpllm.card.card import write_card
    from dpllm.card.synthetic import RECORD
    from dpllm.run.directory import RunDir
    from dpllm.verification.verify import undone_unless_verified

    if (Path(known.run) / RECORD).exists():
        return _dataset_card(Path(known.run), known)
    with undone_unless_verified(Path(known.run)):
        path = write_card(RunDir(Path(known.run)), known.describe)
    print(path)
    if known.sign:
        from dpllm.verification.sign import sign

        print(sign(path.parent, Path(known.sign)))
    return 0


def _dataset_card(directory: Path, known: argparse.Namespace) -> int:
    """The same of a data set that lies in its run directory."""
    from dpllm.card.synthetic import write_dataset_card
    from dpllm.verification.check_rows import run_of
    from dpllm.verification.verify import undone_unless_verified

    run = run_of(directory)
    if run is None or known.sign or known.describe:
        raise ConfigError(
            f"{directory}: the run needs its card first, and --sign and --describe are for the run. Type dpllm card RUN, with "
            "them if needed, and then dpllm card RUN/synthetic."
        )
    with undone_unless_verified(directory):
        print(write_dataset_card(directory, run))
    return 0


def verify(known: argparse.Namespace, rest: list[str]) -> int:
    """Prints every check, and how many there are of each kind; exit code 4 where one failed."""
    from dpllm.verification import verify_apart

    with ExitStack() as stack:
        path = Path(known.path)
        here = len(path.parts) > 1 and path.parent.is_dir()  # then what is not in it is misspelled, and no Hub id
        if not path.exists() and not here and _HUB_ID.fullmatch(known.path):
            path = Path(stack.enter_context(TemporaryDirectory()))
            _download(known.path, known.revision, path)
        elif known.revision is not None:
            raise ConfigError(f"--revision {known.revision}: {known.path} is not a Hub id. Leave it out.")
        found = verify_apart(path, ledger=known.ledger, signers=Path(known.signers) if known.signers else None)
    if known.json:
        show(known, found)
    else:
        for check in found["checks"]:
            print(f"{check['status']:<8}  {check['name']}: {check['detail']}")
        counts = found["counts"]
        print(f"{counts['verified']} verified, {counts['asserted']} asserted, {counts['failed']} failed")
    if found["failed"]:
        names = ", ".join(check["name"] for check in found["checks"] if check["status"] == "failed")
        raise AuditContradiction(f"{known.path}: does not verify ({names}). Do not rely on its card.")
    return 0


def _download(repository: str, revision: str | None, directory: Path) -> None:
    """A snapshot of a model, or with datasets/ of a data set, on the Hub, which alone uses the network.

    Raises:
        ConfigError: There is none, it is private and nobody is logged in, or it has no card.
        DpllmError: The Hub cannot be reached.
    """
    try:
        from huggingface_hub import snapshot_download

        from dpllm.publish.push import asking, endpoint
    except ImportError:
        raise ConfigError(
            f"{repository}: no such local path, and huggingface_hub is not installed to download it. Type pip install "
            "huggingface_hub, or a local path."
        ) from None
    with asking(repository):
        kind = "dataset" if repository.count("/") > 1 else "model"
        name = repository.removeprefix(_DATASETS) if kind == "dataset" else repository
        snapshot_download(name, repo_type=kind, revision=revision, local_dir=directory, endpoint=endpoint())
    if not any((directory / name).is_file() for name in ("README.md", "privacy.json")):
        raise ConfigError(
            f"{repository}: has no card at its top level, where weights are loaded from, so nothing can be verified. Ask its "
            "author to publish with dpllm push."
        )


def push(known: argparse.Namespace, rest: list[str]) -> int:
    """Uploads export/ or a data set, once it verifies, and lists what went."""
    from dpllm.publish.push import push as upload

    done = upload(
        Path(known.run),
        known.repository,
        dry_run=known.dry_run,
        private=known.private,
        without_guarantee=known.without_guarantee,
        ledger=known.ledger,
    )
    if known.json:
        return show(known, asdict(done))
    for file in done.files:
        print(f"{file.size:>12,}  {file.sha256}  {file.path}")
    for line in done.unsearched:
        print(f"{'not searched':>12}  {line}")
    total = sum(file.size for file in done.files)
    where = f"uploaded to {done.url}" if done.url else f"would go to {done.repository}; nothing was uploaded"
    print(f"{len(done.files)} files, {total:,} bytes, {where}")
    return 0


def generate(known: argparse.Namespace, rest: list[str]) -> int:
    """Prints the samples; on standard error, what they cost and what they may hold."""
    from dpllm.publish.generate import load, sample
    from dpllm.text.prompts import printable, read_prompts

    prompts = read_prompts(Path(known.prompts)) if known.prompts else [known.prompt] if known.prompt else None
    generator = load(Path(known.run), base=known.base, chat=known.chat)
    if generator.unprotected is None:
        print(NOTE, file=sys.stderr)
    else:
        reason = " ".join(generator.unprotected.split())
        print(
            f"dpllm generate: no differential privacy guarantee ({reason}): what is printed may repeat training text.",
            file=sys.stderr,
        )
    settings = {name: getattr(known, name) for name in ("max_new_tokens", "temperature", "top_p", "seed")}
    found = sample(generator, prompts, known.num, **settings)
    if known.json:
        print(json.dumps({"seed": known.seed, "samples": [asdict(one) for one in found]}, ensure_ascii=False, indent=2))
        return 0
    for number, one in enumerate(found):
        of = f"prompt {one.number + 1}, " if prompts is not None and len(prompts) > 1 else ""
        print(f"--- {of}sample {number % known.num + 1}\n{printable(one.text)}")
    return 0


def merge(known: argparse.Namespace, rest: list[str]) -> int:
    """Writes the merged model and says where."""
    from dpllm.publish.merge import merge as write_merged
    from dpllm.run.directory import RunDir

    place = write_merged(RunDir(Path(known.run)), Path(known.output) if known.output else None)
    print(f"{place}: a merged copy with the same guarantee (post-processing). dpllm verify {place} checks it.")
    return 0
