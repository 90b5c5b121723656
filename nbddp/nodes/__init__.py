"""Ranks on other machines: a door in the notebook, a keeper on each node, and what goes between."""
