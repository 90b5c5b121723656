"""The rank's side: one process, one IPython shell, one place in the process group."""
