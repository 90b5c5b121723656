"""Build a report for each view, and render reports as text or HTML."""
