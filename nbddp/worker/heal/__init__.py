"""What a rank does when a dead one is replaced."""
