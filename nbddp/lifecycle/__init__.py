"""The lifecycle of a worker group, as pure functions."""
