"""Check the files and metadata of a built wheel and sdist: python FILE WHEEL SDIST."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

from packaging.metadata import Metadata

ROOT = Path(__file__).parents[1]
CEILINGS = ("==", "===", "<", "<=", "~=")
PROBE = (
    "import sys; sys.path.insert(0, sys.argv[1]); import nbddp; "
    "assert 'torch' not in sys.modules; print(nbddp.__file__, nbddp.__version__)"
)


def kept_files() -> set[str]:
    """Return the files of the project that git tracks."""
    if not (ROOT / ".git").exists():  # an unpacked sdist, which has no other files
        files = (each for each in ROOT.rglob("*") if each.is_file())
        names = {each.relative_to(ROOT).as_posix() for each in files}
        return {name for name in names if "__pycache__" not in name} - {"PKG-INFO"}
    listed = ["git", "-C", str(ROOT), "ls-files", "-z"]
    output = subprocess.run(listed, check=True, capture_output=True, text=True).stdout
    return {name for name in output.split("\0") if name and (ROOT / name).exists()}


def check_files(archive: str, found: Iterable[str], expected: Iterable[str]) -> None:
    found, expected = set(found), set(expected)
    too_much, missing = sorted(found - expected), sorted(expected - found)
    assert not too_much, f"{archive} has files that git does not track: {too_much}"
    assert not missing, f"{archive} lacks {missing}"


def check_wheel(path: Path) -> None:
    with zipfile.ZipFile(path) as wheel:
        names = wheel.namelist()
        about = next(name for name in names if name.endswith(".dist-info/METADATA"))
        folder = about.rpartition("/")[0]
        own_files = ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE")
        own_paths = {f"{folder}/{name}" for name in own_files}
        check_files(
            path.name, names, own_paths | {n for n in kept_files() if n.startswith("nbddp/")}
        )
        check_metadata(Metadata.from_email(wheel.read(about), validate=True))
    assert path.name.endswith("-py3-none-any.whl"), path.name
    run = [sys.executable, "-I", "-c", PROBE, str(path)]
    output = subprocess.run(run, check=True, capture_output=True, text=True).stdout.split()
    assert output[0].startswith(str(path)), output
    assert f"nbddp-{output[1]}-" in path.name, output


def check_sdist(path: Path) -> None:
    with tarfile.open(path) as sdist:
        names = [each.name.partition("/")[2] for each in sdist.getmembers() if each.isfile()]
        about = sdist.extractfile(
            next(m for m in sdist.getmembers() if m.name.endswith("PKG-INFO"))
        )
        assert about is not None
        check_metadata(Metadata.from_email(about.read(), validate=True))
    check_files(path.name, names, kept_files() | {"PKG-INFO"})


def check_metadata(metadata: Metadata) -> None:
    """Check the metadata that an index shows and that pip uses."""
    assert metadata.description_content_type == "text/markdown"
    readme = (ROOT / "README.md").read_text()
    assert (metadata.description or "").strip() == readme.strip(), (
        "the long description is README.md"
    )
    assert metadata.license_expression == "BSD-3-Clause"
    assert metadata.license_files == ["LICENSE"]
    assert str(metadata.requires_python) == ">=3.11"
    assert len(metadata.summary or "") <= 100
    needs = metadata.requires_dist or []
    always = {each.name for each in needs if each.marker is None}
    expected = {
        "cloudpickle",
        "ipykernel",
        "ipython",
        "ipywidgets",
        "matplotlib",
        "psutil",
        "setproctitle",
        "threadpoolctl",
        "torch",
    }
    assert always == expected, always
    pinned = [str(each) for each in needs if any(s.operator in CEILINGS for s in each.specifier)]
    assert not pinned, f"could replace installed packages: {pinned}"


if __name__ == "__main__":
    check_wheel(Path(sys.argv[1]))
    check_sdist(Path(sys.argv[2]))
