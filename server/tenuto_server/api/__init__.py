"""The HTTP surface: OpenAI-compatible generation, hints, sessions, health, metrics."""
