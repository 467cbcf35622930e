"""The config of a run: every setting that affects the results of the run, as typed and checked dataclasses.

Input: a catalogue entry or a YAML file, and `--set` overrides. Output: a checked `RunConfig`, and its hash.
"""
