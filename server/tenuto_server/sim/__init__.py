"""Virtual time around the real engine: the same control plane, driven by a clock that only moves when told."""
