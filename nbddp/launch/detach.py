"""Imported first by the forkserver, and at once: it leaves the kernel's process group.

Jupyter interrupts that group, and kills it when a kernel does not end: a helper that was still
importing went with it, and its folder stayed.
"""

import os
from contextlib import suppress

with suppress(PermissionError):  # already the leader of a session of its own
    os.setsid()
