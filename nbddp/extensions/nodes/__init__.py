"""Ranks on other machines: a listener in the notebook, an agent on each node, the protocol."""
