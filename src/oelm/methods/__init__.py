"""Methods: initialise and freeze the query and key projections of any transformer, in pure torch.

Input: a model and a method (a name or an `oelm.Method`). Output: the same model, changed in place, with a
record of what is frozen. Start reading at `apply.py`, whose docstring says what each module does.

The package itself can be called: `oelm.methods()` returns a dict from method name to `oelm.Method`.
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
