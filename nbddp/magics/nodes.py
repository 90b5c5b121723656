"""``%ddp nodes``: ranks on many machines."""

from __future__ import annotations

from argparse import ArgumentTypeError, Namespace
from pathlib import Path

from nbddp.errors import RequestError
from nbddp.export.slurm import nodes_job
from nbddp.group.nodes import LOOPBACK, Nodes, NodesSpec
from nbddp.magics.desk import Desk
from nbddp.magics.options import positive_int

JOB = Path("nbddp-nodes.sbatch")


def node_range(text: str) -> tuple[int, int]:
    """``2`` or ``2:4``, as torchrun has it."""
    least, colon, most = text.partition(":")
    try:
        found = positive_int(least), positive_int(most if colon else least)
    except ArgumentTypeError:
        raise ArgumentTypeError(f"expected N or MIN:MAX, got {text!r}") from None
    if found[0] > found[1]:
        raise ArgumentTypeError(f"expected MIN:MAX with MIN up to MAX, got {text!r}")
    return found


def steer_nodes(desk: Desk, args: Namespace) -> str:
    """Do what the options say; what the user is told.

    Raises:
        RequestError: it cannot be done now.
    """
    group = desk.group
    wants_door = any((args.nnodes, args.nproc_per_node, args.host, args.port, args.local))
    if args.leave:
        if group.nodes is None:
            raise RequestError(CLOSED)
        group.nodes.leave(args.leave)
        return ""
    if not wants_door and not args.slurm:
        return CLOSED if group.nodes is None else group.nodes.table()
    nodes = group.nodes
    if wants_door or nodes is None:
        nodes = group.open_nodes(_asked(args))
    if args.local:
        nodes.start_local(args.local)
        return f"{args.local} nodes are starting on this machine; `%ddp nodes` lists them"
    return _written(nodes) if args.slurm else nodes.opened()


CLOSED = (
    "no door is open, all ranks are on this machine: `%ddp nodes --nnodes 2 --nproc-per-node 8 "
    "--host ADDRESS` opens one, `%ddp nodes --local 2` starts two nodes here, to try it"
)


def _asked(args: Namespace) -> NodesSpec:
    least, most = args.nnodes or (args.local or 1, args.local or 1)
    return NodesSpec(
        host=args.host or LOOPBACK,
        port=args.port or 0,
        least=least,
        most=most,
        nproc_per_node=args.nproc_per_node or 1,
    )


def _written(nodes: Nodes) -> str:
    if nodes.door.join.address == LOOPBACK:
        raise RequestError(
            "a job's machines do not reach 127.0.0.1: open the door with --host and the address "
            "of this machine in the cluster's network"
        )
    spec = nodes.spec
    JOB.write_text(nodes_job(nodes.command, nnodes=spec.most, nproc=spec.nproc_per_node))
    return f"wrote {JOB}: `!sbatch {JOB}`; the ranks appear when the job starts"
