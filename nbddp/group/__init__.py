"""Worker groups for scripts and tests, and the retries of cells after a failure."""

from nbddp.group.worker_group import WorkerGroup

__all__ = ["WorkerGroup"]
