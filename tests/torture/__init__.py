"""Fault injection: every promise about crashes, damaged files and full disks, tried many times.

`python -m tests.torture` (or `make torture`) runs the long form and prints tried / survived / wrong for each
kind of fault; test_short.py runs a sample of each kind as part of the tests.

Survived: the command ended with a message and the right exit code, and the run then finished with the same
bytes, or the message names the file and what to do. Wrong: a traceback, a hang, another number without a
warning, a finished result lost, a run shown as running without a process.
"""
