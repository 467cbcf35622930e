"""The command `oelm`, also as `python -m oelm`. Without the libraries of the command line, it says so."""

import sys
from typing import NoReturn

from oelm.errors import missing_library


def entry() -> NoReturn:
    """Run `oelm` with the arguments of this process, and exit."""
    try:
        from oelm.cli.main import entry as run
    except ModuleNotFoundError as error:
        explained = missing_library(error, "the command `oelm`")
        if explained is None:
            raise
        print(f"oelm: {explained}", file=sys.stderr)
        sys.exit(explained.exit_code)
    run()


if __name__ == "__main__":
    entry()
