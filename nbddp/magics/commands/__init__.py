"""The commands of ``%ddp`` that have a module of their own."""
