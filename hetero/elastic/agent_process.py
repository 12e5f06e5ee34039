"""Runs the agent of a node as a process of its own, from its limits and output to its exit code."""

import asyncio
import sys

from hetero.distributed.process_output import ignore_output_errors
from hetero.elastic.agent import Agent
from hetero.elastic.agent_options import AgentOptions
from hetero.elastic.ends import End
from hetero.elastic.error_log import limit_error_log
from hetero.errors import HeteroError
from hetero.peer_limits import raise_descriptor_limit
from hetero.standard_output import tell_error


def run_agent(options: AgentOptions) -> int:
    """Run the agent of a node to its end; returns the exit code."""
    ignore_output_errors()
    limit_error_log()
    # Ranks and their store inherit it.
    raise_descriptor_limit()

    def show(line: str) -> None:
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()

    async def live() -> int:
        agent = Agent(options, show=show)
        while (end := await agent.run()).kind is End.JOB_BEGINS_AGAIN:
            show(f"hetero: {end.reason}")
            agent = Agent(options, show=show)
        message = end.message(job=options.job, folder=options.folder, committed=agent.committed)
        if end.exit_code == 0:
            show(f"hetero: {message}")
        else:
            tell_error(HeteroError(message))
        return end.exit_code

    return asyncio.run(live())
