"""Files and folders that are whole or absent, whenever their writer is killed."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import warnings
from pathlib import Path
from typing import Any, BinaryIO

import torch

DRAFT = ".draft"  # not yet whole
ASIDE = ".aside"  # a whole folder that one of the same name is about to replace

UNTOUCHED = "; the checkpoints before it are untouched"

_MARK = b"\nnbddp sha256 "
_TRAILER = len(_MARK) + 64
_PIECE = 1 << 20
_NAME = re.compile(r"step-(\d+)(?:\.pt)?")


def step_of(path: Path) -> int | None:
    """The step that a checkpoint's name tells; None for the name of something else.

    >>> step_of(Path("runs/step-00000030.pt")), step_of(Path("step-7")), step_of(Path("x.pt"))
    (30, 7, None)
    """
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def newest_first(folder: Path) -> list[Path]:
    """The checkpoints in a folder, whole or damaged, the latest step first."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if step_of(path) is not None]
    return sorted(found, key=lambda path: (step_of(path), path.name), reverse=True)


def draft_of(path: Path) -> Path:
    """Where something is written until it is whole."""
    return path.with_name(f".{path.name}{DRAFT}")


def write_whole(path: Path, state: Any) -> None:
    """Save something with its SHA-256 at the end: the old file stays until the new one is on disk.

    ``torch.load`` reads the file as it is.

    Raises:
        OSError: it could not be written; there is no trace of it.
    """
    draft = draft_of(path)
    try:
        with draft.open("wb") as file:
            _write(file, state)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def _write(file: BinaryIO, state: Any) -> None:
    hashing = _Hashing(file)
    try:
        torch.save(state, hashing)  # type: ignore[arg-type]  # write and flush is all it needs
    except RuntimeError:
        if hashing.error is not None:  # torch's own words hide that the disk is full
            raise hashing.error from None
        raise
    file.write(_MARK + hashing.sha256.hexdigest().encode())


class _Hashing:
    """A file that knows the SHA-256 of what was written, and why that failed."""

    def __init__(self, file: BinaryIO) -> None:
        self.sha256 = hashlib.sha256()
        self.error: OSError | None = None
        self._file = file

    def write(self, data: bytes) -> int:
        self.sha256.update(data)
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        self._file.flush()


def read_whole(path: Path) -> Any:
    """Load what was saved, tensors on the CPU; nothing but plain values is ever unpickled."""
    with warnings.catch_warnings():
        # torch 2.15 warns that it validates sparse tensors, which the user did not ask for
        warnings.filterwarnings("ignore", message="Validating sparse tensor invariants")
        return torch.load(path, map_location="cpu", weights_only=True)


def damage(path: Path) -> str:
    """What is wrong with a file; empty if it is whole."""
    try:
        with path.open("rb") as file:
            size = path.stat().st_size - _TRAILER
            digest = sha256(file, max(size, 0))
            trailer = file.read()
    except OSError as error:
        return f"it cannot be read: {error}"
    if not trailer.startswith(_MARK):
        return "it has no checksum at its end"
    return "" if trailer == _MARK + digest.encode() else "it does not match its checksum"


def sha256(file: BinaryIO, size: int) -> str:
    """The checksum of the next ``size`` bytes, as 64 hexadecimal digits."""
    sha = hashlib.sha256()
    while size > 0 and (piece := file.read(min(size, _PIECE))):
        sha.update(piece)
        size -= len(piece)
    return sha.hexdigest()


def make_folder(folder: Path) -> None:
    """Make a folder with its parents, on disk too.

    Raises:
        OSError: something is in the way.
    """
    if not folder.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        sync_folder(folder.parent)


def commit_folder(draft: Path, path: Path) -> None:
    """Make a written folder the whole one; one of the same name makes room for it."""
    sync_folder(draft)
    aside = path.with_name(f".{path.name}{ASIDE}")
    if path.exists():
        path.replace(aside)
    draft.replace(path)
    sync_folder(path.parent)
    if aside.exists():
        shutil.rmtree(aside)


def clean(folder: Path) -> None:
    """Remove what a killed writer left, and put back what it had set aside."""
    for aside in folder.glob(f".step-*{ASIDE}"):
        path = aside.with_name(aside.name[1 : -len(ASIDE)])
        if path.exists():
            shutil.rmtree(aside)
        else:
            aside.replace(path)
    for draft in folder.glob(f".step-*{DRAFT}"):
        remove(draft)


def remove(path: Path) -> None:
    """Remove a file or a folder; a folder that is half gone is no checkpoint any more."""
    if path.is_dir():
        draft = draft_of(path) if not path.name.startswith(".") else path
        path.replace(draft)
        shutil.rmtree(draft)
    else:
        path.unlink()


def sync_folder(folder: Path) -> None:
    """Have the names in a folder on disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
