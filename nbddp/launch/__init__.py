"""Starts ranks on the machine that this runs on: the notebook's, or a node."""
