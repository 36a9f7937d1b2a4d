"""The companion inference server."""
