"""Records of a worker group and its cells, in memory and on disk."""
