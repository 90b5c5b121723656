"""Package managers in a cell: one rank of a node runs them, and all ranks can use the result."""

import re
import sys
import zipfile
from pathlib import Path

import pytest
from drivers.ranks import Capture, MakeRanks, Ranks
from syrupy.assertion import SnapshotAssertion

from nbddp.worker.cell.shell_commands import _PACKAGE_MANAGER

# what pip does where two of them write into one environment
MANAGER = """#!/bin/sh
echo "$@" >> {log}
mkdir {lock} || exit 2
sleep 0.5
rmdir {lock}
exit {code}
"""


@pytest.fixture
def group(make_group: MakeRanks) -> Ranks:
    return make_group(3)


def use_managers(group: Ranks, folder: Path, code: int = 0) -> Path:
    """Put fake package managers into the ranks' path. Return the file that they write."""
    log = folder / "log"
    for name in ("pip", "apt-get", "conda"):
        script = folder / name
        script.write_text(MANAGER.format(log=log, lock=folder / "lock", code=code))
        script.chmod(0o755)
    group.run(f"import os\nos.environ['PATH'] = '{folder}:' + os.environ['PATH']", quiet=True)
    return log


def told(capsys: Capture) -> list[str]:
    """Return the nbddp messages about commands; any rank can have run them."""
    return re.findall(r"^\[rank \d\] nbddp: rank \d (.*)", capsys.readouterr().out, re.MULTILINE)


def test_one_rank_runs_the_package_manager_and_the_others_wait(
    group: Ranks, tmp_path: Path, capsys: Capture, snapshot: SnapshotAssertion
) -> None:
    log = use_managers(group, tmp_path)
    for command in (
        "!pip install -q mine",
        f"!cd {tmp_path} && PIP_NO_INPUT=1 pip install mine",
        "!apt-get -y install mine",
        "!conda install mine\n!conda install mine",
        "said = !pip install mine",
    ):
        log.write_text("")
        capsys.readouterr()
        group.run(command)
        remarks = told(capsys)
        assert len(log.read_text().splitlines()) == len(remarks) == command.count("install"), (
            command
        )
        codes = group.evaluate("_exit_code if 'said' not in globals() else len(said)")
        assert codes == [0] * 3, command
    use_managers(group, tmp_path, code=3)
    group.run("!pip install mine")
    assert group.evaluate("_exit_code") == [3] * 3
    assert [*remarks, *told(capsys)] == snapshot


def test_install_on_some_ranks_does_not_wait_for_the_others(group: Ranks, tmp_path: Path) -> None:
    log = use_managers(group, tmp_path)
    group.run("if rank == 2:\n    !pip install one", quiet=True)
    group.run("!pip install two", ranks=[1, 2], quiet=True)
    assert log.read_text().splitlines() == ["install one", "install two"]


def wheel(folder: Path, version: str) -> Path:
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


def test_pip_installs_once_and_recommends_a_restart_for_an_upgrade(
    group: Ranks, tmp_path: Path, capsys: Capture
) -> None:
    there = tmp_path / "there"
    group.run(f"import sys\nsys.path.insert(0, {str(there)!r})", quiet=True)
    install = f"%pip install --no-index --no-deps --upgrade --target {there} "
    group.run(install + str(wheel(tmp_path, "1.0")))
    output = capsys.readouterr().out
    assert output.count("Successfully installed nbddp-mine-1.0") == 1
    assert "restart()" not in output
    assert group.evaluate("import nbddp_mine\nnbddp_mine.version") == ["1.0"] * 3
    group.run(install + str(wheel(tmp_path, "2.0")))
    [remark] = told(capsys)
    assert re.search(r"`group.restart\(\)` .*nbddp_mine", remark)


def test_package_manager_commands_are_recognized() -> None:
    for command, is_manager in {
        f"{sys.executable} -m pip install x": True,
        '"/opt/my python/bin/python" -m pip install x': True,
        "sudo apt install -y x": True,
        "DEBIAN_FRONTEND=noninteractive apt-get -qq install x": True,
        "yes | conda install x": True,
        "pip3.11 install x": True,
        "uv pip install x": True,
        "uv run train.py": False,
        "conda run -n base python train.py": False,
        "echo pip install x": False,
        "cat pip.log": False,
        "python -m pipeline": False,
        "./pipeline install": False,
        "nvidia-smi": False,
    }.items():
        assert bool(_PACKAGE_MANAGER.search(command)) == is_manager, command
