"""OELM: freeze the query/key projections of a transformer at an orthogonal initialisation, train the rest.

    import oelm
    applied = oelm.apply(model, "oelm-freeze", seed=42)
    print(applied)

The names in `__all__` are the whole public API. They load on first use, so that `import oelm` stays fast.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from oelm.on_import import register_with_transformers

__version__ = "0.1.0"

_HOME = {
    "Applied": "oelm.methods.apply",
    "apply": "oelm.methods.apply",
    "AuditReport": "oelm.methods.audit",
    "audit": "oelm.methods.audit",
    "disabled": "oelm.methods.remove",
    "folded_state": "oelm.methods.saving.fold",
    "load": "oelm.methods.saving.load",
    "Method": "oelm.methods.method",
    "model_card": "oelm.methods.saving.hub",
    "OELMCallback": "oelm.methods.callback",
    "OelmError": "oelm.errors",
    "param_groups": "oelm.methods.param_groups",
    "Preview": "oelm.methods.preview",
    "preview": "oelm.methods.preview",
    "push_to_hub": "oelm.methods.saving.hub",
    "qk_projections": "oelm.methods.reading.find",
    "register_attention": "oelm.methods.reading.families",
    "register_method": "oelm.methods.presets",
    "remove": "oelm.methods.remove",
    "save": "oelm.methods.saving.save",
    "save_peft_adapter": "oelm.methods.saving.peft",
}

__all__ = ["__version__", "methods", *_HOME]

if TYPE_CHECKING:
    from oelm.errors import OelmError as OelmError
    from oelm.methods.apply import Applied as Applied
    from oelm.methods.apply import apply as apply
    from oelm.methods.audit import AuditReport as AuditReport
    from oelm.methods.audit import audit as audit
    from oelm.methods.callback import OELMCallback as OELMCallback
    from oelm.methods.method import Method as Method
    from oelm.methods.param_groups import param_groups as param_groups
    from oelm.methods.presets import methods as methods
    from oelm.methods.presets import register_method as register_method
    from oelm.methods.preview import Preview as Preview
    from oelm.methods.preview import preview as preview
    from oelm.methods.reading.families import register_attention as register_attention
    from oelm.methods.reading.find import qk_projections as qk_projections
    from oelm.methods.remove import disabled as disabled
    from oelm.methods.remove import remove as remove
    from oelm.methods.saving.fold import folded_state as folded_state
    from oelm.methods.saving.hub import model_card as model_card
    from oelm.methods.saving.hub import push_to_hub as push_to_hub
    from oelm.methods.saving.load import load as load
    from oelm.methods.saving.peft import save_peft_adapter as save_peft_adapter
    from oelm.methods.saving.save import save as save


if not TYPE_CHECKING:  # type checkers must not see __getattr__: with it, they would accept any name

    def __getattr__(name: str) -> Any:
        if name == "methods":  # `oelm.methods` is a package that can also be called like a function
            return importlib.import_module("oelm.methods")
        if name in _HOME:
            try:
                return getattr(importlib.import_module(_HOME[name]), name)
            except ModuleNotFoundError as error:
                from oelm.errors import missing_library

                if (explained := missing_library(error, f"oelm.{name}")) is None:
                    raise
                raise explained from None
        raise AttributeError(f"module 'oelm' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


register_with_transformers()
