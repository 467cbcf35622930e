"""Everything that decides the numbers of a run.

In: a catalogue entry or a YAML file, and `--set` overrides. Out: a checked, hashable `RunConfig`.
"""
