"""The end of an error message: modules that may contain Q or K, and code that registers their class."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import nn

from oelm.methods.reading.build import find_number
from oelm.methods.reading.families import FUSED_WORDS, KEY_WORDS, NUM_HEADS, QK_WORDS, QUERY_WORDS, words

_MAX_CANDIDATES = 8  # an error message lists at most this many modules


def attention_around(model: nn.Module, name: str) -> str | None:
    """Return the name of the innermost module that contains `name` and has "attention" in its class name.

    Short forms such as "attn" count, too. Return None if there is no such module.
    """
    steps = name.split(".")
    for depth in range(len(steps) - 1, -1, -1):
        around = ".".join(steps[:depth])
        if re.search("attention|attn|mhsa|mhca", type(model.get_submodule(around)).__name__, re.IGNORECASE):
            return around
    return None


def list_candidates(model: nn.Module, modules: Sequence[tuple[str, nn.Module | nn.Parameter]]) -> str:
    """Return the end of an error message: modules that may contain Q or K, and code to register them."""
    if not modules:
        return " The model has no linear layers at all."
    modules = sorted(modules, key=lambda found: not may_be_qk(found[0]))
    shown = "\n".join(f"    {name}: {type(module).__name__}" for name, module in modules[:_MAX_CANDIDATES])
    left = len(modules) - _MAX_CANDIDATES
    more = f"\n    ... and {left} more" if left > 0 else ""
    return f"\nCandidates:\n{shown}{more}\n{_how_to_register(model, [name for name, _ in modules])}"


def may_be_qk(name: str) -> bool:
    """Return whether a module is named like a query, a key or a fused projection."""
    return bool(words(name.rpartition(".")[2].lower()) & (QK_WORDS | FUSED_WORDS))


def _how_to_register(model: nn.Module, names: list[str]) -> str:
    """Return code that registers the class that contains the first of these modules, for an error message."""
    around = names[0].rpartition(".")[0]
    attention = attention_around(model, names[0])
    if attention is not None and attention == around.rpartition(".")[0]:
        around = attention  # the projections are in a submodule of the attention module
    holder = model.get_submodule(around)
    prefix = f"{around}." if around else ""
    children = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
    found = {child: words(child.rpartition(".")[2].lower()) for child in children}
    queries, keys, fused = (
        [child for child in children if found[child] & kind] for kind in (QUERY_WORDS, KEY_WORDS, FUSED_WORDS)
    )
    heads = next((n for n in NUM_HEADS if isinstance(getattr(holder, n, None), int)), "...")
    is_in_config = heads == "..." and find_number(model, holder, None, NUM_HEADS) is not None
    num_heads = "" if is_in_config else f', num_heads="{heads}"'
    call = f'    oelm.register_attention("{type(holder).__module__}.{type(holder).__qualname__}", '
    separate = f"{call}q={_argument(queries)}, k={_argument(keys)}{num_heads})\n"
    one = f'{call}fused={_argument(fused[:1])}, layout="block"{num_heads})  # or "per-head", "grouped"\n'
    is_named = bool(queries and keys) or bool(fused)
    return (
        f"Tell oelm where {type(holder).__name__} stores its Q and K, with one of these lines:\n"
        f"    import oelm\n"
        + (separate if not is_named or (queries and keys) else "")
        + (one if not is_named or (fused and not queries) else "")
        + f"{call}ignore=True)  # if it has no Q and K\n"
        f"    oelm.apply(model, method)"
    )


def _argument(names: list[str]) -> str:
    """Return names as an argument of `register_attention()`; "..." if there are none.

    >>> _argument(["q_a", "q_b"]), _argument(["q"]), _argument([])
    ('("q_a", "q_b")', '"q"', '"..."')
    """
    quoted = [f'"{name}"' for name in names] or ['"..."']
    return quoted[0] if len(quoted) == 1 else f"({', '.join(quoted)})"
