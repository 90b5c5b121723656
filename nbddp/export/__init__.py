"""Cells as a script for ``torchrun``: what they did, in plain Python."""

from nbddp.export.script import (
    ExportedScript,
    ExportInput,
    Item,
    Omitted,
    PulledValue,
    PushedValues,
    write_script,
)
from nbddp.export.slurm import sbatch

__all__ = [
    "ExportInput",
    "ExportedScript",
    "Item",
    "Omitted",
    "PulledValue",
    "PushedValues",
    "sbatch",
    "write_script",
]
