"""Measurements against a live server, and the demonstration."""
