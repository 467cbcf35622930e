"""The named methods: the study's own, the controls it lacked, and what may close the gap.

A new method is one entry here (or one `oelm.register_method` call); a new start is described in
`docs/howto/own-method.md`. Free of torch: `oelm list` and the catalogue read it.
"""

from __future__ import annotations

from typing import Any

from oelm.errors import UsageError, unknown_name
from oelm.methods.method import Method

_ELM = "extreme learning machine: random frozen features (Huang et al. 2006)"
_SAXE = "orthogonal starts (Saxe et al. 2014)"

_PLAIN = [
    Method(
        "baseline",
        purpose="the model as it is, everything trained",
        controls="nothing: it is the reference every arm is compared with",
        reference="Vaswani et al. 2017",
    ),
    Method(
        "oelm-freeze",
        init="headwise",
        freeze="all",
        purpose="the method: orthonormal rows per head, frozen from the start",
        controls="what Q/K must learn, when compared with orthogonal-init",
        reference=f"{_ELM}; {_SAXE}",
        control="orthogonal-init",
    ),
    Method(
        "oelm-freeze-matched",
        init="headwise",
        gain="match",
        freeze="all",
        purpose="oelm-freeze with each head's former norm, for models whose other weights are trained",
        controls="direction alone: the logits keep the size the later layers expect",
        reference=f"{_ELM}; norm matching",
        control="orthogonal-init-matched",
    ),
    Method(
        "oelm-random",
        init="normal",
        freeze="all",
        purpose="frozen N(0, 0.02), the study's ablation of orthogonality",
        controls="orthogonality and scale together, so neither alone",
        reference=_ELM,
        control="baseline",
    ),
    Method(
        "oelm-random-matched",
        init="normal-matched",
        freeze="all",
        purpose="frozen Gaussian rows of the orthogonal rows' norm",
        controls="orthogonality alone: the scale is that of oelm-freeze",
        reference=f"{_ELM}; N(0, 1/d) keeps norms",
        control="orthogonal-init",
    ),
    Method(
        "oelm-global",
        init="global",
        freeze="all",
        purpose="one QR over the whole matrix: the study's first version",
        controls="orthogonality between heads as well as within",
        reference=f"{_ELM}; {_SAXE}",
        control="orthogonal-init",
    ),
    Method(
        "oelm-pretrained",
        init="qr",
        gain="match",
        freeze="all",
        purpose="orthonormal rows made from the pretrained ones, at their norm, frozen",
        controls="orthonormality when the learned directions stay",
        reference="what the study's code did on BERT, with the norm kept",
        control="baseline",
    ),
    Method(
        "oelm-pretrained-polar",
        init="polar",
        gain="match",
        freeze="all",
        purpose="the nearest orthonormal rows to the pretrained ones, at their norm, frozen",
        controls="how the rows are made orthonormal: polar factor instead of Gram-Schmidt",
        reference="orthogonal Procrustes (Schönemann 1966)",
        control="baseline",
    ),
    Method(
        "freeze-pretrained",
        freeze="all",
        purpose="Q/K as they are, frozen: the default for pretrained models",
        controls="freezing alone: no weight is changed",
        reference="layer freezing in transfer learning (Lee et al. 2019)",
        control="baseline",
    ),
    Method(
        "orthogonal-init",
        init="headwise",
        purpose="orthonormal rows per head, trained: the fair baseline of the frozen arms",
        controls="the start: what remains against oelm-freeze is the freezing",
        reference=_SAXE,
    ),
    Method(
        "orthogonal-init-matched",
        init="headwise",
        gain="match",
        purpose="orthonormal rows per head at each head's former norm, trained",
        controls="the start: what remains against oelm-freeze-matched is the freezing",
        reference=f"{_SAXE}; norm matching",
    ),
    Method(
        "oelm-partial",
        init="headwise",
        freeze="all-but-last",
        layers=1,
        purpose="orthogonal start, frozen but for the last layer",
        controls="whether the upper layers are the ones that need trained Q/K",
        reference="the study's next step; partial freezing (Lee et al. 2019)",
        control="orthogonal-init",
    ),
    Method(
        "oelm-gradual",
        init="headwise",
        freeze="all",
        schedule="gradual",
        thaw_from=0.2,
        thaw_to=0.8,
        purpose="orthogonal start, frozen, thawed layer by layer from the top",
        controls="whether freezing hurts only when it lasts to the end",
        reference="gradual unfreezing (Howard & Ruder 2018)",
        control="orthogonal-init",
    ),
    Method(
        "oelm-early",
        init="headwise",
        freeze="all",
        schedule="early",
        freeze_at=0.15,
        purpose="orthogonal start, trained for 15 % of the run, then frozen",
        controls="whether Q/K settle early",
        reference="freeze training (Raghu et al. 2017)",
        control="orthogonal-init",
    ),
    Method(
        "oelm-qk-ffn",
        init="headwise",
        parts=("q", "k", "ffn"),
        freeze="all",
        purpose="orthogonal Q/K and FFN matrices, all frozen",
        controls="how much of the block can be random at all",
        reference=f"{_ELM}; random-feature FFNs",
        control="orthogonal-init",
    ),
    Method(
        "oelm-ffn",
        init="headwise",
        parts=("ffn",),
        freeze="all",
        purpose="orthogonal FFN matrices, frozen; Q/K trained",
        controls="Q/K against FFN as the part to freeze",
        reference=f"{_ELM}; random-feature FFNs",
        control="baseline",
    ),
]

RESIDUE = " + LoRA's residue"
_EXTRAS: dict[str, tuple[dict[str, Any], str, str]] = {  # fields, what they add, whose idea it is
    "conv": (
        {"conv": 4},
        "a 4-tap causal depthwise convolution on q and k",
        "token shift and short convolutions (So et al. 2021, Primer)",
    ),
    "lowrank": (
        {"lowrank": 8, "lowrank_scale": 4.0},
        "a trainable residue of rank 8 on q and k",
        "LoRA (Hu et al. 2021)",
    ),
    "plus": (
        {"gain": 0.35, "conv_value": 4, "lowrank": 6, "lowrank_scale": 4.0},
        "a small gain, a residue of rank 6, and the 4-tap convolution on v: the flagship",
        "Primer's convolution, on v alone" + RESIDUE,
    ),
    "core": (
        {"core": True},
        "a trainable head_dim x head_dim core per head",
        "bilinear core between frozen bases (as in LoRA-XS, Bałazy et al. 2024)",
    ),
    "temperature": (
        {"temperature": True},
        "one trainable temperature per head",
        "learned attention temperature (Henry et al. 2020)",
    ),
    "relative": (
        {"relative_bias": 128},
        "a trainable bias per head and distance",
        "relative position bias (Raffel et al. 2020)",
    ),
}


def _with_extras(name: str) -> list[Method]:
    """The frozen method with its extras, and the same architecture and start with trained Q/K.

    That one has no residue: where W itself trains, W + s B A is just another W. `oelm-lowrank` is left with
    `orthogonal-init`.
    """
    fields, what, reference = _EXTRAS[name]
    merged = {field: value for field, value in fields.items() if not field.startswith("lowrank")}
    trained = Method(
        f"trained-{name}",
        init="headwise",
        purpose=f"orthogonal start, trained, in the architecture of oelm-{name}",
        controls=f"the architecture of oelm-{name}: what remains is the freezing",
        reference=reference.removesuffix(RESIDUE),
        **merged,
    )
    frozen = Method(
        f"oelm-{name}",
        init="headwise",
        freeze="all",
        purpose=f"frozen orthogonal Q/K with {what}",
        controls="whether this structure is what frozen Q/K lack",
        reference=reference,
        control=trained.name if merged else "orthogonal-init",
        **fields,
    )
    return [frozen, trained] if merged else [frozen]


_METHODS: dict[str, Method] = {m.name: m for m in [*_PLAIN, *(m for n in _EXTRAS for m in _with_extras(n))]}

#: What users of the study type. "oelm" alone was its first, global version.
ALIASES: dict[str, str] = {
    "oelm_freeze": "oelm-freeze",
    "oelm_v2": "oelm-freeze",
    "oelm_random": "oelm-random",
    "oelm": "oelm-global",
    "global": "oelm-global",
}

#: What to use when a model comes with trained weights: its Q/K are worth keeping.
PRETRAINED_DEFAULT = "freeze-pretrained"


def methods() -> dict[str, Method]:
    """All methods by name: the presets and what `register_method` added.

    >>> "oelm-freeze" in methods()
    True
    """
    return dict(_METHODS)


def find_method(wish: str | Method) -> Method:
    """The method meant by a name, an alias, or a Method itself.

    >>> find_method("oelm_v2").name
    'oelm-freeze'
    """
    if isinstance(wish, Method):
        return wish
    if not isinstance(wish, str):
        raise UsageError(f"a method is a name or an oelm.Method, got {type(wish).__name__}: {wish!r}")
    name = ALIASES.get(wish, wish)
    if name not in _METHODS:
        name = ALIASES.get(wish.lower(), wish.lower().replace("_", "-"))
    if name not in _METHODS:
        raise unknown_name("method", wish, _METHODS)
    return _METHODS[name]


def register_method(new: Method) -> Method:
    """Give a method of your own a name that `oelm.apply`, the catalogue and the command line understand."""
    if not isinstance(new, Method):
        raise UsageError(f"register_method takes an oelm.Method, got {type(new).__name__}")
    if new.name in ALIASES or (new.name in _METHODS and _METHODS[new.name] != new):
        raise UsageError(f"method '{new.name}' exists already with other settings; choose another name")
    _METHODS[new.name] = new
    return new
