"""The rank's side: one process, one IPython shell, one rank in the process group."""
