"""Build the course as a site: ``python -m book``."""
