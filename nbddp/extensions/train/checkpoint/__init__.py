"""Checkpoints: saved by all ranks, and loaded by any number of ranks."""
