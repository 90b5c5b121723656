"""``%ddp nodes``: ranks on many machines."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from nbddp.errors import RequestError, as_request_error
from nbddp.extensions.nodes import LOOPBACK, NodesArguments
from nbddp.extensions.nodes.join_file import JoinFile
from nbddp.extensions.nodes.node_pool import NodePool, NodesSpec
from nbddp.extensions.nodes.stale_files import find_left_join_file
from nbddp.group.notebook_half import NotebookHalf
from nbddp.group.rank_group import RankGroup
from nbddp.private_files import open_new_file
from nbddp.sigint import sigint_deferred

JOB_FILE = Path("nbddp-nodes.sbatch")
_SPEC_OPTIONS = ("host", "port", "nproc_per_node", "orphan_timeout")
REJOIN_TIMEOUT = 10.0  # seconds; nodes look for their notebook twice a second
LOOPBACK_UNREACHABLE = (
    "other machines cannot reach 127.0.0.1: add --host with the address of this machine in the "
    "network of the cluster"
)
NOT_LISTENING = (
    "no nodes can join: all ranks are on this machine; `%ddp nodes --nnodes 2 --nproc-per-node 8 "
    "--host ADDRESS` lets nodes join, `%ddp nodes --local 2` starts two nodes here as a test"
)
ALREADY_LISTENING = (
    "this notebook already listens for nodes, `%ddp nodes` lists them; after `%ddp stop`, which "
    "releases them, it can take back the ranks of another notebook"
)


class Nodes(NotebookHalf):
    """Lets nodes join, and releases them."""

    def nodes(self, args: NodesArguments) -> None:
        """Carry out the options of a line."""
        group = self.notebook.group
        self.notebook.print_line(f"nbddp: {_manage_nodes(group, args)}")
        cell = group.session.cell
        if args.rejoin is not None and cell is not None and not cell.notice_queue.is_drained:
            self.notebook.follow(cell)


def open_nodes(group: RankGroup, spec: NodesSpec, join: JoinFile | None = None) -> NodePool:
    """Listen for nodes. The next ranks run on the nodes that join.

    Raises:
        RequestError: ranks are running, the notebook already listens, or the address cannot be
            bound.
    """
    if isinstance(group.nodes, NodePool) and group.nodes.is_kept:
        raise RequestError("this notebook already has ranks that are kept alive: `%ddp stop` first")
    if group.nodes is not None:
        raise RequestError(
            "this notebook already listens for nodes: `%ddp nodes --local 1` adds one on this "
            "machine, `%ddp stop` releases all"
        )
    group.close_at_exit()
    with sigint_deferred():  # an interrupt here would leave a listener that nothing could close
        group.nodes = nodes = NodePool(
            group.session, spec, join, active=lambda: group.scripts.active_session
        )
    return nodes


def rejoin(group: RankGroup, spec: NodesSpec, join: JoinFile, seconds: float) -> str:
    """Continue with the nodes and ranks that another notebook left.

    Args:
        group: the ranks of this notebook.
        spec: the spec of the listener.
        join: the join file of the other notebook.
        seconds: how long to wait for missing ranks.

    Returns:
        The ranks and nodes that are back, in one line.

    Raises:
        RequestError: ranks are running, the notebook already listens, or no node is back.
        StartError: no rank could be rejoined. After an error or an interrupt, the notebook has
            no nodes, and you can try again.
    """
    with sigint_deferred(raises_second=False) as deferred:
        nodes = open_nodes(group, spec, join)
        try:
            survivors = nodes.rejoin(seconds, lambda: deferred.count > 0)
            if survivors is not None:
                deferred.raises_second = True  # a second interrupt ends the ranks
                group_spec = replace(group.spec, **survivors.options)
                group.session.start(group_spec, survivors)
                group.spec = group_spec
        except BaseException:
            group.nodes = None
            nodes.abandon()
            raise
        return nodes.describe_rejoined(survivors)


def _manage_nodes(group: RankGroup, args: NodesArguments) -> str:
    """Carry out the options of ``%ddp nodes``; return the text for the user.

    Raises:
        RequestError: an option cannot be carried out now.
    """
    if args.rejoin is not None:
        return _rejoin(group, args)
    message = _listen(group, args)
    nodes = group.nodes
    if not isinstance(nodes, NodePool):
        if args.leave or args.wait:
            raise RequestError(NOT_LISTENING)
        return NOT_LISTENING
    if args.leave:
        return nodes.release(args.leave)
    if args.slurm:
        if nodes.listener.join.address == LOOPBACK:
            raise RequestError(LOOPBACK_UNREACHABLE)
        spec = nodes.spec
        job = _slurm_job(nodes.command, nnodes=spec.max_nodes, nproc=spec.nproc_per_node)
        with (
            as_request_error(f"{JOB_FILE} cannot be written"),
            os.fdopen(open_new_file(JOB_FILE), "w") as file,
        ):
            file.write(job)
        message = f"wrote {JOB_FILE}: `!sbatch {JOB_FILE}`; the ranks appear when the job starts"
    if args.local:
        nodes.start_local(args.local)
        are = "1 node is" if args.local == 1 else f"{args.local} nodes are"
        message = f"{are} starting on this machine; `%ddp nodes` lists them"
    if args.wait:
        message = nodes.wait(args.wait)
    return message or nodes.table()


def _listen(group: RankGroup, args: NodesArguments) -> str:
    """Open the listener if the options describe one, or if another option needs one."""
    is_new = args.nnodes or any(getattr(args, name) for name in _SPEC_OPTIONS)
    needs_one = group.nodes is None and (args.local or args.slurm)
    if args.leave or not (is_new or needs_one):
        return ""
    spec = _nodes_spec(args)
    if args.slurm and spec.host == LOOPBACK:
        raise RequestError(LOOPBACK_UNREACHABLE)
    return open_nodes(group, spec).instructions()


def _nodes_spec(args: NodesArguments) -> NodesSpec:
    nnodes = args.nnodes or (args.local or 1, args.local or 1)
    given = {name: value for name in _SPEC_OPTIONS if (value := getattr(args, name))}
    return NodesSpec(min_nodes=nnodes[0], max_nodes=nnodes[1], **given)


def _rejoin(group: RankGroup, args: NodesArguments) -> str:
    if group.nodes is not None:
        raise RequestError(ALREADY_LISTENING)
    join = find_left_join_file(args.rejoin or "")
    spec = replace(_nodes_spec(args), host=join.address, port=join.port)
    return rejoin(group, spec, join, args.wait or REJOIN_TIMEOUT)


def _slurm_job(command: str, *, nnodes: int, nproc: int) -> str:
    """Return a job that starts one node agent on each node, for a notebook.

    Args:
        command: the command that starts the agent, with the join file.
        nnodes: the number of nodes.
        nproc: ranks on each node.
    """
    return f"""#!/bin/bash
#SBATCH --job-name=nbddp
#SBATCH --nodes={nnodes}
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task={nproc}
#SBATCH --time=04:00:00
#SBATCH --output=nbddp-nodes-%j-%N.log
# with GPUs: #SBATCH --gpus-per-node={nproc}

export OMP_NUM_THREADS=1  # of the agents; ranks get --threads
srun {command}
"""
