"""Sweeps: run a cell for each combination of values, seeds or world sizes."""
