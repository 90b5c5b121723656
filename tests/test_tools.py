"""The scripts of the repository: the installer, and the GPU test day."""

from __future__ import annotations

import dataclasses
import doctest
import importlib.util
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from refusals import refusal
from syrupy.assertion import SnapshotAssertion

from tools.gpu_day import Part, run, verdict_of

SCRIPT = Path(__file__).parent.parent / "binder" / "install.py"


def load() -> ModuleType:
    """Import the script, which is in no package."""
    spec = importlib.util.spec_from_file_location("binder_install", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


install = load()
Plan = install.TorchPlan


class Machine:
    """A machine on which pip is asked, and does nothing.

    Args:
        torch: the version that is there.
        has_gpu: whether it has an NVIDIA GPU.
        refuses: what pip cannot install: each command that has one of these words.
        arrives: whether torch is there afterwards.
    """

    def __init__(
        self,
        torch: str | None = None,
        *,
        has_gpu: bool = False,
        refuses: Sequence[str] = (),
        arrives: bool = True,
    ) -> None:
        self.versions: dict[str, str | None] = {"torch": torch, "nbddp": "0.1.0"}
        self.has_gpu, self.refuses, self.arrives = has_gpu, refuses, arrives
        self.commands: list[str] = []
        self.pins: list[str] = []

    def run(self, command: list[str], **_options: object) -> SimpleNamespace:
        words = command[command.index("install") + 3 :]
        self.commands.append(" ".join(words))
        self.pins += [Path(word).read_text() for word in words if word.endswith("torch.txt")]
        fails = any(word in self.commands[-1] for word in self.refuses)
        if words[-1].startswith("torch==") and self.arrives and not fails:
            self.versions["torch"] = words[-1].removeprefix("torch==")
        return SimpleNamespace(returncode=int(fails))


def run_on(machine: Machine, *arguments: str) -> int:
    """Install there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "platform", "linux")
        patch.setattr(subprocess, "run", machine.run)
        patch.setattr(install, "installed_version", machine.versions.get)
        patch.setattr(install, "has_nvidia_gpu", lambda: machine.has_gpu)
        patch.setattr(install, "check_python", lambda: None)
        code: int = install.main(arguments)
    return code


def test_docstring_examples_pass() -> None:
    assert doctest.testmod(install) == (0, 1)


@pytest.mark.parametrize(
    ("installed", "is_kept"),
    [
        *((each, True) for each in ("2.9.0", "2.13.0+cpu", "2.99.0", "2.10.0a0+git1", "10.0")),
        *((each, False) for each in (None, "1.13.1", "2.8.0+cu128", "2.9.0.dev2025", "unknown")),
    ],
)
def test_supported_torch_is_kept_else_chosen_for_the_machine(
    installed: str | None, is_kept: bool
) -> None:
    for platform, has_gpu, otherwise in (
        ("linux", False, Plan.CPU_BUILD),
        ("linux", True, Plan.USUAL_BUILD),
        ("darwin", False, Plan.USUAL_BUILD),
        ("win32", False, Plan.USUAL_BUILD),
    ):
        plan = install.plan_torch(installed, platform=platform, has_gpu=has_gpu)
        assert plan is (Plan.KEEP if is_kept else otherwise)


def test_gpu_is_detected_by_driver_folder_or_nvidia_smi(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(install, "GPU_FOLDER", tmp_path / "gpus")
    monkeypatch.setattr(install.shutil, "which", lambda _name: None)
    assert not install.has_nvidia_gpu()
    monkeypatch.setattr(install.shutil, "which", lambda name: f"/usr/bin/{name}")
    for exit_code, is_seen in ((0, True), (9, False)):
        answer = SimpleNamespace(returncode=exit_code)
        monkeypatch.setattr(subprocess, "run", lambda *_args, answer=answer, **_options: answer)
        assert install.has_nvidia_gpu() is is_seen
    (tmp_path / "gpus" / "0000:01:00.0").mkdir(parents=True)
    assert install.has_nvidia_gpu()


CPU, USUAL = "torch==2.13.0+cpu", "torch==2.13.0"
FROM_PYTORCH = f"--index-url https://download.pytorch.org/whl/cpu {CPU}"
MACHINES: dict[str, tuple[dict[str, Any], int, list[str]]] = {
    "no GPU": ({}, 0, [CPU]),
    "no GPU, and an index without CPU builds": (
        {"refuses": [f"--no-deps {CPU}"]},
        0,
        [CPU, FROM_PYTORCH],
    ),
    "no GPU, and no index": ({"refuses": [CPU]}, 1, [CPU, FROM_PYTORCH]),
    "a GPU": ({"has_gpu": True}, 0, [USUAL]),
    "a GPU, and no index": ({"has_gpu": True, "refuses": [USUAL]}, 1, [USUAL]),
    "an old torch": ({"torch": "2.8.0", "has_gpu": True}, 0, [USUAL]),
    "a supported torch": ({"torch": "2.99.0+local"}, 0, []),
    "a torch that does not arrive": ({"arrives": False}, 1, [CPU]),
    "a package that fails": ({"torch": "2.13.0", "refuses": ["-e"]}, 1, []),
}


@pytest.mark.parametrize("name", MACHINES)
def test_installer_installs_torch_if_needed_and_reports_it(
    name: str, capsys: pytest.CaptureFixture[str], snapshot: SnapshotAssertion
) -> None:
    options, code, torches = MACHINES[name]
    machine = Machine(**options)
    assert run_on(machine) == code
    assert [each for each in machine.commands if " -e " not in each] == [
        f"--no-deps {each}" for each in torches
    ]
    said = capsys.readouterr()
    assert {"out": said.out.replace(str(install.ROOT), "ROOT"), "err": said.err} == snapshot
    assert (said.err == "") is (code == 0)
    if machine.pins:
        assert machine.pins == [f"torch=={machine.versions['torch']}\n"]


@pytest.mark.parametrize(
    ("arguments", "extras", "next_command"),
    [
        ([], "notebooks", "jupyter lab notebooks/00_quickstart.ipynb"),
        (["--test"], "test", "pytest"),
    ],
)
def test_installer_uses_constraints_and_prints_the_next_command(
    capsys: pytest.CaptureFixture[str], arguments: list[str], extras: str, next_command: str
) -> None:
    machine = Machine("2.99.0+local")
    assert run_on(machine, *arguments) == 0
    [command] = machine.commands
    assert f"-c {install.CONSTRAINTS}" in command
    assert command.endswith(f"-e {install.ROOT}[{extras}]")
    assert machine.pins == ["torch==2.99.0+local\n"]
    assert capsys.readouterr().out.endswith(f" {next_command}\n")


def test_unsuitable_python_is_refused_with_a_solution(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, snapshot: SnapshotAssertion
) -> None:
    (tmp_path / "EXTERNALLY-MANAGED").touch()
    monkeypatch.setattr(install.sysconfig, "get_path", lambda _name: str(tmp_path))
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    said = [refusal(install.InstallError, install.check_python)]
    monkeypatch.setattr(sys, "prefix", str(tmp_path))  # a virtual environment
    install.check_python()
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    said.append(refusal(install.InstallError, install.check_python))
    assert said == snapshot
    monkeypatch.setattr(install, "OLDEST_PYTHON", (99, 0))
    assert "Python 3.10" in refusal(install.InstallError, install.check_python)


def test_constraints_do_not_pin_torch() -> None:
    names = [line.split("==")[0] for line in install.CONSTRAINTS.read_text().splitlines()]
    assert "ipykernel" in names
    assert "torch" not in names


@pytest.mark.skipif(sys.version_info < (3, 11), reason="there pip finds the newest by itself")
def test_constraints_match_the_installed_versions() -> None:
    text = install.CONSTRAINTS.read_text()
    lines = [line.partition(";")[0].split("==") for line in text.splitlines() if "==" in line]
    wanted = {name.strip(): version.strip() for name, version in lines}
    assert len(wanted) > 20
    assert {name: metadata.version(name) for name in wanted} == wanted


ROOT = Path(__file__).parents[1]


@pytest.mark.process
@pytest.mark.full
@pytest.mark.timeout(180)
def test_gpu_day_without_a_gpu_skips_each_part() -> None:
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHON": sys.executable}
    day = ["bash", str(ROOT / "tools" / "gpu_day.sh")]
    done = subprocess.run(day, env=env, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"^\| (.+) \| (.+) \| 0 s \|$", done.stdout, re.MULTILINE)
    assert [verdict for _, verdict in rows] == ["no GPU here"] * 7
    assert "pytest -m gpu" in [title for title, _ in rows]
    assert re.search(r"^\* torch \d.*Python \d", done.stdout, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(
    ("status", "said", "verdict"),
    [
        (0, "....\n4 passed, 1 skipped in 3.21s\n", "4 passed, 1 skipped"),
        (1, "=== 1 failed, 2 passed in 0.50s ===\n", "FAILED: 1 failed, 2 passed"),
        (0, "steps per second: 56\n", "passed"),
        (3, "Traceback\n", "FAILED: exit status 3"),
    ],
)
def test_gpu_day_part_has_a_verdict(status: int, said: str, verdict: str) -> None:
    assert verdict_of(status, said) == verdict


@pytest.mark.full
def test_gpu_day_ends_slow_parts_and_keeps_its_time_limit() -> None:
    slow = Part("Slow", ("-c", "import time; print('began', flush=True); time.sleep(60)"), 11.0)
    gone = run(slow, 1, time.monotonic())
    assert gone.verdict == "not run: the ten minutes are over"
    assert run(slow, 0, time.monotonic() + 100).verdict == "no GPU here"
    several = dataclasses.replace(slow, gpus=2)
    assert run(several, 1, time.monotonic() + 100).verdict == "needs 2 GPUs, here is 1"
    ended = run(slow, 1, time.monotonic() + 100)
    assert (ended.verdict, ended.output) == ("FAILED: not over after 11 s", "began\n")
    assert ended.has_failed
