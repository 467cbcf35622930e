"""Files: atomic writes, size-limited reading of JSON and YAML, checksums and locks. Shared by all rooms."""
