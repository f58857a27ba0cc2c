"""``dpllm card``, ``verify``, ``push``, ``generate``, ``merge`` and ``synthesize``: publishing, and checks of it."""

from __future__ import annotations

import argparse
import json
import re
import sys
from contextlib import ExitStack
from dataclasses import asdict, fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from dpllm.cli.describe import number_or_auto, take_data
from dpllm.cli.plan import AddCommand, plain_console, show, take_final
from dpllm.errors import AuditContradiction, ConfigError

if TYPE_CHECKING:
    from dpllm.releases.quality import Tell

_DATASETS = "datasets/"
_HUB_ID = re.compile(rf"({_DATASETS})?[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
NOTE = (
    "dpllm generate: sampling is post-processing and spends no further budget, however much is sampled; text that you put into "
    "a prompt is not covered by the guarantee."
)


def add_commands(add: AddCommand) -> None:
    """Adds the commands and their options."""
    option = add("card", card, "write the model card into RUN/export, and sign it", None).add_argument
    option("run", help="run directory; or RUN/synthetic, for the card of that data set")
    option("--sign", metavar="KEY", help="sign all files with this private key (PEM), as OpenSSF model signing does")
    option("--describe", metavar="FILE", type=Path, help="show these statistics of the data too")
    option("--registry", action="store_true", help="also write RUN/registry.yaml, for the DP Deployments Registry")
    option = add("verify", verify, "recompute every number that a card states").add_argument
    option("path", help="run directory, export, data set, or Hub id (datasets/OWNER/NAME); a local path wins")
    option(
        "--ledger",
        metavar="FILE",
        help="a ledger, an export of one, or a postgresql:// URL (default: what the run names)",
    )
    option("--public-key", metavar="FILE", type=Path, help="check the signature by this key (PEM)")
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
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--prompt", metavar="TEXT", help="text that the model continues (for a chat model, the user's turn)"
    )
    group.add_argument("--prompts", metavar="FILE", help="file with one prompt per line; jsonl: a prompt, or messages")
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
    _add_synthesize(add("synthesize", synthesize, "generate a data set, with a tuned model or by private inference"))


def _add_synthesize(parser: argparse.ArgumentParser) -> None:
    parser.usage = (
        "dpllm synthesize RUN --rows N [options]\n       dpllm synthesize DATA|RECIPE --by inference --model NAME --epsilon E "
        "--rows N [options] [--SECTION.KEY VALUE ...]"
    )
    option = parser.add_argument
    option("source", metavar="run", help="run directory with its card; by inference: data, or a recipe (.yaml)")
    option(
        "--by", choices=("training", "inference"), default="training", help="inference: records vote, nothing trains"
    )
    option("--rows", type=int, required=True, help="number of rows to write")
    option("--output", metavar="DIR", type=Path, help="a new folder (default: RUN/synthetic; by inference: synthetic)")
    option("--no-quality", action="store_true", help="measure nothing; only public figures go on the card")
    text = "a dropped text of a tuned model is drawn again, with the same control codes"
    option = parser.add_argument_group("sampling and filters", text).add_argument
    option("--temperature", type=float, help="0: greedy decoding, of a tuned model (default: 1)")
    option("--max-new-tokens", type=int, help="longest text (default: the recipe's data.max_length; by inference: 96)")
    option("--keep-unfinished", action="store_true", default=None, help="keep texts that did not end")
    option("--min-words", type=int, metavar="N", help="drop texts of fewer words")
    option = parser.add_argument_group("a tuned model").add_argument
    option("--prompts", metavar="FILE", type=Path, help="public prompts to answer, as dpllm generate reads them")
    option("--top-p", type=float, help="nucleus sampling: share of probability to sample from (default: 1)")
    option("--seed", type=int, help="the same seed gives the same rows")
    option("--attempts", type=int, help="most texts to draw per row, on average (default: 20)")
    option("--keep-duplicates", action="store_true", default=None, help="keep duplicate texts")
    group: Any = parser.add_argument_group("inference", "records vote for each token (docs/howto/synthesize.md)")
    option = group.add_argument
    option("--model", metavar="NAME", help="model that reads the records: directory or Hub id (default: the recipe's)")
    option("--epsilon", type=float, help="epsilon of all rows together")
    option("--delta", type=number_or_auto, help="below 1/N (default: the budget's, or as in a run)")
    option("--batch", type=int, help="units that vote for one text (default: as few as epsilon allows)")
    option("--top-k", type=int, help="draw from so many tokens that the public prompt expects (default: all)")
    option("--prompt", metavar="TEXT", help="in which a record stands at {text}; without it, the public prompt")
    option("--describe", metavar="FILE", type=Path, help="released shares of data.control, of dpllm describe")
    take_data(group)
    take_final(group)
    option("--dry-run", action="store_true", help="show what it would promise, and spend nothing")


def card(args: argparse.Namespace, overrides: list[str]) -> int:
    """Writes the card, signs it with --sign, and prints the paths."""
    from dpllm.card.card import write_card
    from dpllm.card.registry import entry
    from dpllm.card.synthetic import RECORD
    from dpllm.files import BLOCK, read_json, write_whole
    from dpllm.run.directory import RunDir
    from dpllm.statement import privacy_record
    from dpllm.verification.verify import undone_unless_verified

    run = RunDir(Path(args.run))
    if (run.root / RECORD).exists():
        return _dataset_card(run.root, args)
    with undone_unless_verified(run.root):
        path = write_card(run, args.describe)
    print(path)
    if args.sign:
        from dpllm.verification.sign import sign

        print(sign(path.parent, Path(args.sign)))
    if args.registry:
        write_whole(run.registry, entry(privacy_record.read(read_json(run.export / BLOCK)), run.load_config()))
        print(run.registry)
    return 0


def _dataset_card(directory: Path, args: argparse.Namespace) -> int:
    from dpllm.card.synthetic import run_of, write_dataset_card
    from dpllm.verification.verify import undone_unless_verified

    run = run_of(directory)
    if run is None or args.sign or args.describe or args.registry:
        raise ConfigError(
            f"{directory}: the run needs its card first, and --sign, --describe and --registry are for the run. Type dpllm card "
            "RUN, with them if needed, and then dpllm card RUN/synthetic."
        )
    with undone_unless_verified(directory):
        print(write_dataset_card(directory, run))
    return 0


def verify(args: argparse.Namespace, overrides: list[str]) -> int:
    """Prints every check, and the number of each kind; exit code 4 if one failed."""
    from dpllm.verification import verify_apart

    with ExitStack() as stack:
        path = Path(args.path)
        in_folder = len(path.parts) > 1 and path.parent.is_dir()  # then a missing path is misspelled, not a Hub id
        if not path.exists() and not in_folder and _HUB_ID.fullmatch(args.path):
            path = Path(stack.enter_context(TemporaryDirectory()))
            _download(args.path, args.revision, path)
        elif args.revision is not None:
            raise ConfigError(f"--revision {args.revision}: {args.path} is not a Hub id. Leave it out.")
        verification = verify_apart(path, ledger=args.ledger, public_key=args.public_key)
    check_names = {check["name"] for check in verification["checks"]}
    if args.public_key and "signature" not in check_names and not verification["failed"]:
        raise ConfigError(f"--public-key: {args.path} is not signed, since only files of a model are. Leave it out.")
    if args.json:
        show(args, verification)
    else:
        for check in verification["checks"]:
            print(f"{check['status']:<8}  {check['name']}: {check['detail']}")
        counts = verification["counts"]
        print(f"{counts['verified']} verified, {counts['asserted']} asserted, {counts['failed']} failed")
    if verification["failed"]:
        names = ", ".join(check["name"] for check in verification["checks"] if check["status"] == "failed")
        raise AuditContradiction(f"{args.path}: does not verify ({names}). Do not rely on its card.")
    return 0


def _download(repository: str, revision: str | None, directory: Path) -> None:
    """Downloads a model, or with datasets/ a data set, from the Hub; nothing else here uses the network.

    Raises:
        ConfigError: The repository does not exist, is private and nobody is logged in, or has no card.
        DpllmError: The Hub cannot be reached.
    """
    try:
        from huggingface_hub import snapshot_download

        from dpllm.publish.push import endpoint, hub_errors
    except ImportError:
        raise ConfigError(
            f"{repository}: no such local path, and huggingface_hub is not installed to download it. Type pip install "
            "huggingface_hub, or a local path."
        ) from None
    with hub_errors(repository):
        kind = "dataset" if repository.count("/") > 1 else "model"
        name = repository.removeprefix(_DATASETS) if kind == "dataset" else repository
        snapshot_download(name, repo_type=kind, revision=revision, local_dir=directory, endpoint=endpoint())
    if not any((directory / name).is_file() for name in ("README.md", "privacy.json")):
        raise ConfigError(
            f"{repository}: has no card at its top level, where weights are loaded from, so nothing can be verified. Ask its "
            "author to publish with dpllm push."
        )


def push(args: argparse.Namespace, overrides: list[str]) -> int:
    """Uploads export/ or a data set if it verifies, and lists the files."""
    from dpllm.publish.push import push as upload

    done = upload(
        Path(args.run),
        args.repository,
        dry_run=args.dry_run,
        private=args.private,
        without_guarantee=args.without_guarantee,
        ledger=args.ledger,
    )
    if args.json:
        return show(args, asdict(done))
    for file in done.files:
        print(f"{file.size:>12,}  {file.sha256}  {file.path}")
    for line in done.unsearched:
        print(f"{'not searched':>12}  {line}")
    total = sum(file.size for file in done.files)
    destination = f"uploaded to {done.url}" if done.url else f"would go to {done.repository}; nothing was uploaded"
    print(f"{len(done.files)} files, {total:,} bytes, {destination}")
    return 0


def generate(args: argparse.Namespace, overrides: list[str]) -> int:
    """Prints the samples; says on standard error that they cost nothing, or that they may repeat training text."""
    from dpllm.publish.generate import load, sample
    from dpllm.text.prompts import printable, read_prompts

    prompts = read_prompts(Path(args.prompts)) if args.prompts else [args.prompt] if args.prompt else None
    generator = load(Path(args.run), base=args.base, chat=args.chat)
    if generator.unprotected is None:
        print(NOTE, file=sys.stderr)
    else:
        reason = " ".join(generator.unprotected.split())
        print(
            f"dpllm generate: no differential privacy guarantee ({reason}): what is printed may repeat training text.",
            file=sys.stderr,
        )
    settings = {name: getattr(args, name) for name in ("max_new_tokens", "temperature", "top_p", "seed")}
    samples = sample(generator, prompts, args.num, **settings)
    if args.json:
        print(
            json.dumps(
                {"seed": args.seed, "samples": [asdict(drawn) for drawn in samples]}, ensure_ascii=False, indent=2
            )
        )
        return 0
    for number, drawn in enumerate(samples):
        of = f"prompt {drawn.number + 1}, " if prompts is not None and len(prompts) > 1 else ""
        print(f"--- {of}sample {number % args.num + 1}\n{printable(drawn.text)}")
    return 0


def merge(args: argparse.Namespace, overrides: list[str]) -> int:
    """Writes the merged model and prints its path."""
    from dpllm.publish.merge import merge as write_merged
    from dpllm.run.directory import RunDir

    output = write_merged(RunDir(Path(args.run)), Path(args.output) if args.output else None)
    print(f"{output}: a merged copy with the same guarantee (post-processing). dpllm verify {output} checks it.")
    return 0


def synthesize(args: argparse.Namespace, overrides: list[str]) -> int:
    """Writes the data set and prints its path; the same command resumes an interrupted one."""
    from dpllm.files import read_json
    from dpllm.progress import heard_by
    from dpllm.recipe.config import OF_MODEL
    from dpllm.recipe.section import parse_overrides
    from dpllm.run.screen import Screen

    keys = {key: value for name, key in OF_MODEL.items() if (value := getattr(args, name)) is not None}
    keys |= parse_overrides(overrides)
    if args.by == "training" and (keys or args.dry_run):
        typed = {key: name for name, key in OF_MODEL.items()}
        option = next((f"--{typed.get(key, key).replace('_', '-')}" for key in keys), "--dry-run")
        raise ConfigError(f"{option}: has no effect with --by training. Leave it out, or type --by inference.")
    if args.dry_run:
        return _dry_run(args, keys)
    try:
        with Screen(plain_console(stderr=True)) as screen, heard_by(screen):
            path, private = _infer(args, keys) if args.by == "inference" else _with_model(args)
    except KeyboardInterrupt:
        print("dpllm synthesize: interrupted. The same command continues where it stopped.", file=sys.stderr)
        return 1
    record = read_json(path)
    if args.json:
        return show(args, record)
    drawn, output = record["rows"] + sum(record["dropped"].values()), path.parent
    dropped = ", ".join(f"{reason}: {count}" for reason, count in record["dropped"].items())
    print(f"{output}: {record['rows']} rows of {drawn} texts drawn; dropped ({dropped}).")
    if not args.no_quality:
        print(f"Figures of quality that may be published are on its card; {private} has the others.")
    if args.by == "inference":
        cost = f"Epsilon {record['epsilon']:.4f} at delta {record['delta']:g}, charged to {record['dataset']}."
        print(f"{cost} dpllm verify {output} checks it.")
    else:
        print("run/privacy.json is its privacy statement: rows spend nothing beyond it, and it does not cover prompts.")
    return 0


def _not_measured(args: argparse.Namespace) -> Tell | None:
    return None if args.no_quality else lambda line: print(f"not measured: {line}", file=sys.stderr)


def _request(args: argparse.Namespace, kind: Any) -> Any:
    from dpllm.publish.synthesize import SynthesisRequest
    from dpllm.releases.draft import request_of
    from dpllm.releases.inference_budget import InferenceRequest

    names = [field.name for request_class in (SynthesisRequest, InferenceRequest) for field in fields(request_class)]
    return request_of(kind, args.by, {name: getattr(args, name) for name in names})


def _infer(args: argparse.Namespace, keys: dict[str, Any]) -> tuple[Path, Path]:
    """Writes rows by inference; returns the paths of the record and of the private figures."""
    from dpllm.card.inference import RECORD
    from dpllm.recipe.config import around
    from dpllm.releases.inference import infer, private_of
    from dpllm.releases.inference_budget import InferenceRequest

    request, output = _request(args, InferenceRequest), args.output or Path("synthetic")
    infer(around(args.source, keys, "dpllm synthesize"), request, output, _not_measured(args))
    return output / RECORD, private_of(output)


def _with_model(args: argparse.Namespace) -> tuple[Path, Path]:
    from dpllm.card.synthetic import RECORD
    from dpllm.publish.synthesize import SynthesisRequest
    from dpllm.publish.synthesize import synthesize as write
    from dpllm.releases.quality import FOLDER
    from dpllm.run.directory import RunDir

    run = RunDir(Path(args.source))
    output = write(run, _request(args, SynthesisRequest), args.output, _not_measured(args))
    return output / RECORD, run.private / FOLDER


def _dry_run(args: argparse.Namespace, keys: dict[str, Any]) -> int:
    from dpllm.recipe.config import around
    from dpllm.releases.inference import quote_of
    from dpllm.releases.inference_budget import InferenceRequest

    request = _request(args, InferenceRequest)
    quoted, refusal = quote_of(around(args.source, keys, "dpllm synthesize"), request)
    event, ballot = quoted.event.to_json(), quoted.ballot
    about = {**asdict(ballot), "event": event, "epsilon": quoted.epsilon, "delta": quoted.delta, "texts": quoted.texts}
    promise = (
        f"At most {quoted.texts:,} rows at epsilon {quoted.epsilon:.4f} and delta {quoted.delta:g} together: "
        f"{ballot.batch_size} units vote for each token by at most {ballot.clip:.3g}, {request.max_new_tokens} draws a text."
    )
    show(args, about if args.json else promise, "Nothing was spent.")
    if refusal:
        raise refusal
    return 0
