"""A script that ranks run: what the kernel has found out about it, and a rank needs to know."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """A program as ``torchrun`` takes it: a file, or with ``-m`` a module.

    Attributes:
        name: as it was written: ``train.py``, ``package.train``.
        path: the file, absolute; empty for a module, which each rank finds for itself.
        arguments: what stands behind it.
        folder: what stands first on ``sys.path``: the file's, or for a module the working folder.
        keeps: whether its names stay in the namespace of the cells.
    """

    name: str
    path: str
    arguments: list[str]
    folder: str
    keeps: bool = False
