"""What the kernel and the forkserver that its ranks come from have agreed on; imports no torch."""

import signal

FOLDER = "NBDDP_SOCKETS"  # the environment variable that names the folder of its sockets
CUDA_USED = "cuda-used"  # a file in that folder: what is forked from the helper cannot use CUDA
GROW_SIGNAL = signal.SIGUSR1  # one more part, now that nobody waits for a start
GROWN_BY = ("sympy", "torch.fx.experimental.symbolic_shapes", "torch._dynamo")
GROW_PARTS = 1 + len(GROWN_BY)  # the first is a warm shell
