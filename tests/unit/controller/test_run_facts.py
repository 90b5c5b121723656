"""The facts of run.json: those of rank 0's machine, and of git, which is never waited for."""

import subprocess
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from fakes import FakeLauncher, FakeLink, fake_session, ready
from processes import wait_until

from nbddp.controller import run_facts as origins
from nbddp.controller.run_facts import MAX_DIFF, git_origin, known_facts, start_git_query
from nbddp.record.rank_monitor import RankMonitor
from nbddp.record.run_folder import read_facts
from nbddp.wire.group_spec import GroupSpec


@pytest.fixture
def git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    for name in ("GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM"):
        monkeypatch.setenv(name, "/dev/null")
    somebody = ("-c", "user.name=Somebody", "-c", "user.email=somebody@example.org")

    def run(*words: str) -> str:
        return subprocess.check_output(["git", *somebody, *words], cwd=tmp_path, text=True).strip()

    run("init", "-q", "-b", "main")
    (tmp_path / "train.py").write_text("lr = 0.1\n")
    (tmp_path / "notes.ipynb").write_text("{}\n")
    run("add", ".")
    run("commit", "-q", "-m", "first")
    return run


@pytest.mark.usefixtures("git")
def test_the_git_facts_have_the_changed_files_and_the_diff_without_notebooks(
    tmp_path: Path,
) -> None:
    (tmp_path / "train.py").write_text("lr = 0.2\n")
    (tmp_path / "notes.ipynb").write_text('{"outputs": []}\n')
    (tmp_path / "below").mkdir()
    facts = git_origin(tmp_path / "below")
    assert (facts["dirty"], facts["changed"]) == (True, ["notes.ipynb", "train.py"])
    assert "-lr = 0.1\n+lr = 0.2" in facts["diff"]
    assert "outputs" not in facts["diff"]
    assert facts["diff_is_cut"] is False
    (tmp_path / "train.py").write_text("lr = 0.2\n" * 100_000)
    facts = git_origin(tmp_path)
    assert len(facts["diff"]) == MAX_DIFF
    assert facts["diff_is_cut"] is True


def test_a_repository_without_commits_records_the_error_of_git(
    tmp_path: Path, snapshot: Any
) -> None:
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    assert git_origin(tmp_path) == snapshot


@pytest.mark.usefixtures("git")
def test_a_slow_or_missing_git_is_recorded_as_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = tmp_path / "bin" / "git"
    slow.parent.mkdir()
    slow.write_text("#!/bin/sh\nexec sleep 600\n")
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", f"{slow.parent}:/usr/bin:/bin")
    monkeypatch.setattr(origins, "GIT_TIMEOUT", 0.2)
    assert "0.2 s" in git_origin(tmp_path)["error"]
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "No such file or directory" in git_origin(tmp_path)["error"]


def test_no_git_process_is_started_without_a_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("git was started"))
    monkeypatch.setattr(threading, "Thread", lambda *_, **__: pytest.fail("a thread was started"))
    start_git_query(tmp_path, pytest.fail)


def test_the_commit_and_branch_of_a_clean_tree_are_recorded_by_a_thread_of_their_own(
    folder: Path, git: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []

    def look(path: Path) -> dict[str, Any]:
        found.append((threading.current_thread().name, path))
        return git_origin(path)

    monkeypatch.setattr(origins, "git_origin", look)
    session = fake_session(FakeLauncher(), FakeLink())
    session.start(GroupSpec(nproc=1))
    assert session.event_log.path is not None
    facts = partial(read_facts, session.event_log.path)
    assert wait_until(lambda: "git" in facts())
    commit = git("rev-parse", "HEAD")
    assert facts()["git"] == {"commit": commit, "branch": "main", "dirty": False, "changed": []}
    assert found == [("nbddp-git", folder)]
    session.close()


def test_the_cores_and_threads_of_a_run_are_those_of_rank_0_not_of_the_kernel() -> None:
    far_away = {1: ready(1), 0: replace(ready(0), cores=96, threads=12)}
    facts = known_facts(far_away, RankMonitor(is_stopped=lambda _rank: False))
    assert (facts["cores"], facts["threads"]) == (96, 12)
