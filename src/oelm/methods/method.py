"""`oelm.Method`: how query and key projections (Q/K) are initialised, when they are frozen, and their extras.

Extras are small trainable additions, such as a low-rank adapter. This module does not import torch, so that
the command line and study files load quickly. The inits are implemented in `orthogonal.py`; `apply.py`
applies a method to a model.
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

#: Inits that replace the present weights by random ones. The random weights depend only on the seed and the
#: tensor's name, so `oelm.save(..., compact=True)` does not store them. `oelm.apply()` warns if the weights
#: that it replaces are pretrained.
RANDOM_INITS: frozenset[str] = frozenset({"headwise", "global", "normal", "normal-matched"})

#: Inits that make the rows of each head orthonormal; `oelm.audit()` checks this.
ORTHONORMAL_INITS: frozenset[str] = frozenset({"headwise", "global", "qr", "polar"})


@dataclass(frozen=True)
class Method:
    """How Q/K (and optionally the FFN) are initialised, and when they train.

    A method combines `init`, `freeze`, `schedule` and small trainable extras. `oelm.methods()` lists the
    named methods. To define your own, change a named one with `dataclasses.replace`, or set the fields you
    need. Every extra changes nothing at its initial value, so a model starts training with the same outputs
    with and without extras.

    Examples:
        >>> import dataclasses
        >>> from oelm.methods.presets import find_method
        >>> mine = dataclasses.replace(find_method("oelm-freeze"), name="mine", gain=2.0)
        >>> mine.trains_qk, mine.gain
        (False, 2.0)

    Attributes: Initialisation
        name: The name in tables, run folders and `oelm.methods()`.
        init: The initial weights of each Q/K matrix, which has the shape (heads, head_dim, d_in):
            "keep": the present weights (the model's own init, or pretrained weights).
            "headwise": random orthonormal rows in each head (QR decomposition of a Gaussian matrix with fixed
            signs, so Haar distributed). A head projects onto a random subspace without distortion inside it.
            "global": one QR decomposition over all heads, as in the first version of the original study; the
            heads are also orthogonal to each other.
            "normal": Gaussian with mean 0 and standard deviation 0.02, the init of GPT-2. Its rows have norm
            0.02 sqrt(d_in), which is 0.45 at width 512, so it differs from "headwise" in orthogonality and
            in scale.
            "normal-matched": Gaussian with mean 0 and variance 1/d_in, so rows have norm 1 on average. It
            differs from "headwise" only in orthogonality, so it is the control for claims about it.
            "qr", "polar": orthonormal rows made from the present weights: "qr" by Gram-Schmidt (the first row
            keeps its direction), "polar" as the nearest orthonormal matrix (all rows are treated alike).
            Random inits set the biases to zero; "keep", "qr" and "polar" keep them.
        gain: Factor on the initial weights. Attention logits grow with the square of the gain, and this scale
            alone can change perplexity by tens of per cent. "match" keeps the Frobenius norm that each head
            had before: use it for pretrained models, whose other layers expect logits of that size.
        parts: The matrices on which `init` and `freeze` act: "q", "k", "ffn". Each FFN matrix (up, down and
            gate) is treated as one head; its rows or its columns, whichever are fewer, become orthonormal.
            The FFN of a layer without attention (such as a convolution layer) is left as it is.

    Attributes: Freezing
        freeze: Which layers are frozen: "none", "all", "first" (the first `layers`) or "all-but-last" (all
            but the last `layers`). Layers of encoder and decoder are counted separately; cross attention
            belongs to its decoder layer. `init` acts on all layers, also on those that are not frozen.
        layers: The number of layers for "first" and "all-but-last".
        schedule: When they are frozen. "constant": during the whole run. "gradual": frozen at first, then
            unfrozen one layer after the other, the top layer first, because upper layers are more
            task-specific. "early": trained until `freeze_at`, then frozen, which tests whether Q/K converge
            early.
        thaw_from, thaw_to: With schedule "gradual", the fractions of the run at which the top and the bottom
            frozen layer are unfrozen.
        freeze_at: With schedule "early", the fraction of the run at which the layers are frozen.

    Attributes: Trainable extras
        conv: Number of taps of a causal depthwise convolution over time on q and k (0 = none). With it, a
            head can compare neighbours of tokens, which frozen random projections cannot. It adds taps x
            (rows of q and k) parameters.
        conv_value: Number of taps of such a convolution on v (0 = none); counted as Q/K parameters.
        bias: Whether q and k get a trainable bias b, as in W x + f b. It is zero at first and has no weight
            decay. Rotary positions turn the constant part of q and k into a pattern of relative positions,
            which a frozen W cannot supply. If the projection already has a bias, that one is frozen with W.
            Without rotary positions the bias on k has no effect, because softmax cancels it.
        bias_scale: The factor f. An Adam step changes b by about the learning rate, so with Adam and similar
            optimizers f multiplies the learning rate of the bias.
        lowrank: Rank r of a trainable low-rank adapter on q and k, as in W x + s B A x (0 = none). A tuple
            gives one rank per layer, from the first layer on; its last rank is used for all further layers.
            So (20, 2) means rank 20 in the first layer and rank 2 in all others, whatever the depth of the
            model. Layers of encoder and decoder are counted separately.
        lowrank_scale: The factor s (LoRA's alpha / r). An Adam step changes every parameter by about the
            learning rate, so the product B A changes more slowly than a full matrix; s > 1 compensates.
        core: Whether q gets a trainable head_dim x head_dim matrix C per head: the scores become q' C k.
        temperature: Whether q gets one trainable factor per head, which sets how sharp its attention is.
        relative_bias: Number of token distances that have a trainable bias on the attention scores, per head
            (0 = none); larger distances share the last one. The attention class must implement it, as that
            of oelm's own GPT does.

    Attributes: Description
        purpose: What the method is for, in one line.
        controls: What a comparison with the method controls for, in one line.
        reference: The idea or paper from which the method comes.
        control: Name of the method with the same architecture and init but trained Q/K. The cost of freezing
            is measured against it. A control has no low-rank adapter: if W is trained, adding s B A gives
            nothing new.
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
    conv_value: int = 0
    bias: bool = False
    bias_scale: float = 1.0
    lowrank: int | tuple[int, ...] = 0
    lowrank_scale: float = 1.0
    core: bool = False
    temperature: bool = False
    relative_bias: int = 0
    purpose: str = field(default="", compare=False)
    controls: str = field(default="", compare=False)
    reference: str = field(default="", compare=False)
    control: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        # YAML and JSON have lists but no tuples, and may write 2 for 2.0.
        for name in ("parts", "lowrank"):
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        for name in ("gain", "bias_scale", "lowrank_scale"):
            value = getattr(self, name)
            if isinstance(value, int) and not isinstance(value, bool):
                object.__setattr__(self, name, float(value))
        _check_choices(self)
        _check_numbers(self)
        _check_combinations(self)

    @property
    def has_random_init(self) -> bool:
        """Whether `init` replaces the present weights by random ones."""
        return self.init in RANDOM_INITS

    @property
    def trains_qk(self) -> bool:
        """Whether the query and key projections train in every layer from the first step to the last."""
        return self.freeze == "none" or not {"q", "k"} & set(self.parts)

    @property
    def extends_qk(self) -> bool:
        """Whether q and k get trainable extras. A relative bias does not count: it is added to the scores."""
        return bool(self.bias or self.conv or any(self.ranks) or self.core or self.temperature)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of the low-rank adapters by layer; the last rank is used for all further layers."""
        return self.lowrank if isinstance(self.lowrank, tuple) else (self.lowrank,)

    def rank_in(self, layer: int) -> int:
        """Return the rank of the low-rank adapters in a layer; layer 0 is the first, rank 0 means no adapter.

        >>> tuple(Method("mine", lowrank=(20, 2)).rank_in(layer) for layer in range(4))
        (20, 2, 2, 2)
        """
        return self.ranks[min(layer, len(self.ranks) - 1)]

    @property
    def has_extras(self) -> bool:
        """Whether any of q, k and v gets trainable extras."""
        return self.extends_qk or bool(self.conv_value)

    @property
    def changes_nothing(self) -> bool:
        """Whether applying the method leaves the model exactly as it is."""
        return not (self.init != "keep" or self.freeze != "none" or self.has_extras or self.relative_bias)

    def check_depth(self, depth: int) -> None:
        """Raise UsageError if a model with `depth` layers has too few layers for this method."""
        if self.freeze == "all-but-last" and self.layers >= depth:
            raise UsageError(
                f"method '{self.name}' would freeze nothing: it trains the last {self.layers} layers, and "
                f"this model has only {depth}. Set a smaller number of layers (Method.layers), or use a "
                f"deeper model"
            )
        # Two ranks fit a model with one layer, too: the second rank is for all layers after the first.
        if len(self.ranks) > max(depth, 2):
            raise UsageError(
                f"method '{self.name}' has ranks for {len(self.ranks)} layers, lowrank = {list(self.ranks)}, "
                f"but this model has only {depth}. Give at most one rank per layer; the last rank is "
                f"used for all further layers, so (20, 2) fits every model"
            )

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as plain scalars, strings and lists, for YAML and JSON."""
        fields = dataclasses.asdict(self)
        return {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Method:
        """Return the method with these fields, as from `to_dict()`. Raise UsageError for an unknown field."""
        if not isinstance(fields, dict) or "name" not in fields:
            raise UsageError(f"a method must be a mapping of fields with at least a name, got {fields!r}")
        valid = [f.name for f in dataclasses.fields(cls)]
        for key in fields:
            if key not in valid:
                raise unknown_name("field of a method", key, valid)
        return cls(**fields)


def _check_choices(m: Method) -> None:
    if not isinstance(m.name, str) or not m.name.strip():
        raise UsageError(f"the name of a method must be a non-empty text, got {m.name!r}")
    for name in ("purpose", "controls", "reference", "control"):
        if not isinstance(getattr(m, name), str):
            raise UsageError(f"method '{m.name}': {name} must be a text, got {getattr(m, name)!r}")
    for name, kind in (("init", Init), ("freeze", Freeze), ("schedule", Schedule)):
        if getattr(m, name) not in get_args(kind):
            raise unknown_name(f"{name} of method '{m.name}':", str(getattr(m, name)), get_args(kind))
    if not isinstance(m.parts, tuple):
        raise UsageError(f"method '{m.name}': parts must be a list of names, got {m.parts!r}")
    for part in m.parts:
        if part not in get_args(Part):
            raise unknown_name(f"part of method '{m.name}':", str(part), get_args(Part))
    if len(set(m.parts)) != len(m.parts):
        raise UsageError(
            f"method '{m.name}': parts contains a name twice, got {m.parts}; name each part once"
        )


def _check_numbers(m: Method) -> None:
    def invalid(name: str, expected: str) -> UsageError:
        return UsageError(f"method '{m.name}': {name} must be {expected}, got {getattr(m, name)!r}")

    if m.gain != "match" and not _is_positive(m.gain):
        raise invalid("gain", 'a positive number or "match"')
    for name in ("bias_scale", "lowrank_scale"):
        if not _is_positive(getattr(m, name)):
            raise invalid(name, "a positive number")
    for name in ("layers", "conv", "conv_value", "relative_bias"):
        if not _is_count(getattr(m, name)):
            raise invalid(name, "an integer, 0 or more")
    if not m.ranks or not all(map(_is_count, m.ranks)):
        raise invalid("lowrank", "an integer, 0 or more, or a list of such integers, one per layer")
    for name in ("thaw_from", "thaw_to", "freeze_at"):
        value = getattr(m, name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
            raise invalid(name, "a fraction of the run between 0 and 1")
    for name in ("bias", "core", "temperature"):
        if not isinstance(getattr(m, name), bool):
            raise invalid(name, "true or false")
    for name in ("conv", "conv_value"):
        if getattr(m, name) == 1:
            raise invalid(name, "0 (none) or at least 2 taps, because one tap sees no other token")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_positive(value: object) -> bool:
    return isinstance(value, float) and math.isfinite(value) and value > 0


def _check_combinations(m: Method) -> None:
    """Raise UsageError if a field would have no effect in combination with the other fields."""

    def conflict(text: str) -> UsageError:
        return UsageError(f"method '{m.name}': {text}")

    if m.init == "keep" and m.gain != 1.0:
        raise conflict('gain has no effect with init "keep", which changes no weights; leave gain at 1')
    if not m.parts and (m.init != "keep" or m.freeze != "none"):
        raise conflict('parts is empty, so init and freeze have no effect; use ("q", "k")')
    if m.bias_scale != 1.0 and not m.bias:
        raise conflict("bias_scale has no effect without bias; set bias=True")
    if m.lowrank_scale != 1.0 and not any(m.ranks):
        raise conflict("lowrank_scale has no effect without a low-rank adapter; set its rank, lowrank")
    if m.freeze in ("first", "all-but-last") and m.layers == 0:
        raise conflict(f'freeze "{m.freeze}" needs a number of layers; set layers to 1 or more')
    if m.freeze in ("none", "all") and m.layers:
        raise conflict(f'layers = {m.layers} has no effect with freeze "{m.freeze}"; leave layers at 0')
    if m.schedule != "constant" and m.freeze == "none":
        raise conflict(f'schedule "{m.schedule}" has no effect with freeze "none"; use another freeze')
    if m.schedule != "gradual" and (m.thaw_from or m.thaw_to):
        raise conflict(
            'thaw_from and thaw_to have no effect without schedule "gradual"; set it or leave both at 0'
        )
    if m.schedule == "gradual" and not m.thaw_from <= m.thaw_to:
        raise conflict(
            "thaw_from is greater than thaw_to; layers are unfrozen from thaw_from to thaw_to, so swap them"
        )
    if m.schedule == "gradual" and m.thaw_to == 0:
        raise conflict(
            'schedule "gradual" needs thaw_to > 0, the fraction of the run when the last layer is unfrozen'
        )
    if m.schedule != "early" and m.freeze_at:
        raise conflict('freeze_at has no effect without schedule "early"; set it or leave freeze_at at 0')
    if m.schedule == "early" and not 0 < m.freeze_at < 1:
        raise conflict('schedule "early" needs freeze_at, a fraction of the run between 0 and 1')
