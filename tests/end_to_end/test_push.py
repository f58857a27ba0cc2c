"""Push against a stand-in for the Hub on loopback: what arrives is export/, and nothing leaves before every check passed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import hub_stand_in
import pytest
from hub_stand_in import Hub, Repository
from published import carry, read
from running import Place, contents, done, dpllm_, edit_recipe, refused, unverified

from dpllm.ledger import Ledger

NAME = "alice/notes-dp"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with hub_stand_in.running(monkeypatch) as running:
        yield running


def test_what_arrives_is_exactly_export(run: Path, hub: Hub) -> None:
    answer = done("push", run, NAME)
    arrived = dict(hub.repositories[NAME].files)
    arrived.pop(".gitattributes")
    assert arrived == contents(run / "export")
    assert f"uploaded to {hub.endpoint}/{NAME}/commit/" in answer.out
    assert not hub.repositories[NAME].private
    # A second time, with a card that was written again; and anyone can check what lies there.
    done("card", run)
    done("push", run, NAME)
    assert "verified  files" in done("verify", NAME).out


def test_a_changed_repository_does_not_verify(run: Path, hub: Hub) -> None:
    done("push", run, NAME)
    files = hub.repositories[NAME].files
    files["adapter_model.safetensors"] = files["adapter_model.safetensors"][:-4] + b"\x00\x00\x80?"
    assert "failed    files" in unverified(NAME)


def test_a_dry_run_lists_everything_and_contacts_nobody(run: Path, hub: Hub) -> None:
    answer = done("push", run, NAME, "--dry-run", "--json")
    listed, sizes = json.loads(answer.out), {name: len(text) for name, text in contents(run / "export").items()}
    assert {file["path"]: file["size"] for file in listed["files"]} == sizes
    assert listed["url"] is None
    assert "nothing was uploaded" in done("push", run, NAME, "--dry-run").out
    assert not hub.asked


def test_private_makes_a_private_repository_and_never_uses_a_public_one(run: Path, hub: Hub) -> None:
    done("push", run, NAME, "--private")
    assert hub.repositories[NAME].private
    hub.repositories["alice/public"] = Repository()
    refused("push", run, "alice/public", "--private", code=3)
    assert list(hub.repositories["alice/public"].files) == [".gitattributes"]


def test_a_repository_with_files_of_another_model_is_refused(run: Path, hub: Hub) -> None:
    hub.repositories[NAME] = Repository(files={"old.safetensors": b"x", ".gitattributes": b""})
    assert "hf repo-files delete" in refused("push", run, NAME, code=3)
    assert sorted(hub.repositories[NAME].files) == [".gitattributes", "old.safetensors"]


BROKEN: dict[str, Callable[[Path], object]] = {
    "no card": lambda run: (run / "export" / "README.md").unlink(),
    "no statement": lambda run: (run / "export" / "privacy.json").unlink(),
    "other file": lambda run: (run / "export" / "tokenizer_config.json").write_text("{}"),
    "private file": lambda run: (run / "export" / "metrics.jsonl").write_text("{}"),
    "hidden file": lambda run: (run / "export" / ".gitattributes").write_text("*"),
    "link": lambda run: (run / "export" / "more").symlink_to(run / "private"),
    "edited card": lambda run: carry(run / "export", {**read(run / "export"), "contact": "somebody else"}),
    "other canaries": lambda run: (run / "private" / "canaries.json").write_text("{}"),
}


@pytest.mark.parametrize("how", BROKEN)
def test_what_must_not_be_published_is_refused(run: Path, hub: Hub, how: str) -> None:
    BROKEN[how](run)
    for options in ([], ["--dry-run"]):
        refused("push", run, NAME, *options, code=2 if how in ("other file", "other canaries") else 3)
    assert not hub.asked


def test_a_run_whose_ledger_is_gone_is_refused_until_it_is_named(
    run: Path, hub: Hub, finished: Place, tmp_path: Path
) -> None:
    edit_recipe(run, "privacy", ledger=str(tmp_path / "gone.sqlite"))
    assert "--ledger" in refused("push", run, NAME, code=3)
    assert not hub.asked
    done("push", run, NAME, "--ledger", finished.ledger)


def test_a_ledger_that_does_not_know_the_run_is_refused(run: Path, hub: Hub, tmp_path: Path) -> None:
    Ledger(tmp_path / "other.sqlite").close()
    assert dpllm_("push", run, NAME, "--ledger", tmp_path / "other.sqlite").code == 3
    assert not hub.asked


def test_a_run_without_a_guarantee_is_published_on_public_data_or_if_somebody_insists(
    baseline: Place, hub: Hub, tmp_path: Path
) -> None:
    done("push", baseline.run, NAME, "--dry-run")
    run = Path(shutil.copytree(baseline.run, tmp_path / "run"))
    edit_recipe(run, "data", public=False)  # by an exception
    done("card", run)
    assert "--without-guarantee" in refused("push", run, NAME, code=3)
    assert not hub.asked
    done("push", run, NAME, "--without-guarantee")
    assert set(hub.repositories[NAME].files) - {".gitattributes"} == set(contents(run / "export"))


def test_a_name_that_the_hub_does_not_allow_is_a_wrong_command(run: Path) -> None:
    for name in ("a/b/c", "../x", "alice/", "", "a b"):
        assert dpllm_("push", run, name).code == 2


def test_a_refusal_of_the_hub_is_one_line(run: Path, hub: Hub) -> None:
    for status, code in ((401, 2), (403, 2), (400, 1)):
        hub.refuse = status
        refused("push", run, NAME, code=code)


def test_no_network_is_one_line(run: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for command in (("push", run, NAME), ("verify", "alice/nothing-here")):
        assert "HF_HUB_OFFLINE" in refused(*command, code=1)


def test_a_repository_that_is_not_there_is_one_line(hub: Hub) -> None:
    refused("verify", "alice/nothing-here")
