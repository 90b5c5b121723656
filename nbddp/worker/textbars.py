"""Bars of ``tqdm.notebook`` are text in a rank: as widgets they would stand still on the page."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_MODULE = "tqdm.notebook"


def make_bars_text() -> None:
    """See to it that whoever imports ``tqdm.notebook`` from now on finds bars made of text."""
    if not any(isinstance(finder, _TextBars) for finder in sys.meta_path):
        sys.meta_path.insert(0, _TextBars())


class _TextBars(MetaPathFinder):
    """Finds one module, and changes it once it has run."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find ``tqdm.notebook``, and nothing else."""
        spec = PathFinder.find_spec(name, path) if name == _MODULE else None
        if spec is None or spec.loader is None:
            return None
        loader: Any = spec.loader
        run = loader.exec_module

        def run_and_change(module: ModuleType) -> None:
            run(module)
            _use_text(module)

        loader.exec_module = run_and_change
        return spec


def _use_text(module: Any) -> None:
    from tqdm.std import tqdm

    class TextBar(tqdm):  # type: ignore[type-arg,misc,unused-ignore]
        """tqdm's bar of text, for code that asks for the notebook's."""

        def __init__(self, *args: Any, display: bool = True, **options: Any) -> None:  # noqa: ARG002
            super().__init__(*args, **options)

    def trange(*args: Any, **options: Any) -> TextBar:
        """A bar over a range."""
        return TextBar(range(*args), **options)

    module.tqdm = module.tqdm_notebook = TextBar
    module.trange = module.tnrange = trange
