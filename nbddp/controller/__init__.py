"""The controller, in the notebook's process: it starts, heals and stops ranks, and runs cells."""
