"""The user interface: panel, text, reports, and input."""
