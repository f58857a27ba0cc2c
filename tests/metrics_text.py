"""Metrics as tests read them: text in Prometheus' exposition format, from files and from an endpoint."""

from __future__ import annotations

import shutil
import socket
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tiny_models import recipe

from dpllm.recipe.config import RunConfig

Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]
LOOPBACK = "127.0.0.1"


def series(text: bytes | str) -> Series:
    """Every sample by its name and labels; none may stand there twice."""
    text = text.decode() if isinstance(text, bytes) else text
    results: Series = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in results, key
            results[key] = sample.value
    return results


def value(samples: Series, name: str) -> float:
    """The only sample of a name."""
    (only,) = [number for (sample_name, _), number in samples.items() if sample_name == name]
    return only


def promtool(*words: object, text: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("promtool is not installed: apt-get install prometheus")
    return subprocess.run([program, *map(str, words)], input=text, capture_output=True, timeout=60)


def promtool_is_silent(text: bytes) -> None:
    """``promtool check metrics`` has nothing to say."""
    answer = promtool("check", "metrics", text=text)
    assert (answer.returncode, answer.stdout, answer.stderr) == (0, b"", b"")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def scrape(port: int) -> bytes:
    with urllib.request.urlopen(f"http://{LOOPBACK}:{port}/metrics", timeout=10) as answer:
        return bytes(answer.read())


def telemetry_config(folder: Path, **telemetry: Any) -> RunConfig:
    """A recipe whose run is in ``folder``, with these keys of its section telemetry."""
    return recipe(telemetry=telemetry, output_dir=str(folder / "run"), privacy={"noise_multiplier": 2.0})
