"""``python -m nbddp.publish``: a notebook starts it for one run and one tracker."""

import sys

from nbddp.publish.publisher_process import main

sys.exit(main())
