"""A worker group for scripts and tests, and what does cells again after a failure."""

from nbddp.group.worker_group import WorkerGroup

__all__ = ["WorkerGroup"]
