"""The diagnosis of a stalled command: which rank the others wait for, by the stacks of all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine_plugin_processes.worker_pool import Command

Stack = tuple[str, int, str]  # file, line, function
COLLECTIVES = "torch/distributed/"


def diagnose(command: Command, stacks: Mapping[int, Sequence[Stack]]) -> tuple[int, str, str]:
    """Describe a command that is past its deadline.

    A rank in a function of ``torch.distributed`` waits for other ranks. The others wait for a rank that is elsewhere or
    has not sent its stack.

    Args:
        command: the command.
        stacks: stack of each rank that sent one, the innermost frame last.

    Returns:
        The rank to blame, the cause in one sentence, and all stacks as text.
    """
    waiting, ranks, (seconds, key) = command.waiting, command.ranks, command.deadline
    innermost = {rank: stack[-1][0] for rank, stack in stacks.items() if stack}
    in_collective = [rank for rank in waiting if COLLECTIVES in innermost.get(rank, "")]
    suspects = [rank for rank in waiting if rank not in in_collective] or list(waiting)
    blamed = suspects[0]
    answered = [rank for rank in ranks if rank not in waiting]
    parts = [f"no answer to '{command.what[1]}' within {seconds / 60:g} minutes ({key})"]
    parts.append(f"it is in {place(stacks.get(blamed))}")
    for rank in waiting:
        if rank != blamed:
            for_whom = f" for rank {blamed}" if rank in in_collective and blamed not in in_collective else ""
            verb = f"waits{for_whom}" if rank in in_collective else "is"
            parts.append(f"rank {rank} {verb} in {place(stacks.get(rank))}")
    if answered:
        parts.append(f"answered: rank {', '.join(map(str, answered))}")
    text = "\n".join(f"rank {rank}:\n{_lines(stack)}" for rank, stack in sorted(stacks.items()))
    silent = sorted(set(ranks) - set(stacks))
    text += "".join(f"\nrank {rank}: no answer; it holds the interpreter." for rank in silent)
    return blamed, "; ".join(parts), text


def place(stack: Sequence[Stack] | None) -> str:
    """Return the innermost frame as text."""
    if not stack:
        return "code that holds the interpreter"
    file, line, function = stack[-1]
    return f"{function} ({file}:{line})"


def _lines(stack: Sequence[Stack]) -> str:
    return "\n".join(f"  {file}:{line} in {function}" for file, line, function in stack)
