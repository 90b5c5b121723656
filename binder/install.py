"""Install nbddp from this clone into the Python that runs this script.

    python binder/install.py           # the package and the packages that its notebooks need
    python binder/install.py --test    # also the packages that its tests need

An installed torch stays unchanged. Without one, the tested version is installed: its CPU build on a
Linux machine without an NVIDIA GPU, where the usual build would bring several GB of CUDA. All other
packages have the versions in ``constraints.txt`` next to this script.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from argparse import ArgumentParser
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = Path(__file__).resolve().with_name("constraints.txt")
TESTED_TORCH = "2.13.0"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"


def installed_torch() -> str | None:
    """Return the version of torch on disk, without importing it."""
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None


def has_nvidia_gpu() -> bool:
    """Return whether NVIDIA's driver lists a GPU."""
    command = shutil.which("nvidia-smi")
    return command is not None and subprocess.run([command, "-L"], check=False).returncode == 0


def pip(*arguments: str) -> int:
    """Run ``pip install``, which prints its own errors, and return its exit status."""
    command = [sys.executable, "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
    return subprocess.run([*command, *arguments], check=False).returncode


def install_torch(version: str) -> int:
    """Install torch alone, as its dependencies come with the package; CPU builds have ``+cpu``."""
    if sys.platform != "linux" or has_nvidia_gpu():
        return pip("--no-deps", f"torch=={version}")
    build = f"torch=={version}+cpu"
    return pip("--no-deps", build) and pip("--no-deps", "--index-url", CPU_INDEX, build)


def main() -> int:
    """Install everything; return the exit status of pip."""
    parser = ArgumentParser(description="Install nbddp from this clone.")
    parser.add_argument("--test", action="store_true", help="also the packages that tests need")
    extras = "test" if parser.parse_args().test else "notebooks"
    print(f"installing nbddp[{extras}] from {ROOT}; this can take minutes", flush=True)
    if installed_torch() is None and (status := install_torch(TESTED_TORCH)):
        return status
    with tempfile.TemporaryDirectory() as folder:
        pin = Path(folder, "torch.txt")  # so that no dependency replaces torch
        pin.write_text(f"torch=={installed_torch()}\n", encoding="utf-8")
        return pip("-c", str(CONSTRAINTS), "-c", str(pin), "-e", f"{ROOT}[{extras}]")


if __name__ == "__main__":
    sys.exit(main())
