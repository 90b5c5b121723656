"""What the course calls: its exercises look at their answers."""
