"""Watch a rank: samplers, the flight recorder and torch's profiler."""
