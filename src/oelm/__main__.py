"""Entry point of the command `oelm`, which `python -m oelm` also starts.

If a library that the command line needs is not installed, the command prints how to install it.
"""

import sys
from typing import NoReturn

from oelm.errors import missing_library


def entry() -> NoReturn:
    """Run the command `oelm` with the arguments in `sys.argv`, and exit with the exit code of the command."""
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
