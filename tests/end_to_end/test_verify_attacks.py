"""Attacks on a published run that verification once let through; and verification where nothing heavy is installed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tomllib
import venv
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import published
import pyarrow as pa
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from published import carry, edit, failing, read, rehash, write
from pyarrow import parquet
from running import Place, as_trained, contents, done, dpllm_, python, refused
from safetensors import numpy as safetensors

import dpllm
from dpllm.canaries import canaries
from dpllm.card.card import write_card
from dpllm.errors import Refused
from dpllm.privacy import accounting, events
from dpllm.publish import push
from dpllm.recipe.config import RunConfig
from dpllm.releases import leaks
from dpllm.run import base_model
from dpllm.run.directory import RunDir


@pytest.fixture
def run(finished: Place, tmp_path: Path) -> Path:
    shutil.copytree(finished.run, tmp_path / "run", copy_function=shutil.copy2)
    return tmp_path / "run"


def test_a_card_at_the_top_is_the_one_that_is_verified(run: Path) -> None:
    """Who publishes a forged card beside the run directory of an honest run is not verified by the latter."""
    for path in (run / "export").iterdir():
        if path.is_file():
            shutil.copy(path, run / path.name)
    (run / "README.md").write_text("# epsilon is 0.01\n", encoding="utf-8")
    assert {"front matter", "marked parts", "files"} <= failing(run)
    (run / "privacy.json").unlink()
    assert failing(run)


def test_an_audit_that_was_made_cannot_be_left_out(run: Path) -> None:
    shutil.rmtree(run / "export" / "audit")
    write_card(RunDir(run))
    assert failing(run) == {"audit: canaries"}
    assert dpllm_("push", run, "alice/notes", "--dry-run").code == 3


def test_a_card_that_would_not_verify_is_not_written(run: Path, finished: Place) -> None:
    """Whatever it would say: the files stay as they were, a signature of theirs included."""
    with open(run / "private" / "audits.jsonl", "a", encoding="utf-8") as file:
        file.write("{}\n")
    edit(run / "config.yaml", "contact: null", "contact: bob@example.org")
    (run / "export" / "model.sig").write_text("of the former card", encoding="utf-8")
    (run / "export" / "privacy.svg").unlink()
    before = contents(run)
    message = refused("card", run, code=3)
    assert "does not verify" in message
    assert "audit: canaries" in message
    assert contents(run) == before
    with pytest.raises(Refused):
        dpllm.write_card(run)
    assert contents(run) == before
    shutil.copy(finished.run / "private" / "audits.jsonl", run / "private")
    (run / "export" / "model.sig").unlink()
    done("card", run)
    assert "bob@example.org" in (run / "export" / "README.md").read_text("utf-8")
    assert not failing(run)


def test_a_recipe_without_a_guarantee_has_none_whatever_the_record_says(run: Path) -> None:
    config = yaml.safe_load((run / "config.yaml").read_text("utf-8"))
    config["privacy"]["insecure_seed"] = 7
    (run / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    assert "run" in failing(run)
    assert "changed after the run" in refused("card", run, code=3)
    as_trained(run)
    assert "not the one that the ledger recorded" in refused("card", run, code=3)
    config["privacy"]["ledger"] = str(run / "elsewhere.sqlite")
    (run / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    done("card", run)
    block = read(run / "export")
    assert not block["guarantee"]
    assert "seeded" in block["reason"]


def _secret(run: Path) -> str:
    secrets = (canary.secret.strip() for canary in canaries.load(RunDir(run).canaries).canaries)
    return next(secret for secret in secrets if secret[0] != "0")  # a number would lose its first digit


WEIGHTS = "adapter_model.safetensors"
HIDINGS: dict[str, Callable[[str, bytes], bytes]] = {
    "chat_template.jinja": lambda text, _: text.encode(),
    "special_tokens_map.json": lambda text, _: json.dumps({"n": int(text)}).encode(),
    "generation_config.json": lambda text, _: json.dumps({"n": f"x_{text}_x"}).encode(),
    "config.json": lambda text, _: json.dumps({"a": "lorem " * 200_000, "n": text}).encode(),
    "tokenizer_config.json": lambda text, _: json.dumps({"n": text}).encode(),
    WEIGHTS: lambda text, old: safetensors.save(safetensors.load(old), {"note": text}),  # in its description
}


@pytest.mark.parametrize("name", HIDINGS)
def test_a_canary_is_found_in_a_file_of_any_kind(run: Path, name: str) -> None:
    """Also in one that an export may hold."""
    path = run / "export" / name
    path.write_bytes(HIDINGS[name](_secret(run), path.read_bytes() if path.exists() else b""))
    with pytest.raises(Refused, match="contains text of a canary"):
        leaks.search(RunDir(run), list(contents(run / "export")), run / "export")


def _parent(block: published.Json, **other: object) -> published.Json:
    names = ("epsilon", "delta", "unit", "neighbouring_relation", "event")
    terms = {name: block["plan"][name] for name in names}
    return {
        "name": "m", "guarantee": True, **terms, "dataset": "notes", "entry": "0" * 16,
        "files_digest": "0" * 64, **other,
    }  # fmt: skip


def test_a_lineage_cannot_deny_the_common_dataset_or_add_other_units(run: Path) -> None:
    export, block = run / "export", read(run / "export")
    plan = block["plan"]
    total = accounting.epsilon(accounting.compose([events.read(plan["event"])] * 2), plan["delta"], "zero_out")
    composed = {"epsilon": total, "delta": plan["delta"], "accountant": "dp-accounting PLD"}
    honest = {
        "base": _parent(block), "ancestors": [], "same_dataset": True, "dataset": "notes", "composed": composed,
        "reason": None,
    }  # fmt: skip
    denied = {**honest, "same_dataset": False, "dataset": None, "composed": None, "reason": "other data"}
    for stated, wrong in (
        (honest, False),
        (denied, True),
        ({**honest, "composed": None, "reason": "the author says so"}, True),
        ({**honest, "base": _parent(block, unit="author")}, True),
        ({**honest, "ancestors": [_parent(block, dataset="other")] * 20}, True),
    ):
        carry(export, {**block, "lineage": stated})
        assert ("lineage" in failing(export)) is wrong


def test_a_few_bytes_cannot_fill_the_memory(run: Path) -> None:
    export = run / "export"
    path = export / "audit" / "tokens.parquet"
    table = parquet.read_table(path)
    columns = {name: table[name].to_numpy()[:1].repeat(20_000) for name in table.column_names}
    names = pa.DictionaryArray.from_arrays(pa.array([0] * 20_000, pa.int32()), pa.array(["c" + "0" * 1_000_000]))
    parquet.write_table(pa.table({**columns, "canary_id": names}), path, compression="zstd")
    assert path.stat().st_size < 20_000
    rehash(export, "audit/tokens.parquet")
    assert "audit" in failing(export)  # 20 GB otherwise


def test_events_that_take_minutes_are_refused(run: Path) -> None:
    export, block = run / "export", read(run / "export")
    for numbers in ({"noise_multiplier": 1e-6}, {"num_steps": 10**12}):
        write(export, published.replanned(block, **numbers))
        assert "promise" in failing(export)
    step = block["plan"]["event"]
    many = [{**step, "event": {**step["event"], "probability": 0.1 + number / 1000}} for number in range(20)]
    for event in ({**step, "count": 10**15}, {"type": "composed", "events": many}):  # nothing else is computed
        write(export, {**block, "plan": {**block["plan"], "event": event}})
        assert "card" in failing(export)


def test_a_file_that_changes_before_it_is_sent_is_refused(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub, commit = pytest.importorskip("huggingface_hub"), Mock()
    monkeypatch.setattr(hub.HfApi, "create_repo", Mock(return_value=SimpleNamespace(repo_id="alice/notes")))
    monkeypatch.setattr(hub.HfApi, "create_commit", commit)

    def meanwhile(*_: object, **__: object) -> SimpleNamespace:
        (run / "export" / "README.md").write_text("something else", encoding="utf-8")
        return SimpleNamespace(siblings=[])

    monkeypatch.setattr(hub.HfApi, "model_info", meanwhile)
    with pytest.raises(Refused, match="changed while"):
        push.push(run, "alice/notes")
    assert not commit.called


@pytest.mark.parametrize("listed", ["none.safetensors", "model.safetensors"])
def test_a_statement_beside_other_weights_on_the_hub_is_refused(
    run: Path, finished: Place, monkeypatch: pytest.MonkeyPatch, listed: str
) -> None:
    export = run / "export"
    write(export, {**read(export), "files": {"config.json": "0" * 64, listed: "1" * 64}})
    (export / "model.safetensors").write_bytes(b"other weights")
    hub_files = {path.name: path for path in export.iterdir()}
    monkeypatch.setattr(base_model, "_hub_file", lambda _, file, *__: hub_files.get(file))
    recipe = yaml.safe_load(finished.recipe.read_text("utf-8"))
    recipe["model"]["name_or_path"] = "alice/private-model"
    with pytest.raises(Refused, match="is not the file"):
        base_model.of_base(RunConfig.model_validate(recipe))


# --- the short requirements are enough, and locked -------------------------------------------------------------------


ONLY = """
import sys
allowed = set(sys.argv[1].split(",")) | set(sys.stdlib_module_names) | {"dpllm"}
class Only:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] not in allowed and not name.startswith("_sysconfigdata"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Only())
from dpllm.cli import main
print([main(["verify", place]) for place in sys.argv[2:]])
"""
REQUIREMENTS = Path(__file__).parents[2] / "requirements-verify.txt"


def _required() -> list[Requirement]:
    lines = REQUIREMENTS.read_text("utf-8").splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def _modules() -> set[str]:
    """What the requirements install, with all that they require."""
    names, pending = set(), [requirement.name for requirement in _required()]
    while pending:
        name = canonicalize_name(pending.pop())
        if name not in names:
            names.add(name)
            wanted = [Requirement(text) for text in metadata.requires(name) or ()]
            pending += [item.name for item in wanted if item.marker is None or item.marker.evaluate({"extra": ""})]
    provided = metadata.packages_distributions()
    return {module for module, of in provided.items() if names & {canonicalize_name(item) for item in of}}


def test_it_runs_where_the_short_requirements_alone_are_installed(run: Path) -> None:
    modules = _modules()
    assert not modules & {"torch", "transformers", "peft", "datasets", "accelerate", "opacus", "sklearn", "matplotlib"}
    other = Path(shutil.copytree(run / "export", run / "other"))
    (other / "tokenizer.json").write_text("{}", encoding="utf-8")
    done = python(ONLY, ",".join(modules), run, other)
    assert done.stdout.splitlines()[-1:] == ["[0, 4]"], done.stdout + done.stderr


def test_the_short_requirements_are_those_of_the_package() -> None:
    project = tomllib.loads((REQUIREMENTS.parent / "pyproject.toml").read_text("utf-8"))["project"]
    known = {canonicalize_name(item.name): item.specifier for item in map(Requirement, project["dependencies"])}
    for requirement in _required():
        assert requirement.name == "pyarrow" or known[canonicalize_name(requirement.name)] == requirement.specifier


def test_what_they_install_is_locked_with_hashes_at_the_versions_of_the_tests() -> None:
    text = REQUIREMENTS.with_suffix(".lock").read_text("utf-8").replace("\\\n", " ")
    locked = {canonicalize_name(line.partition("==")[0]): line for line in text.splitlines() if line[:1] != "#"}
    tested = REQUIREMENTS.with_name("constraints.txt").read_text("utf-8")
    pins = {canonicalize_name(line.partition("==")[0]): line for line in tested.splitlines()}
    assert {canonicalize_name(item.name) for item in _required()} <= locked.keys()
    for name, line in locked.items():
        assert line.partition("==")[2].split()[0] == pins[name].partition("==")[2].split()[0]
        assert re.search(r" --hash=sha256:[0-9a-f]{64}\b", line)


@pytest.mark.full
def test_a_fresh_environment_with_the_short_requirements_verifies(run: Path, tmp_path: Path) -> None:
    """As docs/concepts/verification.md says; skipped where no package index can be reached."""
    venv.create(tmp_path / "venv", with_pip=True)
    interpreter = tmp_path / "venv" / "bin" / "python"

    def install(*what: str) -> subprocess.CompletedProcess[str]:
        command = [interpreter, "-m", "pip", "install", "-q", *what]
        return subprocess.run(command, capture_output=True, text=True, timeout=550)

    if (reached := install("hatchling")).returncode:  # which builds the package
        pytest.skip(f"pip cannot install here: {reached.stderr.strip().splitlines()[-1][:200]}")
    source = tmp_path / "source"
    for name in ("dpllm", "recipes"):
        shutil.copytree(REQUIREMENTS.parent / name, source / name)
    for name in ("pyproject.toml", "README.md", "LICENSE", "requirements-verify.txt"):
        shutil.copy(REQUIREMENTS.parent / name, source / name)
    for arguments in (["--no-deps", str(source)], ["-r", str(source / "requirements-verify.txt")]):
        done = install(*arguments)
        assert done.returncode == 0, done.stderr
    for place, code in ((run, 0), (run / "export", 0)):
        command = [interpreter, "-m", "dpllm", "verify", str(place)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
        assert done.returncode == code, done.stdout + done.stderr
    (run / "export" / "tokenizer.json").write_text("{}", encoding="utf-8")
    done = subprocess.run(
        [interpreter, "-m", "dpllm", "verify", str(run)], capture_output=True, timeout=300, cwd=tmp_path
    )
    assert done.returncode == 4
