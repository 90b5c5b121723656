"""Install nbddp from this clone into the Python that runs this script.

    python binder/install.py           # the package and the packages that its notebooks need
    python binder/install.py --test    # also the packages that its tests need

A supported torch that is already installed stays unchanged, even if it is newer than the tested
one. Without one, the tested version is installed: its CPU build on a Linux machine without an
NVIDIA GPU, where the usual build would bring several GB of CUDA. All other packages have the
versions in ``constraints.txt`` next to this script. It needs pip and the standard library.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from enum import Enum
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = Path(__file__).resolve().with_name("constraints.txt")
OLDEST_PYTHON = (3, 10)
OLDEST_TORCH = (2, 9)
NEEDED = "{}.{}".format(*OLDEST_TORCH)
TESTED_TORCH = "2.13.0"
CPU_BUILD = f"torch=={TESTED_TORCH}+cpu"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
GPU_FOLDER = Path("/proc/driver/nvidia/gpus")
OWN_TORCH = f"; or install torch {NEEDED} or newer yourself and run this again: it will be kept"


class InstallError(Exception):
    """The installation cannot continue; the message says why and what to do."""


class TorchPlan(Enum):
    """What to do about torch."""

    KEEP = "leave the installed torch as it is"
    USUAL_BUILD = "install the tested version from the package index"
    CPU_BUILD = "install the build without CUDA"


def is_supported(version: str) -> bool:
    """Return whether nbddp supports this version of torch.

    >>> [is_supported(version) for version in ("2.8.0", "2.9.0rc1", "2.9.0+cu128", "3.0.0a0+git1")]
    [False, False, True, True]
    """
    if re.match(rf"{re.escape(NEEDED)}(\.0)?(a|b|rc|\.dev)", version):
        return False  # pip also sorts a pre-release before its release
    found = re.match(r"(\d+)\.(\d+)", version)
    return found is not None and (int(found[1]), int(found[2])) >= OLDEST_TORCH


def plan_torch(installed: str | None, *, platform: str, has_gpu: bool) -> TorchPlan:
    """Decide what to do about torch; only Linux has builds of very different sizes."""
    if installed is not None and is_supported(installed):
        return TorchPlan.KEEP
    if platform == "linux" and not has_gpu:
        return TorchPlan.CPU_BUILD
    return TorchPlan.USUAL_BUILD


def installed_version(package: str) -> str | None:
    """Return the version of a package on disk, without importing it."""
    importlib.invalidate_caches()  # pip may have installed it a moment ago
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def has_nvidia_gpu() -> bool:
    """Return whether this machine has an NVIDIA GPU."""
    if GPU_FOLDER.is_dir() and any(GPU_FOLDER.iterdir()):
        return True
    command = shutil.which("nvidia-smi")
    if command is None:
        return False
    return subprocess.run([command, "-L"], capture_output=True, check=False).returncode == 0


def run_pip(*arguments: str, way_out: str = "") -> None:
    """Run ``pip install`` and show only its errors."""
    if _pip_install(*arguments, stderr=None) != 0:
        raise InstallError(f"pip failed, its reason is above{way_out}")


def try_pip(*arguments: str) -> bool:
    """Run ``pip install``; return whether it succeeded."""
    return _pip_install(*arguments, stderr=subprocess.DEVNULL) == 0


def _pip_install(*arguments: str, stderr: int | None) -> int:
    command = [sys.executable, "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
    return subprocess.run([*command, *arguments], stderr=stderr, check=False).returncode


def say(line: str) -> None:
    """Print one line at once, even if the output is a pipe."""
    print(f"install: {line}", flush=True)


def check_python() -> None:
    """Refuse early, with a short message, what pip would refuse late."""
    if sys.version_info < OLDEST_PYTHON:
        raise InstallError(f"Python 3.10 or newer is needed, this is {sys.version.split()[0]}")
    if importlib.util.find_spec("pip") is None:
        raise InstallError("this Python has no pip; add it with: python -m ensurepip")
    marker = Path(sysconfig.get_path("stdlib")) / "EXTERNALLY-MANAGED"
    if sys.prefix == sys.base_prefix and marker.exists():
        raise InstallError(
            "this Python belongs to the operating system; make an environment first: "
            "python3 -m venv .venv && . .venv/bin/activate"
        )


def ensure_torch() -> str:
    """Keep a supported torch or install the tested one; return its version."""
    installed = installed_version("torch")
    plan = plan_torch(installed, platform=sys.platform, has_gpu=has_nvidia_gpu())
    if plan is TorchPlan.KEEP:
        say(f"torch {installed} is installed and supported: it stays as it is")
    else:
        too_old = f"torch {installed} is too old ({NEEDED} needed)"
        say("torch is not installed" if installed is None else too_old)
        install_torch(plan)
    version = installed_version("torch")
    if version is None:
        raise InstallError("pip reported success, but torch is not installed")
    return version


def install_torch(plan: TorchPlan) -> None:
    """Install torch alone; its dependencies come with the package.

    Only CPU builds are called ``+cpu``, so the request cannot bring CUDA by mistake. The index is
    not
    asked first: older versions of pip download everything to answer.
    """
    if plan is TorchPlan.USUAL_BUILD:
        say(f"installing torch {TESTED_TORCH} from the package index")
        run_pip("--no-deps", f"torch=={TESTED_TORCH}", way_out=OWN_TORCH)
        return
    say(f"no NVIDIA GPU here: installing the CPU build of torch {TESTED_TORCH}")
    if not try_pip("--no-deps", CPU_BUILD):
        say(f"the package index has no such build: taking it from {CPU_INDEX}")
        run_pip("--no-deps", "--index-url", CPU_INDEX, CPU_BUILD, way_out=OWN_TORCH)


def install_package(extras: str, torch_version: str) -> None:
    """Install this clone, editable, so that no dependency replaces torch."""
    say(f"installing nbddp[{extras}] from {ROOT} (pip is quiet; this can take minutes)")
    with tempfile.TemporaryDirectory() as folder:
        pin = Path(folder, "torch.txt")
        pin.write_text(f"torch=={torch_version}\n", encoding="utf-8")
        run_pip("-c", str(CONSTRAINTS), "-c", str(pin), "-e", f"{ROOT}[{extras}]")


def install(extras: str, next_command: str) -> None:
    """Install everything, and print the installed versions."""
    check_python()
    torch_version = ensure_torch()
    install_package(extras, torch_version)
    say(f"done: nbddp {installed_version('nbddp')} with torch {torch_version}")
    say(f"next: {next_command}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line and install; print a refusal as one line."""
    parser = argparse.ArgumentParser(description="Install nbddp from this clone.")
    parser.add_argument(
        "--test", action="store_true", help="also install the packages that the tests need"
    )
    options = parser.parse_args(arguments)
    try:
        if options.test:
            install("test", "pytest")
        else:
            install("notebooks", "jupyter lab notebooks/00_quickstart.ipynb")
    except InstallError as error:
        print(f"install: stopped: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
