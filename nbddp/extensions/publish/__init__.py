"""Publish a run's metrics and events to trackio, W&B, TensorBoard or MLflow.

A separate process reads the files in the run's folder and publishes them. So neither the ranks nor
the notebook import a tracker, wait for it, or fail with it.
"""
