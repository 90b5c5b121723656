"""Faults: failures that a cell injects on purpose."""
