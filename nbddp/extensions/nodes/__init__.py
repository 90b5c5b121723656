"""Ranks on other machines: a listener in the notebook, an agent on each node, the protocol."""

from __future__ import annotations

from nbddp.extension.manifest import Command, Extension
from nbddp.wire.options.option import flag, option
from nbddp.wire.options.option_values import node_range, port_number, positive_int, seconds

LOOPBACK = "127.0.0.1"
ORPHAN_TIMEOUT = 60.0


class NodesArguments(Command, example="nodes", before="fault debug"):
    """Run ranks on other machines: listen for nodes, and list them."""

    nnodes: tuple[int, int] | None = option(
        "--nnodes N", "how many, or MIN:MAX (default: 1)", None, node_range
    )
    nproc_per_node: int = option(
        "--nproc-per-node N", "ranks on each (default: 1)", 0, positive_int
    )
    host: str = option(
        "--host ADDRESS", f"address of this machine at which nodes join (default: {LOOPBACK})", ""
    )
    port: int = option("--port N", "the port there (default: any)", 0, port_number)
    local: int = option("--local N", "start N nodes on this machine, as a test", 0, positive_int)
    wait: float = option(
        "--wait SECONDS", "wait for the nodes that a cell or --local needs, or fail", 0.0, seconds
    )
    slurm: bool = flag("--slurm", "write an sbatch file that starts the nodes")
    leave: str = option("--leave NODE", "remove this node", "")
    orphan_timeout: float = option(
        "--orphan-timeout SECONDS",
        f"how long nodes wait for a lost notebook (default: {ORPHAN_TIMEOUT:g})",
        0.0,
        seconds,
    )
    rejoin: str | None = option(
        "--rejoin JOIN",
        "take back the ranks of the last lost notebook, or of this join file",
        None,
        nargs="?",
        const="",
    )


EXTENSION = Extension(
    name="nodes",
    commands=(NodesArguments,),
    notebook="nbddp.extensions.nodes.notebook:Nodes",
)
