"""Stale files of listeners, agents and nodes are removed, and files in use are kept."""

import errno
import fcntl
import os
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
from drivers.inside import imported
from processes import wait_until

from nbddp.extensions.nodes import stale_files
from nbddp.extensions.nodes.local_agents import LocalAgents
from nbddp.extensions.nodes.stale_files import MAX_AGE, LockedPath, remove_stale_files


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """With a log folder of a node, the log of an agent and a join file, all of them old."""
    node = tmp_path / ".nbddp" / "nodes" / "gpu-07-4711"
    (node / "20260101-000000" / "attempt-1.0").mkdir(parents=True)
    (node / "20260101-000000" / "attempt-1.0" / "rank0.log").write_text("a line\n")
    for name in ("agents/7f3a9c01-0.log", "join/7f3a9c01"):
        path = tmp_path / ".nbddp" / name
        path.parent.mkdir()
        path.write_text("x")
    for path in things(tmp_path):
        age(path)
    return tmp_path


def things(home: Path) -> list[Path]:
    return sorted((home / ".nbddp").glob("*/*"))


def age(path: Path, seconds: float = MAX_AGE + 10) -> None:
    at = time.time() - seconds
    os.utime(path, (at, at))


@pytest.mark.parametrize("past", [-60, 10], ids=["younger", "older"])
def test_old_unlocked_files_are_removed(home: Path, past: float) -> None:
    for path in things(home):
        age(path, MAX_AGE + past)
    remove_stale_files(home)
    assert len(things(home)) == (3 if past < 0 else 0)


def test_files_locked_by_a_killed_process_are_removed(home: Path) -> None:
    code = (
        f"import sys, time\nfrom pathlib import Path\n{imported(LockedPath)}"
        "held = [LockedPath(Path(path)) for path in sys.argv[1:]]\n"
        "print(flush=True)\ntime.sleep(100)"
    )
    command = [sys.executable, "-c", code, *map(str, things(home))]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        remove_stale_files(home)
        assert len(things(home)) == 3
        holder.kill()
    remove_stale_files(home)
    assert things(home) == []


def test_files_with_other_names_and_symlinks_are_kept(
    home: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    remove_stale_files(home)
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "kept"
    elsewhere.mkdir()
    link = home / ".nbddp" / "nodes" / "gpu-07-4712"
    link.symlink_to(elsewhere)
    others = [home / ".nbddp" / name for name in ("nodes/mine", "agents/notes.log", "join/README")]
    for path in others:
        path.write_text("x")
        age(path)
    os.utime(link, (0, 0), follow_symlinks=False)
    remove_stale_files(home)
    assert elsewhere.is_dir()
    assert things(home) == sorted([*others, link])


def test_without_file_locks_recently_touched_files_are_kept(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(errno.ENOLCK, "no locks")))
    monkeypatch.setattr(stale_files, "TOUCH_PERIOD", 0.0)
    lives, *stale = things(home)
    held = LockedPath(lives)
    held.touch()
    remove_stale_files(home)
    assert things(home) == [lives]
    assert not any(path.exists() for path in stale)
    held.close()


def test_the_log_of_a_running_agent_is_not_removed(tmp_path: Path) -> None:
    log = tmp_path / ".nbddp" / "agents" / "7f3a9c01"
    agents = LocalAgents([], log)
    agents._command = [sys.executable, "-c", "import time; time.sleep(100)"]
    agents.start(1)
    [agent] = agents._agents
    age(agent.log)
    remove_stale_files(tmp_path)
    assert agent.log.exists()
    agent.process.kill()
    agents.close()
    assert wait_until(lambda: agent.process.poll() is not None)
    remove_stale_files(tmp_path)
    assert not agent.log.exists()
