"""A board on a free port, for tests that ask it over HTTP or open it in a browser."""

from __future__ import annotations

import http.client
import json
import threading
from pathlib import Path
from typing import Any

import uvicorn

from oelm.cli.board import HOST, listen
from oelm.report.board.server import Site
from oelm.report.board.snapshot import Board
from run_factory import planned

TOKEN = "the-token"


class BoardServer:
    """A running board. As context manager, it ends with the block."""

    def __init__(self, root: Path) -> None:
        self.board = Board(root, planned())
        listener = listen(0)
        self.port = listener.getsockname()[1]
        self.url = f"http://{HOST}:{self.port}/{TOKEN}/"
        config = uvicorn.Config(Site(self.board, "en").app(TOKEN), log_level="warning", lifespan="off")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [listener]}, daemon=True)

    def __enter__(self) -> BoardServer:
        self._thread.start()
        self.board.wait()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.should_exit = True
        self._thread.join(60)

    def ask(self, path: str, *, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], str]:
        """Return the status, the headers and the text of the answer to one request."""
        connection = http.client.HTTPConnection(HOST, self.port, timeout=60)
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, text

    def page(self, path: str) -> str:
        """Return the text of an existing page, such as `en/`."""
        status, _headers, text = self.ask(f"/{TOKEN}/{path}")
        assert status == 200, text
        return text

    def json(self, path: str) -> Any:
        return json.loads(self.page(path))
