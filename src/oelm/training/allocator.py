"""How the C library hands out the memory of tensors: settings of this process, for Linux with glibc.

A training step frees and asks for the same large tensors again and again. glibc gives much of that back to
the system in between, and every page comes back by a fault, 4 KB at a time, filled with zeros.
`oelm bench step --arms baseline baseline@system` measures what the settings are worth on a machine.
"""

from __future__ import annotations

import ctypes
import os
import sys

_HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"  # torch reads it at its first allocation
_OF_GLIBC = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "GLIBC_TUNABLES")
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MEGABYTE = 1 << 20


def tune_allocator(*, huge_pages: bool = True, mmap_above: int = 0, trim_above: int = 0) -> None:
    """Set them, before the first tensor. What the user's own environment says goes first.

    huge_pages: ask for 2 MB pages where a tensor is large enough
    mmap_above: MB from which a tensor gets a mapping of its own, given back when freed (0 = glibc decides)
    trim_above: MB of free memory at the heap's end that are kept for the next step (0 = glibc decides)
    """
    if huge_pages:
        os.environ.setdefault(_HUGE_PAGES, "1")
    if not sys.platform.startswith("linux") or any(name in os.environ for name in _OF_GLIBC):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # another C library may have none
    if mallopt is None:
        return
    if mmap_above:
        mallopt(_M_MMAP_THRESHOLD, mmap_above * _MEGABYTE)
    if trim_above:
        mallopt(_M_TRIM_THRESHOLD, trim_above * _MEGABYTE)
