"""What work costs on this machine, as the engine has seen it. Owner: the engine; taught by completions only."""

from __future__ import annotations

from tenuto_server.config import EngineConfig

_ALPHA = 0.05


class Costs:
    """Prefill seconds per token ``a + b * x`` and tier bandwidths, starting from measured settings and following what
    completions report (exponentially weighted, so that one odd step changes little)."""

    def __init__(self, config: EngineConfig) -> None:
        self.prefill_a_s, self.prefill_b_s = config.prefill_a_s, config.prefill_b_s
        self.bytes_per_s = [float("inf"), config.host_bytes_per_s, config.disk_bytes_per_s]
        self.waiting = 0.0
        self.follow_queue = True
        self._block_bytes = config.block_bytes

    def prefill_s(self, start: int, end: int) -> float:
        """Seconds to compute tokens [start, end): sum of a + b * x."""
        n = end - start
        return n * (self.prefill_a_s + self.prefill_b_s * (start + end) / 2)

    def load_s_per_block(self, tier: int) -> float:
        """Seconds to bring one block from a tier to the device."""
        return self._block_bytes / self.bytes_per_s[tier] if tier else 0.0

    def saw_forward(self, predicted_s: float, elapsed_s: float) -> None:
        """A forward that was mostly prefill took this long."""
        if predicted_s > 0 and elapsed_s > 0:
            factor = 1 + _ALPHA * (min(4.0, max(0.25, elapsed_s / predicted_s)) - 1)
            self.prefill_a_s *= factor
            self.prefill_b_s *= factor

    def saw_transfer(self, tier: int, blocks: int, elapsed_s: float) -> None:
        """A copy between the device and a lower tier took this long."""
        if blocks and elapsed_s > 0:
            seen = blocks * self._block_bytes / elapsed_s
            self.bytes_per_s[tier] += _ALPHA * (seen - self.bytes_per_s[tier])

    def saw_queue(self, turns: int) -> None:
        """That many turns ran or waited at a step. ``follow_queue`` False: it does not count (a study without time)."""
        if self.follow_queue:
            self.waiting += _ALPHA * (turns - self.waiting)
