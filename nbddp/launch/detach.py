"""Leave the kernel's process group; the forkserver imports this module first.

Jupyter interrupts that process group, and kills it if the kernel does not end. This killed
forkservers that were still importing, and their folders were left behind.
"""

import os
from contextlib import suppress

with suppress(PermissionError):  # already a session leader
    os.setsid()
