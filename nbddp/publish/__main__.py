"""``python -m nbddp.publish``: started by a notebook, for one run and one tracker."""

import sys

from nbddp.publish.publisher_process import main

sys.exit(main())
