"""binder/install.py decides rightly about torch, and says so; no pip runs here."""

from __future__ import annotations

import doctest
import importlib.util
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

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


class FakePip:
    """Stands in for ``subprocess.run``: keeps each command and what its constraints said."""

    def __init__(self, *, failing: str = "") -> None:
        self.failing = failing
        self.commands: list[str] = []
        self.pins: list[str] = []

    def __call__(self, command: list[str], **_options: object) -> SimpleNamespace:
        words = command[command.index("install") + 1 :]
        self.commands.append(" ".join(words))
        self.pins += [Path(word).read_text() for word in words if word.endswith("torch.txt")]
        return SimpleNamespace(returncode=1 if self.failing and self.failing in words else 0)


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> FakePip:
    fake = FakePip()
    monkeypatch.setattr(subprocess, "run", fake)
    return fake


def pretend(monkeypatch: pytest.MonkeyPatch, **versions: str | None) -> None:
    """Let the script find these packages, whatever is really installed."""
    monkeypatch.setattr(install, "installed_version", versions.get)


def test_the_docstring_examples_hold() -> None:
    assert doctest.testmod(install) == (0, 1)


@pytest.mark.parametrize("version", ["2.9.0", "2.13.0+cpu", "2.99.0", "2.10.0a0+git1", "10.0"])
def test_a_supported_torch_is_kept_whatever_the_machine(version: str) -> None:
    for platform, has_gpu in [("linux", False), ("linux", True), ("darwin", False)]:
        assert install.plan_torch(version, platform=platform, has_gpu=has_gpu) is Plan.KEEP


@pytest.mark.parametrize("installed", [None, "1.13.1", "2.8.0+cu128", "2.9.0.dev2025", "unknown"])
def test_without_a_supported_torch_the_machine_decides(installed: str | None) -> None:
    def plan(platform: str, *, has_gpu: bool) -> object:
        return install.plan_torch(installed, platform=platform, has_gpu=has_gpu)

    assert plan("linux", has_gpu=False) is Plan.CPU_BUILD
    assert plan("linux", has_gpu=True) is Plan.USUAL_BUILD
    assert plan("darwin", has_gpu=False) is Plan.USUAL_BUILD
    assert plan("win32", has_gpu=False) is Plan.USUAL_BUILD


def test_a_gpu_is_seen_in_the_drivers_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(install, "GPU_FOLDER", tmp_path)
    monkeypatch.setattr(install.shutil, "which", lambda _name: None)
    assert not install.has_nvidia_gpu()
    (tmp_path / "0000:01:00.0").mkdir()
    assert install.has_nvidia_gpu()


@pytest.mark.parametrize(("exit_code", "seen"), [(0, True), (9, False)])
def test_a_gpu_is_seen_by_nvidia_smi_only_when_it_succeeds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, exit_code: int, seen: bool
) -> None:
    monkeypatch.setattr(install, "GPU_FOLDER", tmp_path / "absent")
    monkeypatch.setattr(install.shutil, "which", lambda name: f"/usr/bin/{name}")
    answer = SimpleNamespace(returncode=exit_code)
    monkeypatch.setattr(subprocess, "run", lambda *_args, **_options: answer)
    assert install.has_nvidia_gpu() is seen


def test_the_cpu_build_comes_from_the_package_index_when_it_has_one(
    pip: FakePip, capsys: pytest.CaptureFixture[str]
) -> None:
    install.install_torch(Plan.CPU_BUILD)
    assert [command.split()[-1] for command in pip.commands] == ["torch==2.13.0+cpu"]
    assert capsys.readouterr().out == (
        "install: no NVIDIA GPU here: installing the CPU build of torch 2.13.0\n"
    )


def test_the_cpu_build_comes_from_pytorch_when_the_package_index_has_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = iter([1, 0])
    asked: list[list[str]] = []

    def run(command: list[str], **_options: object) -> SimpleNamespace:
        asked.append(command)
        return SimpleNamespace(returncode=next(answers))

    monkeypatch.setattr(subprocess, "run", run)
    install.install_torch(Plan.CPU_BUILD)
    assert "--index-url" not in asked[0]
    assert asked[1][-3:] == [
        "--index-url",
        "https://download.pytorch.org/whl/cpu",
        "torch==2.13.0+cpu",
    ]
    assert "the package index offers no such build: taking it from " in capsys.readouterr().out


@pytest.mark.parametrize("plan", [Plan.CPU_BUILD, Plan.USUAL_BUILD])
def test_where_no_torch_can_be_had_the_way_out_is_named(
    monkeypatch: pytest.MonkeyPatch, plan: object
) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_args, **_options: SimpleNamespace(returncode=1))
    with pytest.raises(install.InstallError) as caught:
        install.install_torch(plan)
    assert str(caught.value) == (
        "pip could not do it, its own reason is above; or install a torch of 2.9 or newer "
        "yourself and run this again: it will be kept"
    )


def test_the_usual_build_is_asked_for_where_a_gpu_can_use_it(pip: FakePip) -> None:
    install.install_torch(Plan.USUAL_BUILD)
    assert [command.split()[-1] for command in pip.commands] == ["torch==2.13.0"]


def test_a_supported_torch_is_named_and_pip_is_not_asked(
    pip: FakePip, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend(monkeypatch, torch="2.99.0")
    monkeypatch.setattr(install, "has_nvidia_gpu", lambda: False)
    assert install.ensure_torch() == "2.99.0"
    assert pip.commands == []
    said = capsys.readouterr().out
    assert said == "install: torch 2.99.0 is here and supported: it stays as it is\n"


def test_an_old_torch_is_named_and_replaced(
    pip: FakePip, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend(monkeypatch, torch="2.8.0")
    monkeypatch.setattr(install, "has_nvidia_gpu", lambda: True)
    install.ensure_torch()
    assert pip.commands[0].endswith("torch==2.13.0")
    assert "install: torch 2.8.0 is too old (2.9 needed)\n" in capsys.readouterr().out


def test_a_torch_that_did_not_arrive_is_an_error(
    pip: FakePip, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, torch=None)
    monkeypatch.setattr(install, "has_nvidia_gpu", lambda: False)
    with pytest.raises(install.InstallError, match="reported success, but torch is not there"):
        install.ensure_torch()
    assert len(pip.commands) == 1


def test_the_package_is_installed_with_torch_pinned_to_what_is_there(pip: FakePip) -> None:
    install.install_package("test", "2.99.0+local")
    (command,) = pip.commands
    assert f"-c {install.CONSTRAINTS}" in command
    assert command.endswith(f"-e {install.ROOT}[test]")
    assert pip.pins == ["torch==2.99.0+local\n"]


def test_a_failing_pip_ends_in_one_line_and_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend(monkeypatch, torch="2.13.0", pip="26.0")
    monkeypatch.setattr(install, "check_python", lambda: None)
    monkeypatch.setattr(subprocess, "run", FakePip(failing="-e"))
    assert install.main([]) == 1
    said = capsys.readouterr().err
    assert said == "install: stopped: pip could not do it, its own reason is above\n"


@pytest.mark.parametrize(
    ("arguments", "extras", "next_command"),
    [
        ([], "notebooks", "jupyter lab notebooks/00_quickstart.ipynb"),
        (["--test"], "test", "pytest"),
    ],
)
def test_it_closes_with_what_is_there_and_what_to_do_next(
    pip: FakePip,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    extras: str,
    next_command: str,
) -> None:
    pretend(monkeypatch, torch="2.13.0", nbddp="0.1.0")
    monkeypatch.setattr(install, "check_python", lambda: None)
    assert install.main(arguments) == 0
    assert pip.commands[-1].endswith(f"[{extras}]")
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "install: done: nbddp 0.1.0 with torch 2.13.0",
        f"install: next: {next_command}",
    ]


def test_an_old_python_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "OLDEST_PYTHON", (99, 0))
    with pytest.raises(install.InstallError, match=r"Python 3\.10 or newer is needed, this is 3"):
        install.check_python()


def test_a_python_without_pip_is_told_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(install.InstallError, match=r"no pip; add it with: python -m ensurepip"):
        install.check_python()


def test_the_operating_systems_python_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "EXTERNALLY-MANAGED").touch()
    monkeypatch.setattr(install.sysconfig, "get_path", lambda _name: str(tmp_path))
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    with pytest.raises(install.InstallError, match="belongs to the operating system"):
        install.check_python()
    monkeypatch.setattr(sys, "prefix", str(tmp_path))  # a virtual environment
    install.check_python()


def test_the_constraints_leave_torch_alone() -> None:
    names = [line.split("==")[0] for line in install.CONSTRAINTS.read_text().splitlines()]
    assert "ipykernel" in names
    assert "torch" not in names


@pytest.mark.skipif(sys.version_info < (3, 11), reason="there pip finds the newest by itself")
def test_the_constraints_are_the_versions_that_these_tests_run_with() -> None:
    text = install.CONSTRAINTS.read_text()
    lines = [line.partition(";")[0].split("==") for line in text.splitlines() if "==" in line]
    wanted = {name.strip(): version.strip() for name, version in lines}
    assert len(wanted) > 20
    assert {name: metadata.version(name) for name in wanted} == wanted
