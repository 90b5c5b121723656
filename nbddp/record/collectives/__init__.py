"""The collectives of a cell: matched on all ranks, and the ranks for which others wait."""
