"""Run a cell: the shell, its compiler, and what a failure says."""
