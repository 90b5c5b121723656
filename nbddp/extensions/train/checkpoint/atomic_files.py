"""Atomic files and folders: complete or absent, even if their writer is killed."""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import shutil
import warnings
from pathlib import Path
from typing import Any, BinaryIO

import torch

from nbddp.private_files import check_owner, open_new_file

DRAFT = ".draft"  # the suffix of an incomplete file or folder
SET_ASIDE = ".aside"  # the suffix of a complete folder that is being replaced

OLDER_UNTOUCHED = "; the checkpoints before it are untouched"

_CHECKSUM_MARK = b"\nnbddp sha256 "
_TRAILER_SIZE = len(_CHECKSUM_MARK) + 64
_CHUNK_SIZE = 1 << 20
# a signal handler may save a checkpoint while this process writes one of the same step
_draft_numbers = itertools.count()
_open_drafts: set[Path] = set()
_NAME = re.compile(r"step-(\d+)(?:\.pt)?")


def step_of(path: Path) -> int | None:
    """Return the step in a checkpoint's name; None for other names.

    >>> step_of(Path("runs/step-00000030.pt")), step_of(Path("step-7")), step_of(Path("x.pt"))
    (30, 7, None)
    """
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def newest_first(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, intact or damaged, the latest step first."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if step_of(path) is not None]
    return sorted(found, key=lambda path: (step_of(path), path.name), reverse=True)


def draft_path(path: Path) -> Path:
    """Return the path at which a file or folder is written until it is complete."""
    return path.with_name(f".{path.name}{DRAFT}")


def write_atomically(path: Path, state: Any) -> None:
    """Save a state, followed by its SHA-256. The old file stays until the new one is on disk.

    ``torch.load`` can read the file.

    Raises:
        OSError: the file could not be written; no part of it is left.
    """
    draft = path.with_name(f".{path.name}-{next(_draft_numbers)}{DRAFT}")
    _open_drafts.add(draft)
    try:
        with os.fdopen(open_new_file(draft), "wb") as file:
            _write_with_checksum(file, state)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    finally:
        _open_drafts.discard(draft)
    sync_folder(path.parent)


def _write_with_checksum(file: BinaryIO, state: Any) -> None:
    writer = _HashingWriter(file)
    try:
        torch.save(state, writer)  # type: ignore[arg-type]  # it only needs write and flush
    except RuntimeError:
        if writer.error is not None:  # torch's message hides that the disk is full
            raise writer.error from None
        raise
    file.write(_CHECKSUM_MARK + writer.sha256.hexdigest().encode())


class _HashingWriter:
    """A file that computes the SHA-256 of its content, and keeps the error of a failed write."""

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


def read_plain(path: Path) -> Any:
    """Load a saved state, with tensors on the CPU; only plain values are unpickled."""
    with warnings.catch_warnings():
        # torch 2.14 warns that it validates sparse tensors; the user did not request that
        warnings.filterwarnings("ignore", message="Validating sparse tensor invariants")
        return torch.load(path, map_location="cpu", weights_only=True)


def find_damage(path: Path) -> str:
    """Describe the damage of a file; empty if the file is intact."""
    try:
        with path.open("rb") as file:
            size = path.stat().st_size - _TRAILER_SIZE
            digest = sha256(file, max(size, 0))
            trailer = file.read()
    except OSError as error:
        return f"it cannot be read: {error}"
    if not trailer.startswith(_CHECKSUM_MARK):
        return "it has no checksum at its end"
    return "" if trailer == _CHECKSUM_MARK + digest.encode() else "it does not match its checksum"


def sha256(file: BinaryIO, size: int) -> str:
    """Return the SHA-256 of the next ``size`` bytes, as 64 hexadecimal digits."""
    sha = hashlib.sha256()
    while size > 0 and (chunk := file.read(min(size, _CHUNK_SIZE))):
        sha.update(chunk)
        size -= len(chunk)
    return sha.hexdigest()


def make_folder(folder: Path) -> None:
    """Create a folder with its parents, and sync it to disk.

    Raises:
        OSError: the folder could not be created.
    """
    if not folder.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        sync_folder(folder.parent)


def make_draft(draft: Path) -> None:
    """Create a draft folder; one that another user prepared may have links in it.

    Raises:
        OSError: it could not be created, or belongs to another user.
    """
    draft.mkdir(parents=True, exist_ok=True)
    check_owner(draft)


def commit_folder(draft: Path, path: Path) -> None:
    """Rename a complete draft folder to its final name; replace a folder of that name."""
    sync_folder(draft)
    set_aside = path.with_name(f".{path.name}{SET_ASIDE}")
    if path.exists():
        path.replace(set_aside)
    draft.replace(path)
    sync_folder(path.parent)
    if set_aside.exists():
        shutil.rmtree(set_aside)


def remove_leftovers(folder: Path) -> None:
    """Remove the drafts of a killed writer, and restore a folder that it had set aside."""
    for set_aside in folder.glob(f".step-*{SET_ASIDE}"):
        path = set_aside.with_name(set_aside.name[1 : -len(SET_ASIDE)])
        if path.exists():
            shutil.rmtree(set_aside)
        else:
            set_aside.replace(path)
    for draft in folder.glob(f".step-*{DRAFT}"):
        if draft not in _open_drafts:
            remove(draft)


def remove(path: Path) -> None:
    """Remove a file or a folder; rename a folder first, so that no partial checkpoint can stay."""
    if path.is_dir():
        draft = draft_path(path) if not path.name.startswith(".") else path
        path.replace(draft)
        shutil.rmtree(draft)
    else:
        path.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Sync the file names in a folder to disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
