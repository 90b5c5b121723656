"""Run the program of a node."""

import sys

from nbddp.extensions.nodes.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
