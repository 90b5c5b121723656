"""The scripts of the repository: the installer, and the GPU test day."""

import dataclasses
import os
import re
import shutil
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from binder import install
from tools import mutants
from tools.gpu_day import Part, run, verdict_of

CPU, USUAL = "torch==2.13.0+cpu", "torch==2.13.0"
FROM_PYTORCH = f"--index-url https://download.pytorch.org/whl/cpu {CPU}"
# by machine: its platform and torch, whether it has a GPU, what pip cannot install, and then the
# exit status and the commands that install torch
MACHINES: dict[str, tuple[str, str | None, bool, str, int, list[str]]] = {
    "no GPU": ("linux", None, False, "", 0, [CPU]),
    "an index without CPU builds": ("linux", None, False, f"deps {CPU}", 0, [CPU, FROM_PYTORCH]),
    "no index": ("linux", None, False, CPU, 1, [CPU, FROM_PYTORCH]),
    "a GPU": ("linux", None, True, "", 0, [USUAL]),
    "macOS": ("darwin", None, False, "", 0, [USUAL]),
    "an installed torch": ("linux", "2.99.0+local", False, "", 0, []),
    "a package that fails": ("linux", "2.13.0", False, "-e", 1, []),
}


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize(("arguments", "extras"), [([], "notebooks"), (["--test"], "test")])
def test_installer_keeps_an_installed_torch_or_installs_the_fitting_build(
    name: str, arguments: list[str], extras: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    platform, torch, has_gpu, refused, code, torches = MACHINES[name]
    versions, commands = [torch], []
    pins: list[str] = []

    def run(command: list[str], **_options: object) -> SimpleNamespace:
        words = command[command.index("install") + 3 :]
        commands.append(" ".join(words))
        pins.extend(Path(word).read_text() for word in words if word.endswith("torch.txt"))
        fails = bool(refused) and refused in commands[-1]
        if words[-1].startswith("torch==") and not fails:
            versions.append(words[-1].removeprefix("torch=="))
        return SimpleNamespace(returncode=int(fails))

    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(sys, "argv", ["install.py", *arguments])
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(install, "installed_torch", lambda: versions[-1])
    monkeypatch.setattr(install, "has_nvidia_gpu", lambda: has_gpu)
    assert install.main() == code
    assert [each for each in commands if " -e " not in each] == [
        f"--no-deps {version}" for version in torches
    ]
    assert pins == ([] if name == "no index" else [f"torch=={versions[-1]}\n"])
    if pins:
        assert f"-c {install.CONSTRAINTS}" in commands[-1]
        assert commands[-1].endswith(f"-e {install.ROOT}[{extras}]")


def test_gpu_is_detected_by_nvidia_smi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    assert not install.has_nvidia_gpu()
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    for exit_code, is_seen in ((0, True), (9, False)):
        answer = SimpleNamespace(returncode=exit_code)
        monkeypatch.setattr(subprocess, "run", lambda *_args, answer=answer, **_options: answer)
        assert install.has_nvidia_gpu() is is_seen


def test_constraints_match_the_installed_versions_and_do_not_pin_torch() -> None:
    text = install.CONSTRAINTS.read_text()
    lines = [line.partition(";")[0].split("==") for line in text.splitlines() if "==" in line]
    wanted = {name.strip(): version.strip() for name, version in lines}
    assert len(wanted) > 20
    assert "torch" not in wanted
    assert {name: metadata.version(name) for name in wanted} == wanted


ROOT = Path(__file__).parents[1]


def test_modules_that_mutants_break_and_their_tests_exist() -> None:
    places = [
        (ROOT / "nbddp" / file, ROOT / "tests" / tests) for file, tests in mutants.TARGETS.values()
    ]
    assert [each for each in places if not (each[0].is_file() and each[1].is_dir())] == []


@pytest.mark.process
@pytest.mark.full
@pytest.mark.timeout(180)
def test_gpu_day_without_a_gpu_skips_each_part() -> None:
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHON": sys.executable}
    day = ["bash", str(ROOT / "tools" / "gpu_day.sh")]
    done = subprocess.run(day, env=env, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"^\| (.+) \| (.+) \| 0 s \|$", done.stdout, re.MULTILINE)
    assert [verdict for _, verdict in rows] == ["no GPU here"] * 8
    assert "pytest -m gpu" in [title for title, _ in rows]
    assert re.search(r"^\* torch \d.*Python \d", done.stdout, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(
    ("status", "output", "verdict"),
    [
        (0, "....\n4 passed, 1 skipped in 3.21s\n", "4 passed, 1 skipped"),
        (1, "=== 1 failed, 2 passed in 0.50s ===\n", "FAILED: 1 failed, 2 passed"),
        (0, "steps per second: 56\n", "passed"),
        (3, "Traceback\n", "FAILED: exit status 3"),
    ],
)
def test_gpu_day_part_has_a_verdict(status: int, output: str, verdict: str) -> None:
    assert verdict_of(status, output) == verdict


@pytest.mark.full
def test_gpu_day_ends_slow_parts_and_keeps_its_time_limit() -> None:
    slow = Part("Slow", ("-c", "import time; print('began', flush=True); time.sleep(60)"), 11.0)
    gone = run(slow, 1, time.monotonic())
    assert gone.verdict == "not run: the ten minutes are over"
    assert run(slow, 0, time.monotonic() + 100).verdict == "no GPU here"
    missing = dataclasses.replace(slow, package="no_such_package")
    verdict = run(missing, 1, time.monotonic() + 100).verdict
    assert verdict == "not run: no_such_package is not installed"
    several = dataclasses.replace(slow, gpus=2)
    assert run(several, 1, time.monotonic() + 100).verdict == "needs 2 GPUs, here is 1"
    ended = run(slow, 1, time.monotonic() + 100)
    assert (ended.verdict, ended.output) == ("FAILED: not over after 11 s", "began\n")
    assert ended.has_failed
