"""``nbddp mcp``: the state of runs for agents, through the Model Context Protocol."""

from __future__ import annotations

from nbddp.extension.manifest import Command, Extension
from nbddp.wire.options.option import flag


class McpCommand(Command, example="mcp"):
    """Serve the state of your runs to an agent, over standard input and output."""

    allow_actions: bool = flag(
        "--allow-actions",
        "the agent may interrupt cells, stop all ranks and kill a rank; else it only reads",
    )


# the tools that Jupyter servers with jupyter-server-mcp collect; they only read
JUPYTER_TOOLS = [
    f"nbddp.extensions.agents.tools:nbddp_{name}"
    for name in ("status", "why", "logs", "metrics", "runs", "compare", "check")
]

EXTENSION = Extension(
    name="agents",
    needs=("checks", "runs", "terminal"),
    terminal_commands=(McpCommand,),
    terminal="nbddp.extensions.agents.mcp_server:Server",
)
