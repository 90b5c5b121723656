"""A script that ranks run: what the kernel has found out about it, and a rank needs to know."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


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
    arguments: tuple[str, ...]
    folder: str
    keeps: bool = False

    def facts(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)

    @classmethod
    def read(cls, facts: dict[str, Any]) -> Script:
        """Back from JSON.

        >>> script = Script(name="a.py", path="/b/a.py", arguments=("-x",), folder="/b")
        >>> Script.read(script.facts()) == script
        True
        """
        return cls(**{**facts, "arguments": tuple(facts["arguments"])})
