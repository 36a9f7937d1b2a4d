"""Hands one hook event of a coding agent to the local proxy: ``python -I -S hook_send.py URL < payload``. No state.

Runs in line with the agent, once an event, so it imports next to nothing, waits at most 0.2 s, prints nothing, and ends
with status 0 whatever happens. ``TENUTO_HOOK_URL`` (set by ``tenuto run``) wins over the URL given. The payload is passed
on unread, to this machine only.
"""

import os
import sys

TIMEOUT_S = 0.2
DEFAULT_URL = "http://127.0.0.1:4040/hook"
LOCAL = ("127.0.0.1", "localhost", "[::1]")


def send(url: str, payload: bytes) -> bool:
    """Posts the payload without waiting for an answer; False when nobody listens there."""
    import _socket  # the C module alone: the Python one on top of it costs as much as all the rest

    address, _, path = url.partition("://")[2].partition("/")
    host, _, port = address.rpartition(":")
    if host not in LOCAL:
        return False
    head = f"POST /{path} HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json\r\nConnection: close\r\n"
    family = _socket.AF_INET6 if host == "[::1]" else _socket.AF_INET
    peer = _socket.socket(family, _socket.SOCK_STREAM)
    try:
        peer.settimeout(TIMEOUT_S)
        peer.connect(("::1" if host == "[::1]" else "127.0.0.1", int(port)))
        data = memoryview(f"{head}Content-Length: {len(payload)}\r\n\r\n".encode() + payload)
        while data:
            data = data[peer.send(data) :]
        peer.shutdown(_socket.SHUT_WR)
        peer.recv(64)  # until the proxy has read everything: closing earlier could drop what it has not
        return True
    finally:
        peer.close()


def main(argv: list[str]) -> int:
    """Reads the payload from standard input and sends it. Always 0."""
    try:
        url = os.environ.get("TENUTO_HOOK_URL") or (argv[0] if argv else DEFAULT_URL)
        send(url, sys.stdin.buffer.read())
    except Exception:  # nothing here may ever reach the agent
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
