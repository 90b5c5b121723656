"""The kit that a cell uses; it knows neither notebook nor store, and runs under torchrun too."""
