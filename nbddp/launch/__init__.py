"""Start ranks on this machine: the notebook's, or a node."""
