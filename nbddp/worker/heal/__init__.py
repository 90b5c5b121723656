"""A rank's part in a heal: transfer names, environment and values to a replacement."""
