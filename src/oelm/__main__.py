"""Run the command line as `python -m oelm`, for environments where the `oelm` script is not on the PATH."""

from oelm.cli.main import entry

if __name__ == "__main__":
    entry()
