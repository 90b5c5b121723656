"""Messages between the notebook and the ranks, and how they travel."""
