"""``torchrun ... -m nbddp.worker --join FILE --ranks N``; see :mod:`nbddp.nodes.agent`."""

import importlib
import sys

if __name__ == "__main__":
    sys.exit(importlib.import_module("nbddp.nodes.agent").main())
