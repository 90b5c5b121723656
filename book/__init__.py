"""The course as a site: ``python -m book``."""
