"""Tables of known attention classes: the names of their projections, and the row order of fused weights.

A weight counts as Q/K if it acts on the output of its attention only through the attention scores. So
projections of relative positions (`linear_pos` of a Conformer, `r_kernel` of Funnel, `r` of XLNet) are keys.
In multi-head latent attention (DeepSeek-V2 and later), Q/K consist of both factors of the queries
(`q_a_proj`, `q_b_proj`), the key rows of `kv_b_proj`, and the rotary key rows of `kv_a_proj_with_mqa`. The
latent rows of `kv_a_proj_with_mqa` also feed the values, so they are not Q/K, and train. Embeddings, relative
position biases, norms and vectors that are added to the queries are not projections, so they train, too.

What these tables say is only a guess, which `verify.py` checks numerically before anything is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from oelm.errors import UsageError
from oelm.methods.reading.projection import RowLayout

LayoutName = Literal["block", "per-head", "grouped"]


@dataclass(frozen=True)
class FusedPart:
    """A fused matrix with an explicit row layout; `head_dims` holds the head sizes of q and k in it."""

    name: str
    layout: RowLayout
    head_dims: Mapping[str, int]


@dataclass(frozen=True)
class AttentionSpec:
    """Where an attention class stores its Q and K. Strings are attribute names, with dots if nested.

    q, k: Separate projections.
    fused, layout, roles: One fused matrix, the order of its rows, and what they hold.
    parts: Fused matrices with an explicit layout, instead of `fused`.
    num_heads, num_kv_heads, head_dim: Attribute names or numbers; if None, the usual names are tried.
    single: Names in q and k that have one head (a low-rank factor), whatever the number of heads is.
    per_head: Names in q and k that have the module's number of heads, but another head size.
    q_bias: A parameter that is added to the queries but is not the bias of their projection.
    ignore: The class has no Q and K.
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
    single: frozenset[str] = frozenset()
    per_head: frozenset[str] = frozenset()
    q_bias: str = ""


_PATTERNS = (
    *("{}", "{}_proj", "{}_lin", "{}_linear", "{}_layer", "{}_head", "{}_global", "pos_{}_proj"),
    *("relative_{}_proj", "linear_{}", "to_{}", "w{}", "w_{}", "fc_{}", "proj_{}", "project_{}"),
    "projection_{}",
)

#: Names of separate projections, in lower case. They include the position projections of DeBERTa and the
#: projections of Longformer's global attention, which are queries and keys, too.
QUERY_NAMES = frozenset(p.format(word) for p in _PATTERNS for word in ("q", "query", "queries"))
KEY_NAMES = frozenset(p.format(word) for p in _PATTERNS for word in ("k", "key", "keys"))
VALUE_NAMES = frozenset(p.format(word) for p in _PATTERNS for word in ("v", "value", "values"))

#: Paths, inside an attention module, of projections that turn relative positions into keys.
POSITION_KEYS = (
    *("linear_pos", "pos_proj", "relative_k_proj", "r_kernel", "r", "linear_k_pos"),
    "relative_position_embedding.pos_proj",
)

#: Names of a matrix that holds queries, keys and values. Names that contain a word of FUSED_WORDS count, too.
FUSED_NAMES = frozenset({"c_attn", "query_key_value", "in_proj", "att_proj", "queries_keys_values"})

#: A matrix in any module whose name contains one of these words holds several of q, k and v. The words also
#: match the linear attention of hybrid models (in_proj_qkv, in_proj_qkvz).
FUSED_WORDS = frozenset({"qk", "kv", "qkv", "qkvz", "wqkv", "wkv"})

#: A matrix inside an attention module whose name contains one of these words probably holds Q or K.
QK_WORDS = frozenset({"q", "k", "qk", "kv", "qkv", "query", "key", "wq", "wk", "wqkv", "keys", "queries"})

#: The usual names of these attributes of an attention module or its config.
NUM_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads", "nhead", "num_query_heads")
NUM_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
HEAD_DIM = (
    *("head_dim", "attention_head_size", "key_value_proj_dim", "head_size"),
    *("d_kv", "dim_head", "d_head"),
)

#: (matrices that read the residual stream, the matrix that writes to it), as attribute paths of one module.
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
    layout = RowLayout(("q", "v", "k"), (width, width, width), groups=4)  # CodeGen has one per TPU core
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
    """Return the spec of multi-head latent attention (see the top of this file); None for other modules."""
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
    return AttentionSpec(
        q=queries,
        parts=tuple(keys),
        num_heads=heads,
        head_dim=nope + rope,
        single=frozenset({"q_a_proj"}),
    )


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


def known_spec(attention: nn.Module) -> AttentionSpec | None:
    """Return the spec that was registered for the module's class or a base class, or is known to oelm.

    None if there is neither.
    """
    for cls in type(attention).__mro__:
        spec = _registered.get(cls) or _registered.get(f"{cls.__module__}.{cls.__qualname__}")
        if spec is not None:
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

    `oelm.apply` verifies it numerically before anything is changed: see `oelm.methods.reading.verify`.

    Args:
        attention: The class that directly holds the projections, or its full name "package.module.ClassName".
            It applies to derived classes, too.
    q, k: Attribute names of the nn.Linear modules; a tuple if there are several.
    Args:
        fused: Attribute name of one nn.Linear whose rows hold q, k and v.
        layout: The row order of `fused`: "block" [all q; all k; all v], "per-head" [q1; k1; v1; q2; ...], or
            "grouped" [the q heads of the first key head; its k; its v; ...].
    num_heads, num_kv_heads, head_dim: Attribute names or numbers. If left out, oelm tries the usual names.
    Args:
        ignore: The class has no Q and K to freeze, though it looks like attention.
    """
    if isinstance(attention, str):
        name = attention
        if "." not in attention:
            raise UsageError(
                f"register_attention({name!r}): several libraries may have a class of this name. Pass the "
                f'class itself (type(module)) or its full name, such as "package.module.{name}"'
            )
    elif isinstance(attention, type) and issubclass(attention, nn.Module):
        name = attention.__name__
    else:
        raise UsageError(f"register_attention takes a class of nn.Module, got {attention!r}")
    queries, keys = ((q,) if isinstance(q, str) else q), ((k,) if isinstance(k, str) else k)
    if layout not in ("block", "per-head", "grouped"):
        raise UsageError(f'layout must be "block", "per-head" or "grouped", got {layout!r}')
    if not ignore and bool(fused) == bool(queries and keys):
        raise UsageError(f"register_attention({name}): pass q and k, or fused, or ignore=True")
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
