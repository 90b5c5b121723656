"""Bars of ``tqdm.notebook`` are text in a rank: as widgets they would stand still on the page."""

from __future__ import annotations

from typing import Any

from nbddp.worker.import_hooks import change_when_imported


def make_bars_text() -> None:
    """Replace the bars of ``tqdm.notebook`` by bars of text when it is imported."""
    change_when_imported("tqdm.notebook", _use_text)


def _use_text(module: Any) -> None:
    from tqdm.std import tqdm

    class TextBar(tqdm):  # type: ignore[type-arg,misc,unused-ignore]
        """tqdm's bar of text, for code that asks for the notebook's."""

        def __init__(self, *args: Any, display: bool = True, **options: Any) -> None:  # noqa: ARG002
            super().__init__(*args, **options)

    module.tqdm = module.tqdm_notebook = TextBar
    module.trange = module.tnrange = lambda *args, **options: TextBar(range(*args), **options)
