"""Hearing buttons while a cell blocks the kernel."""
