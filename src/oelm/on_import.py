"""Register oelm's folders with transformers' auto classes when transformers is imported.

`import oelm` must not import transformers, which takes seconds and is optional. So a finder waits for the two
modules with the auto classes, and calls the registration after each of them.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

#: Module of transformers -> the function of oelm.methods.saving.auto to call once it is imported.
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
    """Register now what is imported already, and the rest when it is imported."""
    waiting = set(_REGISTRATIONS) - set(sys.modules)
    for name in _REGISTRATIONS:
        if name not in waiting:
            _register(name)
    if waiting:
        sys.meta_path.insert(0, _CallAfterImport(waiting))


def _register(name: str) -> None:
    getattr(importlib.import_module("oelm.methods.saving.auto"), _REGISTRATIONS[name])(sys.modules[name])
