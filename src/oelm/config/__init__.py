"""Everything that affects the numbers of a run, as typed and checked dataclasses.

Input: a catalogue entry or a YAML file, and `--set` overrides. Output: a checked `RunConfig`, and its hash.
"""
