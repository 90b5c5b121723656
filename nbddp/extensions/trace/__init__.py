"""Traces of the profiler: begin them, collect them and merge them into one file."""
