"""The training kit: it needs no notebook and no store of nbddp, and runs under torchrun too."""
