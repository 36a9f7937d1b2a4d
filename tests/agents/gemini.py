"""As much of the Gemini API as its own command-line client needs for a tool round trip, and Tenuto's path for hints.

No server of this project speaks that dialect: here the client, its hooks and the proxy are under test. ``GeminiServer`` owns
the requests and hints that it has seen.
"""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMAND = "sleep 1; echo from-gemini"


class GeminiServer:
    """A server on loopback, for a ``with`` block. It asks for one shell command and then says that it is done."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.hints: list[dict[str, Any]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args: object) -> None:
                pass

            def do_GET(self) -> None:
                self._answer(b'{"server": "tenuto"}' if self.path == "/" else b"{}", "application/json")

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers.get("content-length") or 0)) or b"{}")
                if self.path == "/v1/kv_hints":
                    outer.hints += body["actions"]
                    self._answer(b'{"receipts": []}', "application/json")
                    return
                outer.requests.append((self.path, body))
                if "streamGenerateContent" in self.path:
                    self._answer(b"data: " + json.dumps(_reply(body)).encode() + b"\r\n\r\n", "text/event-stream")
                else:
                    self._answer(json.dumps({"totalTokens": 1}).encode(), "application/json")

            def _answer(self, data: bytes, kind: str) -> None:
                self.send_response(200)
                self.send_header("content-type", kind)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    def __enter__(self) -> GeminiServer:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)

    def told(self, action: str) -> list[dict[str, Any]]:
        """The payloads of one type of hint."""
        return [hint["payload"] for hint in self.hints if hint["action_type"] == action]


def _reply(body: dict[str, Any]) -> dict[str, Any]:
    parts = body["contents"][-1].get("parts") or []
    if any("functionResponse" in part for part in parts):
        said: dict[str, Any] = {"text": "The shell spoke."}
    else:
        said = {"functionCall": {"name": "run_shell_command", "args": {"command": COMMAND, "description": "say it"}}}
    candidate = {"index": 0, "content": {"role": "model", "parts": [said]}, "finishReason": "STOP"}
    return {"candidates": [candidate], "usageMetadata": {"promptTokenCount": 9, "totalTokenCount": 12}}
