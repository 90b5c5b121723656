"""Runs that are on disk: which there are, each in a line, and which stay."""
