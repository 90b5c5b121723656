"""The result of a heal, and the values that a replacement needs."""
