"""Extensions: each folder can be deleted, and the core works without it."""
