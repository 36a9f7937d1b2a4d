"""A ``tenuto serve`` process of one's own: started on a free loopback port, watched, stopped by its process id.

``ServerProcess`` owns the process and its log. Nothing is served beyond loopback.
"""

from __future__ import annotations

import http.client
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

from prometheus_client.parser import text_string_to_metric_families

from tenuto_server.errors import TenutoServerError

START_LIMIT_S = 120.0
STOP_LIMIT_S = 10.0

COUNTERS: dict[str, tuple[str, str | None]] = {
    "prefill_tokens": ("tenuto_prefill_tokens_total", None),
    "decode_tokens": ("tenuto_decode_tokens_total", None),
    "forward_ns": ("tenuto_loop_forward_ns", None),
    "preemptions": ("tenuto_preemptions_total", None),
    "leases_granted": ("tenuto_leases_granted_total", None),
    "leases_broken": ("tenuto_leases_broken_total", None),
    "offloads_early": ("tenuto_offloads_early_total", None),
    "prefetches_on_time": ("tenuto_prefetches_total", "on_time"),
    "prefetches_late": ("tenuto_prefetches_total", "late"),
    "computed_instead_of_loaded": ("tenuto_computed_instead_of_loaded_total", None),
    "blocks_down_to_host": ("tenuto_transferred_blocks_total", "device>host"),
    "blocks_down_to_disk": ("tenuto_transferred_blocks_total", "host>disk"),
    "blocks_up_from_host": ("tenuto_transferred_blocks_total", "host>device"),
    "blocks_up_from_disk": ("tenuto_transferred_blocks_total", "disk>device"),
    "hints_accepted": ("tenuto_hints_total", "accepted"),
    "hints_rejected": ("tenuto_hints_total", "rejected"),
}
"""What the report counts, by name: metric and label value. A counter that the server has not shown yet stands at 0."""


class ServerFailed(TenutoServerError):
    """The server did not start, or went away; the message ends with the last lines of its log."""


class ServerProcess:
    """Context manager around ``tenuto serve``. ``flags``: in addition to address and port. ``folder``: for port and log.

    Raises ``ServerFailed`` from ``__enter__`` when it is not healthy within two minutes.
    """

    def __init__(self, flags: Sequence[str], folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.log = folder / "server.log"
        self._port_file = folder / "port"
        self._port_file.unlink(missing_ok=True)
        fixed = ["--host", "127.0.0.1", "--port", "0", "--port-file", str(self._port_file)]
        self.command = [sys.executable, "-m", "tenuto", "serve", *flags, *fixed]
        self.url = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._out: IO[bytes] | None = None

    def __enter__(self) -> ServerProcess:
        self._out = self.log.open("wb")
        self._process = subprocess.Popen(self.command, stdout=self._out, stderr=subprocess.STDOUT)
        try:
            self._wait()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int | None:
        """Of the process, while it runs."""
        return self._process.pid if self._process is not None else None

    def _wait(self) -> None:
        give_up = time.monotonic() + START_LIMIT_S
        while time.monotonic() < give_up:
            if self._process is not None and self._process.poll() is not None:
                raise ServerFailed(f"the server ended with status {self._process.returncode}:\n{self.last_lines()}")
            text = self._port_file.read_text().strip() if self._port_file.exists() else ""
            if text:
                self.url = f"http://127.0.0.1:{int(text.rsplit(':', 1)[-1])}"
                if self._get("/health", quiet=True) is not None:
                    return
            time.sleep(0.05)
        raise ServerFailed(f"the server was not ready within {START_LIMIT_S:.0f} s:\n{self.last_lines()}")

    def last_lines(self, count: int = 15) -> str:
        """The end of its log."""
        with self.log.open(encoding="utf-8", errors="replace") as file:
            return "".join(deque(file, count)).rstrip() or "(its log is empty)"

    def _get(self, path: str, *, quiet: bool = False) -> str | None:
        connection = http.client.HTTPConnection(self.url.removeprefix("http://"), timeout=10.0)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            body = response.read().decode("utf-8")
            if response.status == 200:
                return body
            if quiet:
                return None
            raise ServerFailed(f"{path} answered {response.status}:\n{self.last_lines()}")
        except OSError as error:
            if quiet:
                return None
            raise ServerFailed(f"{path} did not answer ({error}):\n{self.last_lines()}") from None
        finally:
            connection.close()

    def metrics(self) -> dict[tuple[str, str | None], float]:
        """All figures of ``/metrics`` by (name, label value); the label value is None where there is none."""
        found: dict[tuple[str, str | None], float] = {}
        for family in text_string_to_metric_families(self._get("/metrics") or ""):
            for sample in family.samples:
                label = next(iter(sample.labels.values()), None)
                found[sample.name, label] = float(sample.value)
        return found

    def stop(self) -> None:
        """Asks the process to end, then makes it; a second call does nothing."""
        process, self._process = self._process, None
        if process is not None and process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._out is not None:
            self._out.close()


def counted(
    before: Mapping[tuple[str, str | None], float], after: Mapping[tuple[str, str | None], float]
) -> dict[str, float]:
    """What ``COUNTERS`` rose by."""
    return {name: after.get(key, 0.0) - before.get(key, 0.0) for name, key in COUNTERS.items()}
