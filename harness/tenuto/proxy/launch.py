"""Starts the agent and stays out of its way: same terminal, signals passed on, its exit status returned. No other state."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping, Sequence

NOT_FOUND = 127
NOT_EXECUTABLE = 126
# The terminal sends these to the whole foreground group, so the agent has them already; the proxy only has to survive them.
_SURVIVED = ("SIGINT", "SIGQUIT")
_PASSED_ON = ("SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")


async def run_agent(argv: Sequence[str], env: Mapping[str, str | None]) -> int:
    """Runs ``argv`` to its end; ``env`` is added to this process's environment, None removes. The agent's exit status,
    128 + n when a signal ended it, 126 or 127 when it could not be started (``OSError`` is raised to say why)."""
    full = {name: value for name, value in {**os.environ, **env}.items() if value is not None}
    loop = asyncio.get_running_loop()
    installed: list[signal.Signals] = []
    pending: list[signal.Signals] = []
    child: asyncio.subprocess.Process | None = None

    def on_signal(number: signal.Signals, passes: bool) -> None:
        if not passes:
            return
        if child is None:
            pending.append(number)
        else:
            with contextlib.suppress(ProcessLookupError):
                child.send_signal(number)

    for names, passes in ((_SURVIVED, False), (_PASSED_ON, True)):
        for name in names:
            number = getattr(signal, name, None)
            if number is not None:
                with contextlib.suppress(NotImplementedError, RuntimeError):  # no such handlers on this platform
                    loop.add_signal_handler(number, on_signal, number, passes)
                    installed.append(number)
    try:
        child = await asyncio.create_subprocess_exec(*argv, env=full)
        for number in pending:
            on_signal(number, True)
        status = await child.wait()
        return status if status >= 0 else 128 - status
    finally:
        for number in installed:
            loop.remove_signal_handler(number)
