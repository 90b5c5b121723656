import subprocess
import sys
import time

import pytest
from conditions import cpu_time
from processes import wait_until

from nbddp.child_processes import busy_time

COMPUTE = (
    "import os; os.sched_setaffinity(0, {0}); os.nice(%d); print(flush=True)\nwhile True: pass"
)
SLEEP = "import time; print(flush=True); time.sleep(60)"


@pytest.mark.skipif(
    sys.platform != "linux", reason="other systems do not tell who waits for a core"
)
def test_a_process_that_waits_for_a_core_is_busy_and_one_that_sleeps_is_not() -> None:
    started = []
    try:
        for code in (COMPUTE % 0, COMPUTE % 19, SLEEP):
            process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
            started.append(process)
            assert process.stdout is not None
            process.stdout.readline()
        _, waiting, sleeping = (each.pid for each in started)
        before = {pid: (busy_time(pid), cpu_time(pid)) for pid in (waiting, sleeping)}
        began = time.monotonic()
        assert wait_until(lambda: busy_time(waiting) > before[waiting][0] + 2.0)
        assert cpu_time(waiting) - before[waiting][1] < 1.0
        assert busy_time(sleeping) - before[sleeping][0] < 0.5 * (time.monotonic() - began)
    finally:
        for process in started:
            process.kill()
            process.communicate()
