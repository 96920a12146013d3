"""The catalogue of peers agrees with itself and with the files beside it. Nothing is installed or run."""

import ast
import re
import sys
from pathlib import Path

import pytest

from benchmarks.peers import catalogue, install
from benchmarks.peers.catalogue import ADAPTERS, ADDRESSES, CATALOGUE, GROUPS, Entry, named, of_engine

PEERS = Path(catalogue.__file__).resolve().parent
PROGRAMS = sorted([*PEERS.rglob("*.py"), *PEERS.rglob("*.js")])
SUFFIXES = {"python": ".py", "node": ".js"}


def _label(entry: Entry) -> str:
    return f"{entry.name}@{entry.engine}"


def test_a_peer_is_known_by_its_name_and_engine() -> None:
    labels = [_label(entry) for entry in CATALOGUE]
    assert len(set(labels)) == len(labels)


def test_every_engine_has_peers_and_its_best_ones_are_the_default() -> None:
    assert {entry.engine for entry in CATALOGUE} == set(ADDRESSES)
    defaults = {engine: [entry.name for entry in of_engine(engine, defaults_only=True)] for engine in ADDRESSES}
    assert defaults == {
        "redis": ["bullmq", "taskiq", "huey"],
        "postgres": ["pg-boss", "pg-boss-5000", "pgqueuer", "graphile-worker"],
        "sqlite": ["huey"],
        "rabbitmq": [],
    }


@pytest.mark.parametrize("entry", CATALOGUE, ids=_label)
def test_a_peer_has_an_adapter_in_its_language(entry: Entry) -> None:
    adapter = ADAPTERS / entry.adapter
    assert adapter.is_file()
    assert adapter.suffix == SUFFIXES[entry.language]


def test_no_adapter_and_no_group_is_left_over() -> None:
    found = {path.name for path in ADAPTERS.iterdir() if path.is_file()}
    assert found == {entry.adapter for entry in CATALOGUE} | {"protocol.py", "protocol.js"}
    assert set(GROUPS) == {entry.group for entry in CATALOGUE}


@pytest.mark.parametrize("group", GROUPS)
def test_a_group_pins_its_library_by_name(group: str) -> None:
    pin = {"python": r"[a-z-]+(\[[a-z,]+\])?==\d+(\.\d+)+", "node": r"[a-z-]+@\d+(\.\d+)+"}[GROUPS[group].language]
    for requirement in GROUPS[group].requirements:
        assert re.fullmatch(pin, requirement)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda path: str(path.relative_to(PEERS)))
def test_no_program_names_an_address(program: Path) -> None:
    text = program.read_text()
    assert "://" not in text
    assert not re.search(r"--registry|index-url|/home/|/root/", text)


@pytest.mark.parametrize("entry", [entry for entry in CATALOGUE if entry.language == "python"], ids=_label)
def test_a_python_adapter_defines_a_peer_and_hides_no_library(entry: Entry) -> None:
    adapter = ADAPTERS / entry.adapter
    tree = ast.parse(adapter.read_text())
    assigned = {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    imported = {
        name.split(".")[0]
        for node in ast.walk(tree)
        for name in (
            [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else []
        )
    }
    assert "PEER" in assigned
    assert adapter.stem not in imported


def test_a_name_stands_for_every_engine_unless_it_says_one() -> None:
    assert [_label(entry) for entry in named(["huey"])] == ["huey@redis", "huey@sqlite"]
    assert [_label(entry) for entry in named(["huey@sqlite", "huey"])] == ["huey@sqlite", "huey@redis"]
    assert named([]) == list(CATALOGUE)
    with pytest.raises(KeyError, match="no peer is called sidekiq"):
        named(["sidekiq"])


def test_what_cannot_be_installed_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (outcome,) = install.install(["bullmq"], tmp_path, progress=lambda line: None)
    assert not outcome.is_installed
    assert outcome.reason == "node is not on this machine"
    assert list(tmp_path.iterdir()) == []


def test_a_library_for_a_newer_python_is_not_forced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A newer Python is taken where there is one. What only has its name is none."""
    monkeypatch.setattr(sys, "version_info", (3, 11, 9, "final", 0))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    (tmp_path / "bin").mkdir()
    for version, exit_code in (("3.12", 127), ("3.13", 1), ("3.14", 1)):
        program = tmp_path / "bin" / f"python{version}"
        program.write_text(f"#!/bin/sh\nexit {exit_code}\n")
        program.chmod(0o755)
    lines: list[str] = []
    (outcome,) = install.install(["oban"], tmp_path, progress=lines.append)
    assert outcome.reason.startswith("oban==0.7.0 needs Python 3.12")
    assert lines == [f"oban: not installable: {outcome.reason}"]
    newer = tmp_path / "bin" / "python3.13"
    newer.write_text("#!/bin/sh\nexit 0\n")
    assert install._python_for(catalogue.GROUPS["oban"]) == str(newer)


def test_what_is_there_in_the_pinned_versions_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    (tmp_path / "bullmq").mkdir()
    stamp = tmp_path / "bullmq" / ".installed.json"
    stamp.write_text('["bullmq@6.7.0", "ioredis@5.11.1"]')
    (entry,) = named(["bullmq"])
    assert install.is_installed(entry, tmp_path)
    assert install.install(["bullmq"], tmp_path, progress=lambda line: None)[0].is_installed
    stamp.write_text('["bullmq@5.0.0", "ioredis@5.11.1"]')
    assert not install.is_installed(entry, tmp_path)
