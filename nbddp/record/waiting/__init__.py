"""Which rank waits for which: collectives matched across the ranks."""
