"""Let transformers' auto classes load folders saved by oelm, once transformers is imported.

`import oelm` must not import transformers, which takes seconds and is optional. So an import hook
waits for the two modules that define the auto classes, and registers oelm's classes after their import.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

#: Module of transformers -> the function in oelm.methods.saving.auto to call after the module is imported.
_REGISTRATIONS = {
    "transformers.models.auto.configuration_auto": "register_config",
    "transformers.models.auto.modeling_auto": "register_models",
}


class _CallAfterImport(MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name not in self.waiting:
            return None
        self.waiting.remove(name)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                execute(module)
                _register(name)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def __init__(self, waiting: set[str]) -> None:
        self.waiting = waiting


def register_with_transformers() -> None:
    """Register oelm with the auto classes: now if they are imported already, otherwise when they are."""
    waiting = set(_REGISTRATIONS) - set(sys.modules)
    for name in _REGISTRATIONS:
        if name not in waiting:
            _register(name)
    if waiting:
        sys.meta_path.insert(0, _CallAfterImport(waiting))


def _register(name: str) -> None:
    getattr(importlib.import_module("oelm.methods.saving.auto"), _REGISTRATIONS[name])(sys.modules[name])
