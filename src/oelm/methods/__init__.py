"""THE IDEA, pure torch: orthogonal starts, what is frozen when, applying it to any model, proving it.

The package is also callable, because `oelm.methods()` is the public way to list the named methods.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from oelm.methods.method import Method


class _CallablePackage(ModuleType):
    def __call__(self) -> dict[str, Method]:
        from oelm.methods.presets import methods

        return methods()


sys.modules[__name__].__class__ = _CallablePackage
