"""``%ddp nodes``: ranks on many machines."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from nbddp.errors import RequestError, as_request_error
from nbddp.extensions.nodes.node_pool import LOOPBACK, NodesSpec
from nbddp.extensions.nodes.stale_files import find_left_join_file
from nbddp.magics.command_arguments import NodesArguments
from nbddp.magics.notebook_state import NotebookState
from nbddp.private_files import open_new_file

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


def manage_nodes(notebook: NotebookState, args: NodesArguments) -> str:
    """Carry out the options of ``%ddp nodes``; return the text for the user.

    Raises:
        RequestError: an option cannot be carried out now.
    """
    if args.rejoin is not None:
        return _rejoin(notebook, args)
    message = _listen(notebook, args)
    nodes = notebook.group.nodes
    if nodes is None:
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


def _listen(notebook: NotebookState, args: NodesArguments) -> str:
    """Open the listener if the options describe one, or if another option needs one."""
    is_new = args.nnodes or any(getattr(args, name) for name in _SPEC_OPTIONS)
    needs_one = notebook.group.nodes is None and (args.local or args.slurm)
    if args.leave or not (is_new or needs_one):
        return ""
    spec = _nodes_spec(args)
    if args.slurm and spec.host == LOOPBACK:
        raise RequestError(LOOPBACK_UNREACHABLE)
    return notebook.group.open_nodes(spec).instructions()


def _nodes_spec(args: NodesArguments) -> NodesSpec:
    nnodes = args.nnodes or (args.local or 1, args.local or 1)
    given = {name: value for name in _SPEC_OPTIONS if (value := getattr(args, name))}
    return NodesSpec(min_nodes=nnodes[0], max_nodes=nnodes[1], **given)


def _rejoin(notebook: NotebookState, args: NodesArguments) -> str:
    if notebook.group.nodes is not None:
        raise RequestError(ALREADY_LISTENING)
    join = find_left_join_file(args.rejoin or "")
    spec = replace(_nodes_spec(args), host=join.address, port=join.port)
    return notebook.group.rejoin(spec, join, args.wait or REJOIN_TIMEOUT)


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
