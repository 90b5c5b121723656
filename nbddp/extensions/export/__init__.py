"""Export cells as a script for ``torchrun``, in plain Python."""

from __future__ import annotations

from nbddp.extension.manifest import Command, Extension
from nbddp.group.notebook_events import CellLeftOut, CellRanOnOtherRanks, PushAsked, ValuePulled
from nbddp.wire.options.option import argument, flag


class ExportArguments(Command, example="export train.py", before="stop"):
    """Write the successful cells since the start of the ranks as a script."""

    file: str = argument("file", "name of the script, such as train.py")
    slurm: bool = flag("--slurm", "also write an sbatch file")
    force: bool = flag("--force", "replace existing files")


EXTENSION = Extension(
    name="export",
    commands=(ExportArguments,),
    events=(CellLeftOut, CellRanOnOtherRanks, PushAsked, ValuePulled),
    notebook="nbddp.extensions.export.notebook:Exporting",
)
