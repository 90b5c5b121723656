"""Cells as a script for ``torchrun``: what they did, in plain Python."""

from nbddp.export.plan import Item, Left, Plan, Program, Pulled, Sent
from nbddp.export.program import write_program
from nbddp.export.slurm import sbatch

__all__ = ["Item", "Left", "Plan", "Program", "Pulled", "Sent", "sbatch", "write_program"]
