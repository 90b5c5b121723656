"""Package managers in a cell: one rank of a node runs them, and all ranks can use the result."""

from __future__ import annotations

import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from drivers.ranks import Ranks

from nbddp.worker.installs import _MANAGER

pytestmark = pytest.mark.multiproc

# what pip does where two of them write into one environment
MANAGER = """#!/bin/sh
echo "$@" >> {log}
mkdir {lock} || exit 2
sleep 0.5
rmdir {lock}
exit {code}
"""


@pytest.fixture
def group(make_group: Callable[..., Ranks]) -> Ranks:
    """Three ranks."""
    return make_group(3)


def use_managers(group: Ranks, folder: Path, code: int = 0) -> Path:
    """Put package managers of our own into the ranks' path. Return the file that they write."""
    log = folder / "log"
    for name in ("pip", "apt-get", "conda"):
        script = folder / name
        script.write_text(MANAGER.format(log=log, lock=folder / "lock", code=code))
        script.chmod(0o755)
    group.run(f"import os\nos.environ['PATH'] = '{folder}:' + os.environ['PATH']", quiet=True)
    return log


@pytest.mark.parametrize(
    "command",
    [
        "!pip install -q mine",
        "!cd {folder} && PIP_NO_INPUT=1 pip install mine",
        "!apt-get -y install mine",
        "!conda install mine\n!conda install mine",
        "said = !pip install mine",
    ],
)
def test_one_rank_runs_it_and_the_others_wait(
    group: Ranks, tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    log = use_managers(group, tmp_path)
    group.run(command.replace("{folder}", str(tmp_path)))
    lines = log.read_text().splitlines()
    assert len(lines) == command.count("install")
    said = capsys.readouterr().out
    assert said.count("for all ranks of its node: no restart is needed") == len(lines)
    codes = group.run("_exit_code if 'said' not in globals() else len(said)", wants_value=True)
    assert codes.values() == [0] * 3


def test_a_failure_is_one_on_all_ranks_and_is_said(
    group: Ranks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = use_managers(group, tmp_path, code=3)
    group.run("!pip install mine")
    assert len(log.read_text().splitlines()) == 1
    said = capsys.readouterr().out
    assert (
        said.count("`pip install mine` for all ranks of its node: it failed with exit code 3") == 1
    )
    assert group.run("_exit_code", wants_value=True).values() == [3] * 3


def test_a_rank_that_installs_alone_waits_for_no_other(group: Ranks, tmp_path: Path) -> None:
    log = use_managers(group, tmp_path)
    group.run("if rank == 2:\n    !pip install one", quiet=True)
    group.run("!pip install two", ranks=[1, 2], quiet=True)
    assert log.read_text().splitlines() == ["install one", "install two"]


def wheel(folder: Path, version: str) -> Path:
    """Make a package that pip can install without a network."""
    path = folder / f"nbddp_mine-{version}-py3-none-any.whl"
    about = f"nbddp_mine-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("nbddp_mine.py", f"version = {version!r}\n")
        file.writestr(
            f"{about}/METADATA", f"Metadata-Version: 2.1\nName: nbddp-mine\nVersion: {version}\n"
        )
        file.writestr(
            f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        file.writestr(f"{about}/RECORD", "")
    return path


def test_pip_installs_once_and_says_what_the_ranks_need_to_see_it(
    group: Ranks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there = tmp_path / "there"
    group.run(f"import sys\nsys.path.insert(0, {str(there)!r})", quiet=True)
    install = f"%pip install --no-index --no-deps --upgrade --target {there} "
    group.run(install + str(wheel(tmp_path, "1.0")))
    said = capsys.readouterr().out
    assert said.count("Successfully installed nbddp-mine-1.0") == 1
    assert said.count("no restart is needed") == 1
    assert "%ddp restart" not in said
    version = group.run("import nbddp_mine\nnbddp_mine.version", wants_value=True)
    assert version.values() == ["1.0"] * 3
    group.run(install + str(wheel(tmp_path, "2.0")))
    said = capsys.readouterr().out
    assert said.count("run `%ddp restart` to reload nbddp_mine (already imported)") == 1


@pytest.mark.parametrize(
    ("command", "is_manager"),
    [
        (f"{sys.executable} -m pip install x", True),
        ('"/opt/my python/bin/python" -m pip install x', True),
        ("sudo apt install -y x", True),
        ("DEBIAN_FRONTEND=noninteractive apt-get -qq install x", True),
        ("yes | conda install x", True),
        ("pip3.11 install x", True),
        ("uv pip install x", True),
        ("uv run train.py", False),
        ("conda run -n base python train.py", False),
        ("echo pip install x", False),
        ("cat pip.log", False),
        ("python -m pipeline", False),
        ("./pipeline install", False),
        ("nvidia-smi", False),
    ],
)
def test_a_package_manager_is_told_from_other_commands(command: str, is_manager: bool) -> None:
    assert bool(_MANAGER.search(command)) == is_manager
