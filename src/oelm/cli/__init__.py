"""The command line `oelm`: each command is one function that calls the library and prints the result.

Input: the words of a command line, which cyclopts converts to the typed parameters of that function.
Output: text or JSON on stdout, an error as one line on stderr, and an exit code (0, 1, 2, 75, 76 or 130).
"""
