"""Fault injection: test many times that oelm survives crashes, damaged files, full disks and hostile input.

`python -m tests.torture` (or `make torture`) tries all faults and prints for each kind of fault how many
cases were tried, how many oelm survived and how many went wrong. test_short.py tries a sample of most kinds
as part of the test suite.

A case is survived if the command ended with a message and the right exit code, and the run then finished with
the same bytes as an undisturbed run; or if the message names the damaged file. A case is wrong if there is a
traceback or a hang, if a number changes without a warning, if a finished result is lost, or if a run is shown
as running although no process works on it.
"""
