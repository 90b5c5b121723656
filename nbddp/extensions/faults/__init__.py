"""Faults: failures that a cell injects on purpose."""

from __future__ import annotations

from nbddp.extension.manifest import Command, Extension
from nbddp.wire.options.option import argument, option
from nbddp.wire.options.option_values import count

MEANINGS = {
    "raise": "a FaultError",
    "kill": "SIGKILL",
    "segfault": "a segmentation fault",
    "exit": "its process exits, code 3",
    "hang": "it sleeps",
    "stop": "SIGSTOP",
    "slow": "later steps take longer, see --factor",
    "nan": "a gradient becomes NaN",
    "skip": "it leaves out a collective",
    "oom": "it runs out of memory",
    "corrupt": "the newest checkpoint is damaged",
}
FACTOR = 2.0
_KINDS = ", ".join(f"{kind} ({meaning})" for kind, meaning in MEANINGS.items())


class FaultArguments(Command, example="fault kill --rank 1 --step 30", before="debug"):
    """Cause a failure at a step that nbddp.log or the loader reports."""

    kind: str = argument(
        "kind", f"{_KINDS}; off (disarms all faults)", choices=(*MEANINGS, "off"), metavar="KIND"
    )
    rank: int | None = option(
        "--rank R", "the rank on which it happens", None, count, complete="rank"
    )
    step: int | None = option("--step N", "the step at which it happens, once", None, count)
    factor: float = option(
        "--factor FACTOR", "how much slower (kind slow; default: {default:g})", FACTOR, float
    )
    line: str = ""  # as the user wrote it


EXTENSION = Extension(
    name="faults",
    commands=(FaultArguments,),
    notebook="nbddp.extensions.faults.notebook:Faults",
    rank="nbddp.extensions.faults.rank:FaultsOnRank",
    scripts="nbddp.extensions.faults.scripts:FaultsInScripts",
    public={
        "faults": "nbddp.extensions.faults.arming",
    },
)
