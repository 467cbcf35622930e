"""Find the fields in which two run configs differ."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from oelm.config.mapping import to_mapping
from oelm.config.run_config import RunConfig


def config_diff(a: RunConfig, b: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Return {dotted field name: (value in a, value in b)} of the fields that differ and affect results."""
    left, right = (dict(_flatten(to_mapping(c, compared_only=True))) for c in (a, b))
    names = list(left) + [name for name in right if name not in left]
    return {n: (left.get(n), right.get(n)) for n in names if left.get(n) != right.get(n)}


def diff_lines(a: RunConfig, b: RunConfig) -> list[str]:
    """Return one line per field that differs, such as `optim.lr: 0.001 -> 0.01`, for an error message."""
    return [f"  {name}: {old!r} -> {new!r}" for name, (old, new) in config_diff(a, b).items()]


def _flatten(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _flatten(inner, f"{prefix}.{name}" if prefix else name)
    else:
        yield prefix, value
