"""Tables of known attention classes: the names of their projections, and the row order of fused weights.

A weight counts as Q/K if it affects the output of its attention module only through the attention scores. So
projections of relative positions (`linear_pos` of a Conformer, `r_kernel` of Funnel, `r` of XLNet) count as
key projections. In multi-head latent attention (DeepSeek-V2 and later), Q/K consist of both low-rank factors
of the query projection (`q_a_proj`, `q_b_proj`), the key rows of `kv_b_proj`, and the rotary key rows of
`kv_a_proj_with_mqa`. The latent rows of `kv_a_proj_with_mqa` also feed the values, so they are not Q/K
and stay trainable. Embeddings, relative position biases, norms and vectors that are added to the queries are
not projections, so they stay trainable, too.

An entry of these tables can be wrong for a model, so `verify.py` checks it before the model is changed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

from oelm.errors import UsageError
from oelm.methods.reading.projection import RowLayout

LayoutName = Literal["block", "per-head", "grouped"]


@dataclass(frozen=True)
class FusedPart:
    """A fused matrix with an explicit row layout; `head_dims` maps "q" and "k" to their head sizes."""

    name: str
    layout: RowLayout
    head_dims: Mapping[str, int]


@dataclass(frozen=True)
class AttentionSpec:
    """Where an attention class stores its Q and K. Strings are attribute names, with dots if nested.

    q, k: The separate query and key projections.
    fused, layout, roles: One fused matrix, the order of its rows, and which of q, k and v the rows contain.
    parts: Fused matrices with an explicit layout, instead of `fused`.
    num_heads, num_kv_heads, head_dim: Attribute names or numbers; if None, the usual names are tried.
    head_dims: {name in `q` or `k`: its head size}, if it differs from the module's common head size.
    per_head: Names in `q` and `k` with the module's number of heads, but their own head size (rows / heads).
    q_bias: A parameter that is added to the queries but is not the bias of the query projection.
    ignore: Whether the class has no Q and K.
    """

    q: tuple[str, ...] = ()
    k: tuple[str, ...] = ()
    fused: str = ""
    layout: LayoutName = "block"
    roles: tuple[str, ...] = ("q", "k", "v")
    num_heads: str | int | None = None
    num_kv_heads: str | int | None = None
    head_dim: str | int | None = None
    ignore: bool = False
    parts: tuple[FusedPart, ...] = ()
    head_dims: Mapping[str, int] = field(default_factory=dict)
    per_head: frozenset[str] = frozenset()
    q_bias: str = ""


_PATTERNS = (
    *("{}", "{}_proj", "{}_lin", "{}_linear", "{}_layer", "{}_head", "{}_global", "pos_{}_proj"),
    *("relative_{}_proj", "linear_{}", "to_{}", "w{}", "w_{}", "fc_{}", "proj_{}", "project_{}"),
    "projection_{}",
)

#: Names of separate projections, in lower case. They include the position projections of DeBERTa and the
#: projections of Longformer's global attention, which are also query and key projections.
QUERY_NAMES = frozenset(p.format(word) for p in _PATTERNS for word in ("q", "query", "queries"))
KEY_NAMES = frozenset(p.format(word) for p in _PATTERNS for word in ("k", "key", "keys"))
VALUE_NAMES = frozenset(p.format(word) for p in _PATTERNS for word in ("v", "value", "values"))

#: Attribute paths, inside an attention module, of projections that turn relative positions into keys.
POSITION_KEYS = (
    *("linear_pos", "pos_proj", "relative_k_proj", "r_kernel", "r", "linear_k_pos"),
    "relative_position_embedding.pos_proj",
)

#: Names of a fused matrix for queries, keys and values, besides the names that contain a word of FUSED_WORDS.
FUSED_NAMES = frozenset({"c_attn", "query_key_value", "in_proj", "att_proj", "queries_keys_values"})

#: A matrix with one of these words in its name counts as fused (it contains several of q, k and v), also
#: outside attention modules. The words also match the linear attention of hybrid models (in_proj_qkvz).
FUSED_WORDS = frozenset({"qk", "kv", "qkv", "qkvz", "wqkv", "wkv"})

#: Words in the name of a matrix inside an attention module which suggest that the matrix contains Q or K.
QK_WORDS = frozenset({"q", "k", "qk", "kv", "qkv", "query", "key", "wq", "wk", "wqkv", "keys", "queries"})

QUERY_WORDS = frozenset({"q", "query", "queries", "wq"})
KEY_WORDS = frozenset({"k", "key", "keys", "wk"})


def words(name: str) -> set[str]:
    """Return the set of words in a name; dots, underscores and digits separate words.

    >>> sorted(words("in_proj_qkv"))
    ['in', 'proj', 'qkv']
    """
    return set(re.split(r"[._\d]+", name))


#: The usual attribute names, in an attention module or its config, for the numbers and sizes of heads.
NUM_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads", "nhead", "num_query_heads")
NUM_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
HEAD_DIM = (
    *("head_dim", "attention_head_size", "key_value_proj_dim", "head_size"),
    *("d_kv", "dim_head", "d_head"),
)

#: Attribute paths of the FFN matrices in one module: (input matrices, output matrix). The input matrices read
#: the residual stream, the output matrix writes to it.
FFN_NAMES: tuple[tuple[tuple[str, ...], str], ...] = (
    (("gate_proj", "up_proj"), "down_proj"),
    (("gate_up_proj",), "down_proj"),
    (("wi_0", "wi_1"), "wo"),
    (("wi",), "wo"),
    (("Wi",), "Wo"),
    (("w1", "w3"), "w2"),
    (("up",), "down"),
    (("up_proj",), "down_proj"),
    (("c_fc",), "c_proj"),
    (("dense_h_to_4h",), "dense_4h_to_h"),
    (("fc_in",), "fc_out"),
    (("fc1",), "fc2"),
    (("lin1",), "lin2"),
    (("linear1",), "linear2"),
    (("ffn",), "ffn_output"),
    (("ffn.0",), "ffn.2"),
    (("intermediate.dense",), "output.dense"),
)


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


def _codegen(attention: nn.Module) -> AttentionSpec:
    sizes: Any = attention
    width, heads = int(sizes.embed_dim), int(sizes.num_attention_heads)
    layout = RowLayout(("q", "v", "k"), (width, width, width), groups=4)  # one group per TPU core in training
    part = FusedPart("qkv_proj", layout, {"q": width // heads, "k": width // heads})
    return AttentionSpec(parts=(part,), num_heads="num_attention_heads")


def _deberta(attention: nn.Module) -> AttentionSpec:
    found = {name for name, _ in attention.named_children()}
    return AttentionSpec(
        q=("pos_q_proj",) if "pos_q_proj" in found else (),
        k=("pos_proj",) if "pos_proj" in found else (),
        fused="in_proj",
        layout="per-head",
        q_bias="q_bias",
    )


def multi_latent(attention: nn.Module) -> AttentionSpec | None:
    """Return the spec of a multi-head latent attention module; None for other modules.

    The module docstring says which of its weights are Q/K.
    """
    found = {name for name, child in attention.named_children() if child is not None}
    sizes = [getattr(attention, n, None) for n in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")]
    if not {"kv_a_proj_with_mqa", "kv_b_proj"} <= found or not all(isinstance(n, int) for n in sizes):
        return None
    heads = getattr(attention, "num_heads", None) or getattr(attention, "num_attention_heads", None)
    queries = ("q_a_proj", "q_b_proj") if "q_b_proj" in found else ("q_proj",)
    if not isinstance(heads, int) or not set(queries) <= found:
        return None
    nope, rope, value = (int(n) for n in sizes if isinstance(n, int))
    latent = next(attention.get_submodule("kv_b_proj").parameters()).shape[1]
    keys = [FusedPart("kv_b_proj", RowLayout(("k", "v"), (heads * nope, heads * value), heads), {"k": nope})]
    if rope:
        keys.append(FusedPart("kv_a_proj_with_mqa", RowLayout(("latent", "k"), (latent, rope)), {"k": rope}))
    factors = [name for name in queries if name == "q_a_proj"]  # a low-rank factor is treated as one head
    rank = {name: next(attention.get_submodule(name).parameters()).shape[0] for name in factors}
    return AttentionSpec(q=queries, parts=tuple(keys), num_heads=heads, head_dim=nope + rope, head_dims=rank)


_PER_HEAD = AttentionSpec(fused="query_key_value", layout="per-head")
_FUSED: dict[str, AttentionSpec | Callable[[nn.Module], AttentionSpec]] = {
    "gpt2.GPT2Attention": _gpt2,
    "decision_transformer.DecisionTransformerGPT2Attention": _gpt2,
    "imagegpt.ImageGPTAttention": _gpt2,
    "gpt_bigcode.GPTBigCodeAttention": _big_code,
    "gpt_neox.GPTNeoXAttention": _PER_HEAD,
    "gpt_neox_japanese.GPTNeoXJapaneseAttention": _PER_HEAD,
    "bloom.BloomAttention": _PER_HEAD,
    "persimmon.PersimmonAttention": _PER_HEAD,
    "falcon.FalconAttention": _falcon,
    "modernbert.ModernBertAttention": AttentionSpec(fused="Wqkv"),
    "mpt.MptAttention": AttentionSpec(fused="Wqkv"),
    "phi3.Phi3Attention": AttentionSpec(fused="qkv_proj"),
    "phi4_multimodal.Phi4MultimodalAttention": AttentionSpec(fused="qkv_proj"),
    "openai.Attention": AttentionSpec(fused="c_attn"),
    "codegen.CodeGenAttention": _codegen,
    "deberta.DisentangledSelfAttention": _deberta,
}

_registered: dict[type | str, AttentionSpec] = {}


ATTACHED_SPEC = "_oelm_attention_spec"  # the attribute of a module that holds its discovered spec


def attach_spec(attention: nn.Module, spec: AttentionSpec) -> None:
    """Attach a discovered spec to a module, so that `known_spec()` finds it after the weights are split."""
    attention.__dict__[ATTACHED_SPEC] = spec


def attached_spec(attention: nn.Module) -> AttentionSpec | None:
    return None if is_registered(attention) else attention.__dict__.get(ATTACHED_SPEC)


def is_registered(attention: nn.Module) -> bool:
    return _registered_spec(attention) is not None


def _registered_spec(attention: nn.Module) -> AttentionSpec | None:
    """Return the spec that was registered for the module's class or a base class; None if there is none."""
    if not _registered:
        return None
    for cls in type(attention).__mro__:
        spec = _registered.get(cls) or _registered.get(f"{cls.__module__}.{cls.__qualname__}")
        if spec is not None:
            return spec
    return None


def known_spec(attention: nn.Module) -> AttentionSpec | None:
    """Return the spec that was registered for the module's class, was discovered, or is built in; or None."""
    if (spec := _registered_spec(attention) or attached_spec(attention)) is not None:
        return spec
    package, file = type(attention).__module__.rpartition(".")[::2]
    family = file.removeprefix("modeling_")
    if package != f"transformers.models.{package.rpartition('.')[2]}":
        return None
    spec_of = _FUSED.get(f"{family}.{type(attention).__name__}")
    return spec_of(attention) if callable(spec_of) else spec_of


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
    """Tell oelm where your own attention class stores its Q and K.

        oelm.register_attention(MyAttention, q="wq", k="wk", num_heads="n_heads")
        oelm.register_attention(MyFused, fused="qkv", layout="per-head", num_heads="n_heads")
        oelm.register_attention(AttentionPooling, ignore=True)

    `oelm.apply()` verifies numerically that these are Q and K before anything is changed; see
    `oelm.methods.reading.verify`.

    Args:
        attention: The class whose attributes are the projections, or its full name
            "package.module.ClassName". Derived classes are included.
    q, k: Attribute names of the nn.Linear modules; a tuple if there are several.
    Args:
        fused: Attribute name of one nn.Linear whose rows are those of q, k and v.
        layout: The row order of `fused`: "block" [all q; all k; all v], "per-head" [q1; k1; v1; q2; ...], or
            "grouped" [the q heads that share the first key head; that key head; its v head; ...].
    num_heads, num_kv_heads, head_dim: Attribute names or numbers. If left out, oelm tries the usual names.
    Args:
        ignore: Whether the class has no Q and K to freeze, although it looks like attention.
    """
    if isinstance(attention, str):
        name = attention
        if "." not in attention:
            raise UsageError(
                f"register_attention({name!r}): the name of the class is ambiguous, because several "
                f"libraries may have such a class. Pass the class itself or its full name, such as "
                f'"package.module.{name}"'
            )
    elif isinstance(attention, type) and issubclass(attention, nn.Module):
        name = attention.__name__
    else:
        raise UsageError(
            f"register_attention needs a subclass of nn.Module or its full name, got {attention!r}"
        )
    queries, keys = ((q,) if isinstance(q, str) else q), ((k,) if isinstance(k, str) else k)
    if layout not in ("block", "per-head", "grouped"):
        raise UsageError(f'layout must be "block", "per-head" or "grouped", got {layout!r}')
    for argument, size in (("num_heads", num_heads), ("num_kv_heads", num_kv_heads), ("head_dim", head_dim)):
        is_count = isinstance(size, int) and not isinstance(size, bool) and size > 0
        if not is_count and not isinstance(size, str | None):
            raise UsageError(
                f"register_attention({name}): {argument} must be the name of an attribute or a positive "
                f"integer, got {size!r}"
            )
    if not ignore and bool(fused) == bool(queries and keys):
        raise UsageError(f"register_attention({name}): pass either q and k, or fused, or ignore=True")
    _registered[attention] = AttentionSpec(
        queries,
        keys,
        fused,
        layout,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        ignore=ignore,
    )
