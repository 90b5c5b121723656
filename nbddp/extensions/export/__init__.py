"""Export cells as a script for ``torchrun``, in plain Python."""
