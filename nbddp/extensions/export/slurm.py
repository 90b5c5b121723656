"""Batch files for SLURM, similar to torch's own examples."""

from __future__ import annotations

import shlex

from nbddp.topology import TORCHRUN

RENDEZVOUS_PORT = 29500  # torchrun's default


def script_job(name: str, command: str, *, nnodes: int, nproc: int, has_gpus: bool) -> str:
    """Return a job that runs the script on nodes, with the rendezvous on the first one.

    Each node has one task, and ``scontrol show hostnames`` finds the first node, as in
    https://github.com/pytorch/examples/blob/main/distributed/ddp-tutorial-series/slurm/sbatch_run.sh

    Args:
        name: the name of the job.
        command: the script with its arguments.
        nnodes: the number of nodes.
        nproc: ranks on each node.
        has_gpus: whether each rank needs a GPU.
    """
    wants = f"--gpus-per-node={nproc}" if has_gpus else f"--cpus-per-task={nproc}"
    return f"""#!/bin/bash
#SBATCH --job-name={name}
#SBATCH --nodes={nnodes}
#SBATCH --ntasks-per-node=1
#SBATCH {wants}
#SBATCH --time=01:00:00

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

srun {shlex.join(TORCHRUN)} \\
    --nnodes="$SLURM_NNODES" --nproc-per-node={nproc} \\
    --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="$head:{RENDEZVOUS_PORT}" \\
    {command}
"""
