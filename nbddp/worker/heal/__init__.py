"""A rank's part in a heal: transfer variables, environment and values to a replacement."""
