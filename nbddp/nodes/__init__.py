"""``torchrun ... -m nbddp.nodes`` runs the program of a node, which is in ``extensions.nodes``."""
