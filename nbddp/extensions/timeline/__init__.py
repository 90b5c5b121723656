"""The timeline of collectives: when each rank arrived, and which rank was late."""
