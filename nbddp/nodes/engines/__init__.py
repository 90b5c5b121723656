"""What starts the nodes: one module for each way."""
