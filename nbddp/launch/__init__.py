"""Start ranks on this machine; the notebook and the agent of a node use it."""
