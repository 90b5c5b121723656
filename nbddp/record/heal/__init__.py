"""What a heal gave back, and the values it needs."""
