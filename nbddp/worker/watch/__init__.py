"""What a rank is watched by: samplers, and torch's profiler."""
