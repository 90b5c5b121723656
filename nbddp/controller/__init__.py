"""The controller, in the notebook's process: it starts, stops and heals ranks, reads messages."""
