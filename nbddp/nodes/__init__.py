"""The name of the program of a node: ``torchrun ... -m nbddp.nodes``; see ``extensions.nodes``."""
