"""The actions that scripts and magics share: run cells, retry, sweep, check, push and pull."""
