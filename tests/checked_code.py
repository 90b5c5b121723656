"""Code samples for the rules of `%ddp check`, and their findings."""

import textwrap
from functools import partial
from typing import Any

from nbddp.extensions.checks.checker import check_source
from nbddp.extensions.checks.source import CellSource

COMMON = "import torch\nimport torch.distributed as dist\n"
IMPORTS_DDP = "from torch.nn.parallel import DistributedDataParallel as DDP\n"
ON_FIRST = "if rank == 0"


def under(head: str, *texts: str) -> str:
    return f"{head}:\n" + textwrap.indent("".join(texts), "    ")


def rules_in(text: str, kinds: dict[str, str] | None = None, **options: Any) -> list[str]:
    return [each.rule for each in check_source(CellSource(text, kinds, **options))]


def assert_found(rules: str, *texts: str, head: str = "", **options: Any) -> None:
    """Check that exactly these rules report a finding in each text; with a head, in a script."""
    for text in texts:
        found = rules_in(head + text, **{"is_cell": not head, **options})
        assert found == rules.split(), text


assert_no_findings = partial(assert_found, "")  # no rule reports a finding
