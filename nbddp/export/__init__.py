"""Cells as a script for ``torchrun``: what they did, in plain Python."""
