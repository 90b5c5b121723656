"""Stored runs: find, list, compare, summarize and remove them."""
