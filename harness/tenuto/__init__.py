"""Tenuto: tell the inference server how long your agent will pause, so that its KV cache is still there when it returns."""
