"""The named methods: those of the original study, controls that it lacked, and methods with trainable extras.

To add a method, add an entry here or call `oelm.register_method()`; `docs/howto/own-method.md` describes
both, and how to add an init. This module does not import torch, so that `oelm list` starts quickly.
"""

from __future__ import annotations

from dataclasses import replace

from oelm.errors import UsageError, unknown_name
from oelm.methods.method import Method

_ELM = "extreme learning machine: random frozen features (Huang et al. 2006)"
_ORTHOGONAL = "orthogonal initialisation (Saxe et al. 2014)"

#: The forward pass multiplies the trainable biases of q and k by this factor. With Adam this acts like a
#: larger learning rate. In our experiments, factors of 8 and 64 gave a higher loss.
BIAS_SCALE = 24.0

_WITHOUT_EXTRAS = [
    Method(
        "baseline",
        purpose="the unchanged model, all parameters trained",
        controls="nothing: every other method is compared with it",
        reference="Vaswani et al. 2017",
    ),
    Method(
        "baseline-bias",
        bias=True,
        bias_scale=BIAS_SCALE,
        purpose="the unchanged model with biases on q and k, all parameters trained",
        controls="the biases, from which models with trained Q/K gain, too",
        reference="biases of q and k with rotary positions (Bai et al. 2023, Qwen)",
    ),
    Method(
        "oelm-freeze",
        init="headwise",
        freeze="all",
        purpose="random orthonormal Q/K rows per head, frozen from the first step",
        controls="what training Q/K contributes, if compared with orthogonal-init",
        reference=f"{_ELM}; {_ORTHOGONAL}",
        control="orthogonal-init",
    ),
    Method(
        "oelm-freeze-matched",
        init="headwise",
        gain="match",
        freeze="all",
        purpose="oelm-freeze with the norm that each head had before, for pretrained models",
        controls="the directions of Q/K alone: the logits keep the size that later layers expect",
        reference=f"{_ELM}; norm matching",
        control="orthogonal-init-matched",
    ),
    Method(
        "oelm-random",
        init="normal",
        freeze="all",
        purpose="frozen N(0, 0.02): the original study's ablation of orthogonality",
        controls="orthogonality and scale together, neither of them alone",
        reference=_ELM,
        control="baseline",
    ),
    Method(
        "oelm-random-matched",
        init="normal-matched",
        freeze="all",
        purpose="frozen Gaussian rows with the expected norm of orthonormal rows",
        controls="orthogonality alone: the scale is that of oelm-freeze",
        reference=f"{_ELM}; N(0, 1/d) keeps norms",
        control="orthogonal-init",
    ),
    Method(
        "oelm-global",
        init="global",
        freeze="all",
        purpose="one QR over all heads: the original study's first version",
        controls="orthogonality between heads in addition to that within heads",
        reference=f"{_ELM}; {_ORTHOGONAL}",
        control="orthogonal-init",
    ),
    Method(
        "oelm-pretrained",
        init="qr",
        gain="match",
        freeze="all",
        purpose="pretrained Q/K made orthonormal by QR, scaled to their old norm, frozen",
        controls="orthonormality, while the learned directions stay",
        reference="the original study's BERT code, with the norm kept",
        control="baseline",
    ),
    Method(
        "oelm-pretrained-polar",
        init="polar",
        gain="match",
        freeze="all",
        purpose="the orthonormal rows nearest to the pretrained Q/K, scaled to their old norm, frozen",
        controls="the way of orthonormalising: polar factor instead of Gram-Schmidt",
        reference="orthogonal Procrustes (Schönemann 1966)",
        control="baseline",
    ),
    Method(
        "freeze-pretrained",
        freeze="all",
        purpose="the present Q/K weights, frozen: the default for pretrained models",
        controls="freezing alone: no weight is changed",
        reference="layer freezing in transfer learning (Lee et al. 2019)",
        control="baseline",
    ),
    Method(
        "orthogonal-init",
        init="headwise",
        purpose="random orthonormal Q/K rows per head, trained: the control of the frozen methods",
        controls="the init: it differs from oelm-freeze only in freezing",
        reference=_ORTHOGONAL,
    ),
    Method(
        "orthogonal-init-matched",
        init="headwise",
        gain="match",
        purpose="random orthonormal Q/K rows with the norm that each head had before, trained",
        controls="the init: it differs from oelm-freeze-matched only in freezing",
        reference=f"{_ORTHOGONAL}; norm matching",
    ),
    Method(
        "oelm-partial",
        init="headwise",
        freeze="all-but-last",
        layers=1,
        purpose="orthogonal init, frozen except in the last layer",
        controls="whether only the upper layers need trained Q/K",
        reference="suggested by the original study; partial freezing (Lee et al. 2019)",
        control="orthogonal-init",
    ),
    Method(
        "oelm-gradual",
        init="headwise",
        freeze="all",
        schedule="gradual",
        thaw_from=0.2,
        thaw_to=0.8,
        purpose="orthogonal init, frozen, then unfrozen layer by layer from the top",
        controls="whether freezing hurts only if it lasts to the end",
        reference="gradual unfreezing (Howard & Ruder 2018)",
        control="orthogonal-init",
    ),
    Method(
        "oelm-early",
        init="headwise",
        freeze="all",
        schedule="early",
        freeze_at=0.15,
        purpose="orthogonal init, trained for 15 % of the run, then frozen",
        controls="whether Q/K converge early",
        reference="freeze training (Raghu et al. 2017)",
        control="orthogonal-init",
    ),
    Method(
        "oelm-qk-ffn",
        init="headwise",
        parts=("q", "k", "ffn"),
        freeze="all",
        purpose="orthogonal Q/K and FFN matrices, all frozen",
        controls="how much of a transformer block can be random",
        reference=f"{_ELM}; random-feature FFNs",
        control="orthogonal-init",
    ),
    Method(
        "oelm-ffn",
        init="headwise",
        parts=("ffn",),
        freeze="all",
        purpose="orthogonal FFN matrices, frozen; Q/K trained",
        controls="freezing the FFN instead of Q/K",
        reference=f"{_ELM}; random-feature FFNs",
        control="baseline",
    ),
]


def _frozen(name: str, adds: str, **fields: object) -> Method:
    """Return a method that freezes orthogonal Q/K and adds trainable extras to them."""
    return Method(
        name,
        init="headwise",
        freeze="all",
        purpose=f"frozen orthogonal Q/K with {adds}",
        controls="whether frozen Q/K lack this structure",
        **fields,  # type: ignore[arg-type]
    )


_WITH_EXTRAS = [
    _frozen(
        "oelm-conv",
        "a 4-tap causal depthwise convolution on q and k",
        conv=4,
        reference="token shift and short convolutions (So et al. 2021, Primer)",
        control="trained-conv",
    ),
    _frozen(
        "oelm-lowrank",
        "a trainable low-rank adapter of rank 8 on q and k",
        lowrank=8,
        lowrank_scale=4.0,
        reference="LoRA (Hu et al. 2021)",
        control="orthogonal-init",
    ),
    _frozen(
        "oelm-bias",
        "trainable biases on q and k and nothing else",
        bias=True,
        bias_scale=BIAS_SCALE,
        reference="biases of q and k with rotary positions (Bai et al. 2023, Qwen)",
        control="trained-bias",
    ),
    _frozen(
        "oelm-plus",
        "trainable biases and low-rank adapters, most of them in the first layer, at a small gain: the "
        "recommended method",
        gain=0.35,
        bias=True,
        bias_scale=BIAS_SCALE,
        lowrank=(20, 2),
        lowrank_scale=4.0,
        reference="biases of q and k (Bai et al. 2023, Qwen); LoRA (Hu et al. 2021)",
        control="trained-plus",
    ),
    _frozen(
        "oelm-core",
        "a trainable head_dim x head_dim matrix per head",
        core=True,
        reference="trainable core between frozen bases (as in LoRA-XS, Bałazy et al. 2024)",
        control="trained-core",
    ),
    _frozen(
        "oelm-temperature",
        "one trainable temperature per head",
        temperature=True,
        reference="learned attention temperature (Henry et al. 2020)",
        control="trained-temperature",
    ),
    _frozen(
        "oelm-relative",
        "a trainable attention bias per head and distance",
        relative_bias=128,
        reference="relative position bias (Raffel et al. 2020)",
        control="trained-relative",
    ),
]


def _control_of(frozen: Method) -> Method:
    """Return the control of a method with extras: the same architecture and init, but with trained Q/K.

    The control has no low-rank adapter: trained Q/K can represent everything that an adapter adds.
    """
    no_adapters = " and in having no low-rank adapters" if frozen.lowrank else ""
    return replace(
        frozen,
        name=frozen.control,
        freeze="none",
        lowrank=0,
        lowrank_scale=1.0,
        purpose=f"the architecture and init of {frozen.name} with trained Q/K",
        controls=f"the architecture: it differs from {frozen.name} only in freezing{no_adapters}",
        reference=f"control of {frozen.name}",
        control="",
    )


_METHODS: dict[str, Method] = {m.name: m for m in [*_WITHOUT_EXTRAS, *_WITH_EXTRAS]}
_METHODS |= {m.control: _control_of(m) for m in _WITH_EXTRAS if m.control not in _METHODS}

#: Names in the original study -> our names. There, "oelm" is the first version of the method.
ALIASES: dict[str, str] = {
    "oelm_freeze": "oelm-freeze",
    "oelm_v2": "oelm-freeze",
    "oelm_random": "oelm-random",
    "oelm": "oelm-global",
    "global": "oelm-global",
}

#: The method that warnings recommend for a model with pretrained weights.
PRETRAINED_DEFAULT = "freeze-pretrained"


def methods() -> dict[str, Method]:
    """Return a dict from name to method: those defined in oelm, and those added by `register_method()`.

    >>> "oelm-freeze" in methods()
    True
    """
    return dict(_METHODS)


def find_method(method: str | Method) -> Method:
    """Return the method with this name or alias; a `Method` is returned unchanged.

    >>> find_method("oelm_v2").name
    'oelm-freeze'
    """
    if isinstance(method, Method):
        return method
    if not isinstance(method, str):
        raise UsageError(f"method must be a name or an oelm.Method, got {type(method).__name__}: {method!r}")
    name = ALIASES.get(method, method)
    if name not in _METHODS:
        name = ALIASES.get(method.lower(), method.lower().replace("_", "-"))
    if name not in _METHODS:
        raise unknown_name("method", method, _METHODS)
    return _METHODS[name]


def register_method(new: Method) -> Method:
    """Register your own method, so that `oelm.apply()` and the command line know its name; return it."""
    if not isinstance(new, Method):
        raise UsageError(f"register_method needs an oelm.Method, got {type(new).__name__}")
    check_name_is_free(new)
    if new.control == new.name:
        raise UsageError(
            f"method '{new.name}' cannot be its own control; name another method, or leave it out"
        )
    _METHODS[new.name] = new
    return new


def check_name_is_free(new: Method) -> None:
    """Raise UsageError if a known method with other settings has the name of the method `new`.

    Names that `find_method()` takes for each other, such as "Oelm_Freeze" and "oelm-freeze", count as equal.
    """
    plain = new.name.lower().replace("_", "-")
    known = {name: name for name in _METHODS} | ALIASES
    alike = {known[name] for name in known if name.lower().replace("_", "-") == plain}
    if alike - {new.name} or _METHODS.get(new.name, new) != new:
        raise UsageError(
            f"the name '{new.name}' is already used by a method with other settings; choose another name"
        )
