"""A run's numbers and record for trackio, W&B, TensorBoard or MLflow, read from its folder.

It is a process of its own that reads what ranks and notebook have written anyway: neither waits
for a tracker, loads it, or ends with it.
"""
