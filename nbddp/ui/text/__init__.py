"""A cell, or the worker group, as plain text."""
