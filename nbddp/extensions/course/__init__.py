"""Check answers to the exercises of the course."""
