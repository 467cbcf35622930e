"""The command line `oelm`: each command is one function that calls the library and prints the result.

The library cyclopts converts the words of a command line to the typed parameters of that function. A command
prints text or JSON to stdout, an error as one line to stderr, and returns an exit code (0, 1, 2, 3, 75, 76 or
130).
"""
