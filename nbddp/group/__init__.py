"""The actions that scripts and magics share: run cells, retry, sweep, check, push and pull."""

from nbddp.group.worker_group import WorkerGroup

__all__ = ["WorkerGroup"]
