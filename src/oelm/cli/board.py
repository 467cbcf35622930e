"""`oelm board`: show the state of all runs, curves and verdicts on a live page in the browser."""

from __future__ import annotations

import contextlib
import errno
import getpass
import secrets
import socket
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from oelm.cli.options import Catalogue, Runs, load_catalogues
from oelm.cli.output import print
from oelm.cli.report import Language
from oelm.errors import OelmError
from oelm.runs.scan import require_runs_folder

HOST = "127.0.0.1"  # reachable only from this machine, because the board shows the whole runs folder


def board(
    *,
    runs: Runs = "runs",
    port: Annotated[int, Parameter(validator=Number(gte=0, lte=65535))] = 8765,
    lang: Annotated[Language, Parameter(help="Language in which the board opens.")] = "en",
    catalogue: Catalogue = (),
) -> None:
    """Serve a page with all runs, curves and verdicts to the browsers of this machine until Ctrl-C.

    Parameters
    ----------
    port
        Port on 127.0.0.1; 0 picks a free one.
    """
    import uvicorn

    from oelm.experiments.catalogue import planned_configs
    from oelm.report.board.server import Site
    from oelm.report.board.snapshot import Board

    if Path(runs).exists():
        require_runs_folder(runs)
    else:  # the board may be started before the first run
        print(f"note: the runs folder {runs} does not exist yet")
    load_catalogues(catalogue)
    with listen(port) as listener:
        token, port = secrets.token_urlsafe(24), listener.getsockname()[1]
        app = Site(Board(runs, planned_configs()), lang).app(token)
        print(f"http://{HOST}:{port}/{token}/")
        print(f"On another computer, first: ssh -L {port}:{HOST}:{port} {_this_machine()}")
        print("Ctrl-C ends the board; runs are not affected.", flush=True)
        config = uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off", ws="none")
        with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C is the normal way to end the board
            uvicorn.Server(config).run(sockets=[listener])


def listen(port: int) -> socket.socket:
    """Return a socket that listens on a port of 127.0.0.1; raise OelmError if the port is not available."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((HOST, port))
        listener.listen(100)
    except OSError as error:
        listener.close()
        if error.errno not in (errno.EADDRINUSE, errno.EACCES):
            raise
        why = "in use, perhaps by another board" if error.errno == errno.EADDRINUSE else "reserved for root"
        raise OelmError(
            f"port {port} is {why}; choose a different one with --port, or let --port 0 choose a free one"
        ) from None
    return listener


def _this_machine() -> str:
    try:
        return f"{getpass.getuser()}@{socket.gethostname()}"
    except (KeyError, OSError):  # in a container, the user ID may have no user name
        return socket.gethostname()
