"""Checkpoints: written by all ranks, read by as many as there are."""
