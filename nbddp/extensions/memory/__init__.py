"""Memory: who holds the memory of each rank, and giving back what no name holds."""

from __future__ import annotations

from nbddp.extension.manifest import Command, Extension


class MemoryArguments(Command, example="memory", before="bench trace logs"):
    """Show what holds the memory of each rank: models, optimizers, tensors, the last error."""


class FreeArguments(Command, example="free", before="bench trace logs"):
    """Free the memory of each rank that no variable holds, such as that of the last error."""


EXTENSION = Extension(
    name="memory",
    commands=(MemoryArguments, FreeArguments),
    notebook="nbddp.extensions.memory.notebook:Memory",
    rank="nbddp.extensions.memory.rank:MemoryOfRank",
    public={
        "StepMemory": "nbddp.extensions.memory.step_memory:StepMemory",
        "memory_of_step": "nbddp.extensions.memory.step_memory:memory_of_step",
    },
)
