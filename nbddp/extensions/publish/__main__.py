"""``python -m nbddp.extensions.publish``: a notebook starts it for one run and one tracker."""

import sys

from nbddp.extensions.publish.publisher_process import main

sys.exit(main())
