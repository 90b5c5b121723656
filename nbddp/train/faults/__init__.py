"""Faults that a cell injects into itself."""
