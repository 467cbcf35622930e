"""`oelm.apply`: set the Q/K of any model as a method says and freeze them for real."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from oelm.errors import OelmError, UsageError
from oelm.methods import orthogonal
from oelm.methods.checks import (
    check_depth,
    check_extras,
    check_seed,
    check_ties,
    warn_if_trained_weights_are_discarded,
)
from oelm.methods.ffn import FeedForward, ffn_matrices
from oelm.methods.fused import SplitProjection, split_multihead
from oelm.methods.layers import Place
from oelm.methods.method import Method
from oelm.methods.projection import EXTRAS, ExtendedProjection
from oelm.methods.readers import Projection, is_transposed, qk_projections, unwrap
from oelm.methods.record import Record, TensorRecord, attach, record_of, sha256
from oelm.methods.registry import method as resolve


def apply(model: nn.Module, method: str | Method, *, seed: int = 0) -> Applied:
    """Give `model` the start and the frozen tensors of a method, in place.

    model: Any transformer whose attention oelm can read: Hugging Face models, torch's own, our GPT, or
        yours after `oelm.register_attention`. Apply after loading weights and after moving to a dtype:
        what is frozen is remembered byte by byte.
    method: A name of `oelm.methods()`, an alias, or an `oelm.Method`.
    seed: Decides every drawn tensor, each from its own stream.

    >>> import torch
    >>> encoder = torch.nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    >>> applied = apply(encoder, "oelm-freeze", seed=42)
    >>> applied.total, applied.frozen, applied.trainable  # 2 x (16 x 16 weights + 16 biases) are frozen
    (2224, 544, 1680)
    """
    chosen = resolve(method)
    check_seed(seed)
    model = unwrap(model)
    if record_of(model) is not None:
        raise OelmError(
            f"this model already carries method '{record_of(model).method.name}'; "  # type: ignore[union-attr]
            f"a second one would start from its frozen weights. Build or load the model anew"
        )
    projections = qk_projections(model)
    matrices = ffn_matrices(model) if "ffn" in chosen.parts else []
    check_depth(chosen, projections)
    check_ties(model, chosen, projections, matrices)
    check_extras(chosen, projections)
    warn_if_trained_weights_are_discarded(model, chosen, projections)

    if not chosen.trains_qk or chosen.has_extras:
        _split_fused(model, projections)
        projections = qk_projections(model)
    frozen_before = [name for name, p in model.named_parameters() if not p.requires_grad]
    record = Record(chosen, seed, {}, frozen_before=frozen_before)
    with torch.no_grad():
        for target in [p for p in projections if p.role in chosen.parts] + list(matrices):
            _start(chosen, seed, target)
    names = {id(p): name for name, p in model.named_parameters()}
    for projection in projections:
        if not projection.fused:
            _remember(record, names, projection)
    for matrix in matrices:
        _remember(record, names, matrix)
    _add_extras(model, chosen, seed, projections, record)
    attach(model, record)
    _settle(model, record, 0.0)
    return Applied(model)


class Applied:
    """A model with a method on it: exact counts, and the schedule's one verb, `step`."""

    def __init__(self, model: nn.Module) -> None:
        self.model = unwrap(model)
        record = record_of(self.model)
        assert record is not None
        self._record = record

    @property
    def method(self) -> Method:
        return self._record.method

    @property
    def seed(self) -> int:
        return self._record.seed

    @property
    def progress(self) -> float:
        """The share of the run that `step` was last told."""
        return self._record.progress

    @property
    def total(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    @property
    def trainable(self) -> int:
        return sum(p.numel() for p in self.model.parameters() if p.requires_grad)

    @property
    def frozen(self) -> int:
        return self.total - self.trainable

    @property
    def qk_total(self) -> int:
        """Numbers that shape the attention scores: query and key weights, their biases, and the extras."""
        return sum(size for size, _ in self._qk())

    @property
    def qk_trainable(self) -> int:
        return sum(size for size, trains in self._qk() if trains)

    def _qk(self) -> Iterator[tuple[int, bool]]:
        for projection in qk_projections(self.model):
            for window in (projection.weight, projection.bias):
                if window is not None:
                    yield window.view().numel(), window.parameter.requires_grad
        for name in self._record.extras:
            parameter = self.model.get_parameter(name)
            yield parameter.numel(), parameter.requires_grad

    def step(self, step: int, total_steps: int, optimizer: torch.optim.Optimizer | None = None) -> bool:
        """Freeze and thaw what the schedule says at this step; True if anything changed.

        A pure function of (step, total_steps): call it before every optimizer step, or once after a resume
        (weights first, then this). `oelm.param_groups` lists tensors that thaw later from the start; without
        a gradient an optimizer neither steps, decays nor keeps state for them, so its layout never changes.
        Pass the optimizer to also drop the state of what freezes now.
        """
        if total_steps < 1 or not 0 <= step <= total_steps:
            raise UsageError(f"step {step} of {total_steps} is no position in a run")
        changed = _settle(self.model, self._record, step / total_steps)
        for parameter in changed:
            if optimizer is not None and not parameter.requires_grad:
                optimizer.state.pop(parameter, None)
        return bool(changed)

    def to_dict(self) -> dict[str, Any]:
        counts = ("total", "trainable", "frozen", "qk_total", "qk_trainable")
        return {
            "method": self.method.name,
            "seed": self.seed,
            **{name: getattr(self, name) for name in counts},
        }

    def __str__(self) -> str:
        share = 100 * self.frozen / max(self.total, 1)
        qk_share = 100 * self.qk_trainable / max(self.qk_total, 1)
        rows = [
            ("parameters", self.total, ""),
            ("trainable", self.trainable, ""),
            ("frozen", self.frozen, f"{share:.1f} % of all"),
            ("Q/K in all", self.qk_total, ""),
            ("Q/K trainable", self.qk_trainable, f"{qk_share:.1f} % of Q/K"),
        ]
        head = (
            f"{type(self.model).__name__} with {self.method.name} (seed {self.seed}): {self.method.purpose}"
        )
        return "\n".join(
            [head.rstrip(": "), *(f"  {what:<14}{n:>14,}  {note}".rstrip() for what, n, note in rows)]
        )

    __repr__ = __str__


def _split_fused(model: nn.Module, projections: list[Projection]) -> None:
    done: set[int] = set()
    for p in (p for p in projections if p.fused):
        if isinstance(p.attention, nn.MultiheadAttention):
            if id(p.attention) not in done:
                split_multihead(p.attention)
            done.add(id(p.attention))
        elif id(p.weight.owner) not in done:
            assert p.weight.layout is not None
            done.add(id(p.weight.owner))
            split = SplitProjection(p.weight.owner, p.weight.layout, p.weight.transposed)
            _replace(model, p.name.rpartition(".")[0], split)


def _replace(model: nn.Module, name: str, new: nn.Module) -> None:
    """Put `new` where `name` is, wherever else the model refers to the same module."""
    old = model.get_submodule(name)
    for module in list(model.modules()):
        for child, value in list(module._modules.items()):
            if value is old:
                module._modules[child] = new


def _start(chosen: Method, seed: int, target: Projection | FeedForward) -> None:
    if chosen.init == "keep":
        return
    generator = orthogonal.stream(seed, target.name) if chosen.draws else None
    init = chosen.init
    if isinstance(target, Projection):
        before = target.heads()
    else:
        before = target.weight.view()  # (1, rows, d_in): one head
        init = "global" if init == "headwise" else init
    if init in ("qr", "polar") and before.shape[-2] > before.shape[-1]:
        new = orthogonal.start(init, chosen.gain, before.mT, generator).mT
    else:
        new = orthogonal.start(init, chosen.gain, before, generator)
    target.weight.write(new)
    if chosen.draws and target.bias is not None:
        target.bias.view().zero_()


def _remember(record: Record, names: dict[int, str], target: Projection | FeedForward) -> None:
    chosen, is_projection = record.method, isinstance(target, Projection)
    part = target.role if isinstance(target, Projection) else "ffn"
    acts = part in chosen.parts
    freezes_at, thaws_at = freezing_times(chosen, target.place) if acts else (None, None)
    rows, heads, size = target.weight.view().flatten(0, 1).shape[0], 1, 0
    if isinstance(target, Projection):
        heads, size = target.num_heads, target.head_dim
    for kind, window in (("weight", target.weight), ("bias", target.bias)):
        if window is None:
            continue
        name = names[id(window.parameter)]
        record.tensors[name] = TensorRecord(
            name=name,
            projection=target.name,
            part=part,
            kind=kind,
            stack=target.place.stack,
            layer=target.place.layer,
            depth=target.place.depth,
            num_heads=heads,
            head_dim=size if is_projection else rows,
            transposed=window.transposed,
            rebuildable=acts
            and chosen.draws
            and chosen.gain != "match"
            and freezes_at == 0.0
            and thaws_at is None,
            freezes_at=freezes_at,
            thaws_at=thaws_at,
        )


def freezing_times(chosen: Method, place: Place) -> tuple[float | None, float | None]:
    """(freezes at, thaws at) of a layer, as shares of the run; (None, None) = trains throughout."""
    count = {
        "none": 0,
        "all": place.depth,
        "first": min(chosen.layers, place.depth),
        "all-but-last": max(place.depth - chosen.layers, 0),
    }[chosen.freeze]
    if place.layer >= count:
        return None, None
    if chosen.schedule == "early":
        return chosen.freeze_at, None
    if chosen.schedule == "gradual":
        from_top = count - 1 - place.layer
        span = chosen.thaw_to - chosen.thaw_from
        return 0.0, chosen.thaw_from + span * from_top / max(count - 1, 1)
    return 0.0, None


def _add_extras(
    model: nn.Module, chosen: Method, seed: int, projections: list[Projection], record: Record
) -> None:
    if chosen.has_extras:
        for p in projections:
            base = p.weight.owner
            extended = ExtendedProjection(base, p.role, p.num_heads, p.head_dim, is_transposed(base), chosen)
            extended.start(seed, p.name)
            _replace(model, p.name, extended)
            record.extras += [f"{p.name}.{name}" for name in EXTRAS if getattr(extended, name) is not None]
    if chosen.conv:
        _refuse_caches(model, {p.attention_name: p.attention for p in projections})
    if chosen.relative_bias:
        for name, attention in {p.attention_name: p.attention for p in projections}.items():
            attention.add_relative_bias(chosen.relative_bias)  # type: ignore[operator]
            record.extras.append(f"{name}.relative_bias" if name else "relative_bias")


def _refuse_caches(model: nn.Module, attentions: dict[str, nn.Module]) -> None:
    """Incremental decoding shows a projection one token at a time; a convolution needs those before it."""
    for config in (getattr(model, "config", None), getattr(model, "generation_config", None)):
        if hasattr(config, "use_cache"):
            config.use_cache = False  # type: ignore[union-attr]
    for attention in attentions.values():
        attention.register_forward_pre_hook(_refuse_cache, with_kwargs=True)


def _refuse_cache(_module: nn.Module, _args: Any, kwargs: dict[str, Any]) -> None:
    for name in ("past_key_values", "past_key_value", "layer_past"):
        cache = kwargs.get(name)
        if cache is not None and getattr(cache, "get_seq_length", lambda: 1)() > 0:
            raise OelmError("the convolution on q and k needs the tokens before: call with use_cache=False")


def _settle(model: nn.Module, record: Record, progress: float) -> list[Tensor]:
    """Freeze and thaw as of `progress`; the parameters whose state changed."""
    changed: list[Tensor] = []
    for tensor in record.tensors.values():
        parameter = model.get_parameter(tensor.name)
        frozen = tensor.frozen_at(progress)
        if tensor.ever_frozen and frozen != bool(tensor.sha256):
            parameter.requires_grad_(not frozen)
            if frozen:
                parameter.grad = None
            tensor.sha256 = sha256(parameter) if frozen else ""
            changed.append(parameter)
    record.progress = progress
    return changed
