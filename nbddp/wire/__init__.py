"""What crosses the border between the notebook and the ranks, and how."""
