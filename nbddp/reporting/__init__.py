"""What a rank reports of a training: metrics, progress, and the states of its objects."""
