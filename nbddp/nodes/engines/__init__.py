"""Ways to start nodes, one module for each."""
