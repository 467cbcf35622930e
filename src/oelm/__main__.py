"""`python -m oelm`: the command line where its script is not on the path."""

from oelm.cli.main import entry

if __name__ == "__main__":
    entry()
