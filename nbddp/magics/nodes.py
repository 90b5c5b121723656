"""``%ddp nodes``: ranks on many machines."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from pathlib import Path

from nbddp.errors import RequestError
from nbddp.export.slurm import nodes_job
from nbddp.group.nodes import LOOPBACK, Nodes, NodesSpec
from nbddp.magics.desk import Desk
from nbddp.nodes.agent import ORPHAN_TIMEOUT
from nbddp.nodes.leftovers import left_open

JOB = Path("nbddp-nodes.sbatch")
COMING_BACK = 10.0  # seconds: nodes look twice a second for a notebook that is gone


def steer_nodes(desk: Desk, args: Namespace) -> str:
    """Do what the options say; what the user is told.

    Raises:
        RequestError: it cannot be done now.
    """
    if args.leave:
        return _open_door(desk).leave(args.leave)
    if args.rejoin is not None:
        return _rejoin(desk, args)
    said = _open(desk, args)
    if args.slurm:
        said = _written(_open_door(desk))
    if args.local:
        _open_door(desk).start_local(args.local)
        are = "1 node is" if args.local == 1 else f"{args.local} nodes are"
        said = f"{are} starting on this machine; `%ddp nodes` lists them"
    if args.wait:
        said = _open_door(desk).wait(args.wait)
    nodes = desk.group.nodes
    return said or (CLOSED if nodes is None else nodes.table())


def _open(desk: Desk, args: Namespace) -> str:
    """Open a door if one is asked for, or if something needs one that is not there."""
    for_a_new_one = any(
        (args.nnodes, args.nproc_per_node, args.host, args.port, args.orphan_timeout)
    )
    needed = (args.local or args.slurm) and desk.group.nodes is None
    if not for_a_new_one and not needed:
        return ""
    spec = _asked(args)
    if args.slurm and spec.host == LOOPBACK:
        raise RequestError(UNREACHED)
    return desk.group.open_nodes(spec).opened()


def _open_door(desk: Desk) -> Nodes:
    if desk.group.nodes is None:
        raise RequestError(CLOSED)
    return desk.group.nodes


UNREACHED = (
    "a job's machines do not reach 127.0.0.1: open the door with --host and the address of this "
    "machine in the cluster's network"
)
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
        orphan_timeout=args.orphan_timeout or ORPHAN_TIMEOUT,
    )


def _check_that_none_is_open(desk: Desk) -> None:
    if desk.group.nodes is not None:
        raise RequestError(
            "this notebook has an open door: `%ddp nodes` lists who is there; after `%ddp stop`, "
            "which sends them home, it can take back what another one has left"
        )


def _rejoin(desk: Desk, args: Namespace) -> str:
    _check_that_none_is_open(desk)
    join = left_open(args.rejoin)
    spec = replace(_asked(args), host=join.address, port=join.port)
    returned = desk.group.take_back(spec, join, args.wait or COMING_BACK)
    assert desk.group.nodes is not None
    return desk.group.nodes.say_back(returned)


def _written(nodes: Nodes) -> str:
    if nodes.door.join.address == LOOPBACK:
        raise RequestError(UNREACHED)
    spec = nodes.spec
    JOB.write_text(nodes_job(nodes.command, nnodes=spec.most, nproc=spec.nproc_per_node))
    return f"wrote {JOB}: `!sbatch {JOB}`; the ranks appear when the job starts"
