"""A method is data: how Q/K start, which of them are frozen, when, and what small trainable parts they get.

Nothing here needs torch, so that the catalogue, the command line and a run's YAML can speak of methods
without loading it. The meaning of each field lives in `Method`'s docstring; the mathematics in
`orthogonal.py`; the freezing in `apply.py`.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from oelm.errors import UsageError, unknown_name

Init = Literal["keep", "headwise", "global", "normal", "normal-matched", "qr", "polar"]
Freeze = Literal["none", "all", "first", "all-but-last"]
Schedule = Literal["constant", "gradual", "early"]
Part = Literal["q", "k", "ffn"]

#: Inits that throw the present weights away. Their tensors are a pure function of (seed, name), so a
#: compact save can leave them out, and putting them into a pretrained model deserves a warning.
DRAWN: frozenset[str] = frozenset({"headwise", "global", "normal", "normal-matched"})

#: Inits that promise orthonormal rows within each head (the audit checks it).
ORTHONORMAL: frozenset[str] = frozenset({"headwise", "global", "qr", "polar"})


@dataclass(frozen=True)
class Method:
    """How Q/K (and optionally the FFN) start, and when they train.

    A method is `init` x `freeze` x `schedule` x small trainable extras; the presets of `oelm.methods()` are
    points of that space. Derive your own with `dataclasses.replace` or from scratch:

    >>> import dataclasses
    >>> from oelm.methods.presets import find_method
    >>> mine = dataclasses.replace(find_method("oelm-freeze"), name="mine", gain=2.0)
    >>> mine.trains_qk, mine.gain
    (False, 2.0)

    Where it starts
        name: What tables, run folders and `oelm.methods()` call it.
        init: The start of each Q/K matrix, seen as (heads, head_dim, d_in):
            "keep" leaves what is there (the model's own init, or pretrained weights);
            "headwise" draws orthonormal rows per head (QR of a Gaussian, sign-fixed, hence Haar): every
            head sees a random subspace of the residual stream without distortion inside it;
            "global" one QR over the whole matrix, the study's first version: heads are orthogonal to each
            other too;
            "normal" N(0, 0.02), GPT-2's init: rows of norm 0.02 sqrt(d_in), 0.45 at width 512, so it
            changes orthogonality AND scale at once;
            "normal-matched" N(0, 1/d_in): rows of expected norm 1, so it changes orthogonality alone,
            which makes it the control that any claim about orthogonality needs;
            "qr" / "polar" orthonormal rows made from the weights that are there: by Gram-Schmidt (first
            rows keep their direction) or as the nearest orthonormal matrix (no row is preferred).
            Biases of a redrawn projection are set to zero; those of "keep", "qr" and "polar" stay.
        gain: Factor on the start. Attention logits grow with gain squared, and scale alone moves
            perplexity by tens of per cent, so it is a field and not a constant. "match" gives each head
            the Frobenius norm it had before: what a pretrained model needs, whose later layers expect
            logits of that size.
        parts: What `init` and `freeze` act on, of "q", "k", "ffn". With "ffn" the up and down matrices
            (and a gate) are treated as one head each: orthonormal along their shorter side.

    What is frozen, when
        freeze: "none", "all", "first" (the first `layers`), "all-but-last" (all but the last `layers`).
            Counted per stack: an encoder-decoder has two, and the cross attention of a decoder layer
            belongs to that layer. The init acts on every layer whatever is frozen, so that freezing is
            the only difference between layers.
        layers: The n of "first" and "all-but-last".
        schedule: "constant": frozen is frozen. "gradual": the frozen layers thaw one by one from the top
            of each stack, since upper layers are the task-specific ones. "early": train first, freeze at
            `freeze_at`, to learn whether Q/K settle early in training.
        thaw_from, thaw_to: Shares of the run at which the top and the bottom frozen layer thaw
            ("gradual").
        freeze_at: Share of the run at which everything `freeze` names stops training ("early").

    Small trainable extras on the projections; each starts as the identity, so step 0 is that of the plain
    method
        conv: Taps of a causal depthwise convolution over time on q and k; supplies the token-shift
            structure that random projections lack (0 = none). Trains taps x (rows of q and k) numbers.
        conv_value: Taps of such a convolution on v (0 = none). They count as Q/K parameters that train.
        lowrank: Rank r of a trainable residue, W x + s B A x, on q and k (0 = none).
        lowrank_scale: The s. Adam moves every number by about the rate, so a product of r columns falls
            behind a full matrix, whose d_in columns all move; the factor lets it catch up (LoRA's alpha / r).
        core: A trainable head_dim x head_dim matrix per head on q, i.e. q' C k: re-weights the frozen
            subspace.
        temperature: One trainable factor per head on q: sharpness of attention and nothing else.
        relative_bias: A trainable attention bias per head and distance, for this many distances, farther
            ones sharing the last (0 = none). It acts between q and k, so the attention itself must
            implement it: our GPT does.

    For people
        purpose: One line: what it is for.
        controls: One line: what comparing with it controls for.
        reference: The idea or paper it comes from.
        control: Name of the preset with the same architecture whose Q/K train, at the fairest start: what
            freezing is charged against. A residue is left out of it, being part of a matrix that trains.
    """

    name: str
    init: Init = "keep"
    gain: float | Literal["match"] = 1.0
    parts: tuple[Part, ...] = ("q", "k")
    freeze: Freeze = "none"
    layers: int = 0
    schedule: Schedule = "constant"
    thaw_from: float = 0.0
    thaw_to: float = 0.0
    freeze_at: float = 0.0
    conv: int = 0
    conv_value: int | Literal[False] = 0
    lowrank: int = 0
    lowrank_scale: float = 1.0
    core: bool = False
    temperature: bool = False
    relative_bias: int = 0
    purpose: str = field(default="", compare=False)
    controls: str = field(default="", compare=False)
    reference: str = field(default="", compare=False)
    control: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        # YAML and JSON know lists only; a method read back must equal the one written.
        if isinstance(self.parts, list):
            object.__setattr__(self, "parts", tuple(self.parts))
        for name in ("gain", "lowrank_scale"):
            value = getattr(self, name)
            if isinstance(value, int) and not isinstance(value, bool):
                object.__setattr__(self, name, float(value))
        if self.conv_value is False:  # the word for "none" in older runs
            object.__setattr__(self, "conv_value", 0)
        _check_choices(self)
        _check_numbers(self)
        _check_dead_fields(self)

    @property
    def draws(self) -> bool:
        """Whether the init discards the weights that were there."""
        return self.init in DRAWN

    @property
    def trains_qk(self) -> bool:
        """Whether the projections themselves train from the first step to the last, in every layer."""
        return self.freeze == "none" or not {"q", "k"} & set(self.parts)

    @property
    def extends_qk(self) -> bool:
        """Whether q and k carry trainable extras (relative_bias belongs to the attention itself)."""
        return bool(self.conv or self.lowrank or self.core or self.temperature)

    @property
    def has_extras(self) -> bool:
        """Whether any projection does, v included."""
        return self.extends_qk or bool(self.conv_value)

    @property
    def touches_nothing(self) -> bool:
        """Whether applying it leaves the model exactly as it is."""
        return (
            self.init == "keep" and self.freeze == "none" and not self.has_extras and not self.relative_bias
        )

    def to_dict(self) -> dict[str, Any]:
        """All fields as plain scalars, strings and lists, for YAML and JSON."""
        return {**dataclasses.asdict(self), "parts": list(self.parts)}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Method:
        """The inverse of `to_dict`; an unknown field is an error with the nearest valid name."""
        if not isinstance(fields, dict) or "name" not in fields:
            raise UsageError(f"a method is a mapping of fields with a name, got {fields!r}")
        valid = [f.name for f in dataclasses.fields(cls)]
        for key in fields:
            if key not in valid:
                raise unknown_name("field of a method", key, valid)
        return cls(**fields)


def _check_choices(m: Method) -> None:
    if not isinstance(m.name, str) or not m.name.strip():
        raise UsageError(f"a method needs a name, got {m.name!r}")
    for name, kind in (("init", Init), ("freeze", Freeze), ("schedule", Schedule)):
        if getattr(m, name) not in get_args(kind):
            raise unknown_name(f"{name} of method '{m.name}':", str(getattr(m, name)), get_args(kind))
    if not isinstance(m.parts, tuple):
        raise UsageError(f"method '{m.name}': parts must be a list of names, got {m.parts!r}")
    for part in m.parts:
        if part not in get_args(Part):
            raise unknown_name(f"part of method '{m.name}':", str(part), get_args(Part))
    if len(set(m.parts)) != len(m.parts):
        raise UsageError(f"method '{m.name}': parts {m.parts} name something twice")


def _check_numbers(m: Method) -> None:
    def wrong(name: str, wish: str) -> UsageError:
        return UsageError(f"method '{m.name}': {name} must be {wish}, got {getattr(m, name)!r}")

    if m.gain != "match" and not _positive(m.gain):
        raise wrong("gain", 'a positive number or "match"')
    if not _positive(m.lowrank_scale):
        raise wrong("lowrank_scale", "a positive number")
    for name in ("layers", "conv", "conv_value", "lowrank", "relative_bias"):
        value = getattr(m, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise wrong(name, "a whole number, 0 or more")
    for name in ("thaw_from", "thaw_to", "freeze_at"):
        value = getattr(m, name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
            raise wrong(name, "a share of the run between 0 and 1")
    for name in ("core", "temperature"):
        if not isinstance(getattr(m, name), bool):
            raise wrong(name, "true or false")
    for name in ("conv", "conv_value"):
        if getattr(m, name) == 1:
            raise wrong(name, "0 (none) or at least 2 taps (one tap sees no other token)")


def _positive(value: object) -> bool:
    return isinstance(value, float) and math.isfinite(value) and value > 0


def _check_dead_fields(m: Method) -> None:
    """A field that would change nothing is a misunderstanding: say so before hours are spent on it."""

    def dead(text: str) -> UsageError:
        return UsageError(f"method '{m.name}': {text}")

    if m.init == "keep" and m.gain != 1.0:
        raise dead('init "keep" leaves the weights as they are, so gain must stay 1')
    if not m.parts and (m.init != "keep" or m.freeze != "none"):
        raise dead('parts is empty, so init and freeze have nothing to act on; use ("q", "k")')
    if m.lowrank_scale != 1.0 and not m.lowrank:
        raise dead("lowrank_scale has nothing to scale without lowrank, the rank of the residue")
    if m.freeze in ("first", "all-but-last") and m.layers == 0:
        raise dead(f'freeze "{m.freeze}" needs layers, the number of layers meant')
    if m.freeze in ("none", "all") and m.layers:
        raise dead(f'layers = {m.layers} means nothing with freeze "{m.freeze}"')
    if m.schedule != "constant" and m.freeze == "none":
        raise dead(f'schedule "{m.schedule}" has nothing to act on with freeze "none"')
    if m.schedule != "gradual" and (m.thaw_from or m.thaw_to):
        raise dead('thaw_from and thaw_to belong to schedule "gradual"')
    if m.schedule == "gradual" and not m.thaw_from <= m.thaw_to:
        raise dead("thaw_from must not lie after thaw_to")
    if m.schedule == "gradual" and m.thaw_to == 0:
        raise dead('schedule "gradual" needs thaw_to, the share of the run at which the last layer thaws')
    if m.schedule != "early" and m.freeze_at:
        raise dead('freeze_at belongs to schedule "early"')
    if m.schedule == "early" and not 0 < m.freeze_at < 1:
        raise dead('schedule "early" needs freeze_at, a share of the run between 0 and 1')
