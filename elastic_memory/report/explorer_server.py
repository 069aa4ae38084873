"""A server of the microscope's page, on this machine only: its models read the text that is pasted into the page."""

import json
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock
from typing import Any

HOST = "127.0.0.1"
LARGEST = 8 * 2**20  # bytes of a pasted text


class Server:
    """Serves one page and answers `POST /read` with what `read` makes of a text."""

    def __init__(self, page: str, read: Callable[[str], list[dict[str, Any]]], port: int = 0):
        lock = Lock()

        def one_at_a_time(text: str) -> list[dict[str, Any]]:
            with lock:
                return read(text)

        class Handler(_Handler):
            content, reader = page.encode(), staticmethod(one_at_a_time)

        # Threads: a browser keeps connections open that it may never use.
        try:
            self.server = _Threads((HOST, port), Handler)
        except OSError as error:
            raise ValueError(f"--port {port}: {error.strerror}; give another, or 0 for any that is free") from None
        self.address = f"http://{HOST}:{self.server.server_port}/"

    def run(self) -> None:
        """Serve until interrupted."""
        try:
            self.server.serve_forever()
        except KeyboardInterrupt:
            pass
        finally:
            self.server.server_close()


class _Threads(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing: a browser that has closed its connection waits for no answer."""


class _Handler(BaseHTTPRequestHandler):
    content: bytes
    reader: Callable[[str], list[dict[str, Any]]]

    def do_GET(self) -> None:
        """The page, and nothing else."""
        if not self._ours():
            return
        if self.path != "/":
            self._answer(404, {"error": "there is one page here: /"})
        else:
            self._send(200, self.content, "text/html; charset=utf-8")

    def do_POST(self) -> None:
        """Let the models read a text, and answer with what the page shows of it."""
        if not self._ours():
            return
        try:
            length = int(self.headers.get("Content-Length", ""))
            if self.path != "/read" or not 0 < length <= LARGEST:
                raise ValueError(f"POST /read takes JSON of 1 to {LARGEST:,} bytes")
            told = json.loads(self.rfile.read(length))
            if not isinstance(told, dict) or not isinstance(told.get("text"), str):
                raise ValueError('give {"text": "..."}')
            self._answer(200, {"subjects": type(self).reader(told["text"])})
        except (ValueError, RecursionError) as error:
            self._answer(400, {"error": str(error)})
        except Exception as error:  # whatever a model does, such as running out of memory: the server keeps running
            self._answer(500, {"error": " ".join(f"{type(error).__name__}: {error}".split())})

    def _ours(self) -> bool:
        """Whether the request was made by our own page: a page from elsewhere must not use the model."""
        host = f"{HOST}:{self.server.server_port}"  # type: ignore[attr-defined]
        origin = self.headers.get("Origin")
        if self.headers.get("Host") == host and origin in (None, f"http://{host}"):
            return True
        self._answer(403, {"error": f"open http://{host}/"})
        return False

    def _answer(self, status: int, content: dict[str, Any]) -> None:
        self._send(status, json.dumps(content, allow_nan=False).encode(), "application/json")

    def _send(self, status: int, content: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args: Any) -> None:
        """Nothing: the terminal is for what matters."""
