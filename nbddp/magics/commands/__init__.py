"""The commands of ``%ddp`` that have their own module."""
