"""A page in the browser without a file: served once, and only to this machine."""

from __future__ import annotations

import secrets
import time
import webbrowser
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

_PATIENCE = 60.0  # seconds, for a browser that has to start


def show_once(html: str) -> bool:
    """Open a page in the browser, and wait until the browser has it.

    The address has a part that cannot be guessed, so that no other user of the machine reads the page.

    Returns:
        Whether a browser has fetched it.
    """
    path, body, fetched = f"/{secrets.token_urlsafe(16)}", html.encode(), []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path != path:
                self.send_error(404)
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            fetched.append(True)

        def log_message(self, format: str, *args: object) -> None:  # the name of the base class
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        server.timeout = 0.2
        url, opened = f"http://127.0.0.1:{server.server_port}{path}", list[bool]()
        browsing = Thread(target=lambda: opened.append(webbrowser.open(url)), daemon=True)
        browsing.start()
        end = time.monotonic() + _PATIENCE
        while not fetched and opened != [False] and time.monotonic() < end:
            server.handle_request()
        browsing.join()  # one in the terminal is there until it is closed
    return bool(fetched)
