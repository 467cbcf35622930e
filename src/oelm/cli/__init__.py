"""The command line, `oelm`: parse, call, print.

In: words from the shell, read by cyclopts into the typed parameters of one function per command.
Out: text or JSON on stdout, errors as one line on stderr, and an exit code (0, 1, 2, 75, 76 or 130).
"""
