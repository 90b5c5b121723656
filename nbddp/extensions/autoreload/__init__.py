"""Autoreload: edited modules of the user are reloaded before the next cell."""

from __future__ import annotations

from nbddp.extension.manifest import Command, Extension
from nbddp.group.notebook_events import CellShown
from nbddp.wire.options.option import argument


class AutoreloadArguments(Command, example="autoreload on", before="check"):
    """Reload edited modules before each cell, on all ranks or on none."""

    switch: str = argument(
        "switch",
        "on or off; until you say so, it is as IPython's %%autoreload in the notebook",
        choices=("on", "off"),
    )


EXTENSION = Extension(
    name="autoreload",
    commands=(AutoreloadArguments,),
    events=(CellShown,),  # so that it is in use after the first cell
    notebook="nbddp.extensions.autoreload.notebook:Autoreload",
    rank="nbddp.extensions.autoreload.rank:AutoreloadOnRank",
)
