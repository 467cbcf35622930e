"""What attention modules are called and how they store Q/K: the knowledge that readers.py applies.

Separate projections are recognised by name in any model. A fused weight does not say how its rows are
ordered, so those are listed by class; a class that is not listed is an error that shows how to register it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import nn

from oelm.errors import UsageError

LayoutName = Literal["block", "per-head", "grouped"]


@dataclass(frozen=True)
class AttentionSpec:
    """Where an attention class keeps its Q and K. Strings are attribute names, dotted if nested."""

    q: tuple[str, ...] = ()
    k: tuple[str, ...] = ()
    fused: str = ""
    layout: LayoutName = "block"
    roles: tuple[str, ...] = ("q", "k", "v")
    num_heads: str | int | None = None
    num_kv_heads: str | int | None = None
    head_dim: str | int | None = None
    ignore: bool = False


_WAYS = [
    "{}",
    "{}_proj",
    "{}_lin",
    "{}_linear",
    "{}_layer",
    "{}_head",
    "{}_global",
    "pos_{}_proj",
    "relative_{}_proj",
    "linear_{}",
    "to_{}",
    "w{}",
    "w_{}",
    "fc_{}",
    "proj_{}",
    "project_{}",
    "projection_{}",
]

#: Names of separate projections, in lower case. The position projections of DeBERTa and the global ones of
#: Longformer are queries and keys too: freezing only half of them would be a half-freeze.
QUERY_NAMES = frozenset(way.format(word) for way in _WAYS for word in ("q", "query"))
KEY_NAMES = frozenset(way.format(word) for way in _WAYS for word in ("k", "key"))
VALUE_NAMES = frozenset(way.format(word) for way in _WAYS for word in ("v", "value"))

#: Parts of names that make a matrix of an attention module suspect of holding Q or K.
SUSPECTS = frozenset({"q", "k", "qk", "kv", "qkv", "query", "key", "wq", "wk", "wqkv", "keys", "queries"})

#: Parts of names that say so wherever they stand: no other layer is called after several of q, k and v.
#: A linear attention beside the full ones of a hybrid model (in_proj_qkv, in_proj_qkvz) has Q/K as well.
FUSED_WORDS = frozenset({"qk", "kv", "qkv", "qkvz", "wqkv", "wkv"})

HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads", "nhead", "num_query_heads")
HEAD_DIM = (
    "head_dim",
    "attention_head_size",
    "key_value_proj_dim",
    "head_size",
    "d_kv",
    "dim_head",
    "d_head",
)
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")


def _gpt2(attention: nn.Module) -> AttentionSpec:
    if getattr(attention, "is_cross_attention", False):
        return AttentionSpec(q=("q_attn",), fused="c_attn", roles=("k", "v"))
    return AttentionSpec(fused="c_attn")


def _big_code(attention: nn.Module) -> AttentionSpec:
    return AttentionSpec(fused="c_attn", layout="block" if attention.multi_query else "per-head")


def _falcon(attention: nn.Module) -> AttentionSpec:
    if attention.new_decoder_architecture:
        return AttentionSpec(fused="query_key_value", layout="grouped", num_kv_heads="num_kv_heads")
    if attention.multi_query:
        return AttentionSpec(fused="query_key_value", num_kv_heads=1)
    return AttentionSpec(fused="query_key_value", layout="per-head")


_PER_HEAD = AttentionSpec(fused="query_key_value", layout="per-head")
_FUSED: dict[str, AttentionSpec | Callable[[nn.Module], AttentionSpec]] = {
    "GPT2Attention": _gpt2,
    "DecisionTransformerGPT2Attention": _gpt2,
    "ImageGPTAttention": _gpt2,
    "GPTBigCodeAttention": _big_code,
    "GPTNeoXAttention": _PER_HEAD,
    "GPTNeoXJapaneseAttention": _PER_HEAD,
    "BloomAttention": _PER_HEAD,
    "PersimmonAttention": _PER_HEAD,
    "FalconAttention": _falcon,
    "ModernBertAttention": AttentionSpec(fused="Wqkv"),
    "MptAttention": AttentionSpec(fused="Wqkv"),
    "Phi3Attention": AttentionSpec(fused="qkv_proj"),
    "Phi4MultimodalAttention": AttentionSpec(fused="qkv_proj"),
    "modeling_openai.Attention": AttentionSpec(fused="c_attn"),
}

_registered: dict[str, AttentionSpec] = {}


def known_spec(attention: nn.Module) -> AttentionSpec | None:
    """What was registered for this class (or one it derives from), else what we know of it by name."""
    for cls in type(attention).__mro__:
        if cls.__name__ in _registered:
            return _registered[cls.__name__]
    name, file = type(attention).__name__, type(attention).__module__.rpartition(".")[2]
    spec = _FUSED.get(name) or _FUSED.get(f"{file}.{name}")
    return spec(attention) if callable(spec) else spec


def register_attention(
    attention: type[nn.Module] | str,
    *,
    q: str | tuple[str, ...] = (),
    k: str | tuple[str, ...] = (),
    fused: str = "",
    layout: LayoutName = "block",
    num_heads: str | int | None = None,
    num_kv_heads: str | int | None = None,
    head_dim: str | int | None = None,
    ignore: bool = False,
) -> None:
    """Say where an attention class of your own keeps its Q and K.

        oelm.register_attention(MyAttention, q="wq", k="wk", num_heads="n_heads")
        oelm.register_attention(MyFused, fused="qkv", layout="per-head", num_heads="n_heads")
        oelm.register_attention(AttentionPooling, ignore=True)

    attention: The class (or its name) that directly holds the projections; derived classes count.
    q, k: Attribute names of the nn.Linear modules; several if a class has several.
    fused: Attribute name of one nn.Linear that holds q, k and v in its rows, in this order within each group:
    layout: "block" [all q; all k; all v], "per-head" [q1; k1; v1; q2; ...], or "grouped" [the q heads
        of a key head; that k; that v; ...].
    num_heads, num_kv_heads, head_dim: Attribute names, or numbers. Found by their usual names if not given.
    ignore: The class has no Q/K to freeze though it looks like attention.
    """
    name = attention if isinstance(attention, str) else attention.__name__
    queries, keys = ((q,) if isinstance(q, str) else q), ((k,) if isinstance(k, str) else k)
    if layout not in ("block", "per-head", "grouped"):
        raise UsageError(f'layout must be "block", "per-head" or "grouped", got {layout!r}')
    if not ignore and bool(fused) == bool(queries and keys):
        raise UsageError(f"register_attention({name}): give q and k, or fused, or ignore=True")
    _registered[name] = AttentionSpec(
        queries,
        keys,
        fused,
        layout,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        ignore=ignore,
    )
