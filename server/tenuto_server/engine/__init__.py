"""The control plane: one deterministic state machine, ``Engine.step(now_ns, events) -> StepPlan``, and the thread that runs it."""
