"""Change a library module after its import."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

Change = Callable[[Any], None]


def change_when_imported(name: str, change: Change) -> None:
    """Call ``change(module)`` after the import of a module, or now if it is imported already."""
    if name in sys.modules:
        change(sys.modules[name])
    elif not any(isinstance(each, _ChangeOnImport) and each.name == name for each in sys.meta_path):
        sys.meta_path.insert(0, _ChangeOnImport(name, change))


class _ChangeOnImport(MetaPathFinder):
    """Find one module, and change it after its import."""

    def __init__(self, name: str, change: Change) -> None:
        self.name = name
        self._change = change

    def find_spec(
        self, name: str, path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find only the module to change."""
        spec = PathFinder.find_spec(name, path) if name == self.name else None
        if spec is None or spec.loader is None:
            return None
        loader: Any = spec.loader
        run = loader.exec_module

        def run_and_change(module: ModuleType) -> None:
            run(module)
            self._change(module)

        loader.exec_module = run_and_change
        return spec
