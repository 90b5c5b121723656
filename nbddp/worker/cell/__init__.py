"""Run cells: the IPython shell of a rank, its compiler, and the report of a failure."""
