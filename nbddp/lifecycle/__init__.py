"""What happens next: the life of a worker group, decided by pure functions."""
