"""Verify numerically that the projections found in a model are exactly its query and key projections.

The docstring of `trial.py` describes the tests. Each kind of attention module (same class, shapes and
projections) is verified once per process. The arguments of its `forward()` are guessed from the signature, or
observed in a forward pass of the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from types import MethodType
from typing import Any

import torch
from torch import nn

from oelm.errors import OelmError
from oelm.methods.reading.build import build_projections
from oelm.methods.reading.calls import Call, observe_model
from oelm.methods.reading.discover import discover_spec, mixes_without_scores
from oelm.methods.reading.families import ATTACHED_SPEC, AttentionSpec, attach_spec, is_registered
from oelm.methods.reading.projection import Place, Projection, is_matrix
from oelm.methods.reading.trial import ROLE_NAMES, Trial


@dataclass(frozen=True)
class Verification:
    """The result of verifying that the projections of one attention module are Q and K.

    problem: Why the projections are not Q and K. not_run: Why the attention module could not be tested. Both
    are "" if the projections are verified.
    """

    problem: str = ""
    not_run: str = ""

    @property
    def verified(self) -> bool:
        return not self.problem and not self.not_run


_results: dict[Any, Verification] = {}  # the keys come from `_kind_of()`
_discovered: dict[Any, AttentionSpec | None] = {}  # the keys come from `kind_of_module()`


def discover_specs(
    model: nn.Module, names: Sequence[str], example_inputs: Any = None
) -> dict[str, AttentionSpec]:
    """Discover where modules store Q and K; return the verified specs and attach them to the modules."""
    found: dict[str, AttentionSpec] = {}
    calls: dict[str, Call] | None = None
    for name in names:
        module = model.get_submodule(name)
        key = kind_of_module(module)
        if _discovered.get(key) is None and (key not in _discovered or example_inputs is not None):
            spec = _discover_verified(model, name) if example_inputs is None else None
            if spec is None:  # the guessed calls may be wrong, so observe those of the model
                if calls is None:
                    calls = observe_model(model, {n: model.get_submodule(n) for n in names}, example_inputs)
                seen = [calls[name]] if name in calls else []
                spec = _discover_verified(model, name, seen) if seen else None
                if spec is None and mixes_without_scores(model, module, seen):
                    spec = AttentionSpec(ignore=True)
            _discovered[key] = spec
        if (known := _discovered[key]) is not None:
            found[name] = known
            attach_spec(module, known)
    return found


@contextmanager
def _cpu_by_default() -> Iterator[None]:
    """Create tensors on the CPU, also if the user has called torch.set_default_device()."""
    with torch.device("cpu"):
        yield


def kind_of_module(module: nn.Module) -> Any:
    """Return a key that is equal for modules that compute the same: classes, settings and shapes."""
    inside = tuple((name, type(part), _settings(vars(part))) for name, part in module.named_modules())
    return inside, tuple((name, p.shape) for name, p in module.named_parameters())


#: Attributes that are no settings: those of every module, the index of the layer, and a discovered spec.
_NO_SETTINGS = frozenset(vars(nn.Module())) | {
    *("layer_idx", "layer_id", "layer_index", "layer_number", "idx", ATTACHED_SPEC)
}


def _settings(values: Mapping[Any, Any], depth: int = 5) -> tuple[Any, ...]:
    """Return the values, without those in _NO_SETTINGS, as nested tuples that can be compared and hashed."""
    return tuple((str(n), _plain(v, depth)) for n, v in values.items() if n not in _NO_SETTINGS)


def _plain(value: Any, depth: int) -> Any:
    """Return a setting as a value that can be hashed; an object, such as a config, as a tuple of its fields.

    Tensors and modules count as None: parameters and submodules are in the key already.
    """
    if depth == 0 or isinstance(value, nn.Module | torch.Tensor):
        return None
    if isinstance(value, MethodType):
        return value.__func__  # the module to which it is bound differs from layer to layer
    if isinstance(value, Mapping):
        return _settings(value, depth - 1)
    if isinstance(value, list | tuple | set | frozenset):
        return tuple(_plain(item, depth - 1) for item in value)
    if is_dataclass(value) and not isinstance(value, type):
        return type(value), tuple(_plain(getattr(value, f.name, None), depth - 1) for f in fields(value))
    if hasattr(value, "__dict__") and not callable(value) and not isinstance(value, Enum):
        return type(value), _settings(vars(value), depth - 1)
    return value if value.__hash__ else type(value)


@_cpu_by_default()
def _discover_verified(model: nn.Module, name: str, calls: Sequence[Call] = ()) -> AttentionSpec | None:
    attention = model.get_submodule(name)
    for eager in (False, True) if _attention_kernel(attention) not in (None, "eager") else (False,):
        if (shown := discover_spec(model, attention, calls, eager=eager)) is None:
            continue
        spec, call = shown
        projections = build_projections(model, name, spec, Place("", 0, 1, ""))
        result = _try_calls(model, projections, [call], eager=eager)
        if result.verified:
            _results[_kind_of(projections)] = result
            return spec
    return None


def verify_projections(
    model: nn.Module, projections: Sequence[Projection], example_inputs: Any = None
) -> bool:
    """Raise OelmError unless the projections of every attention module are verified as Q and K.

    Return False if other projections of one module were discovered to be its Q and K. The caller must then
    find the projections again.

    torch's own MultiheadAttention needs no verification.

    example_inputs: A batch that the model accepts (a dict, a tuple or a tensor). oelm runs the model on it to
        see how it calls its attention modules. Without it, calls are guessed from their signatures.
    """
    by_attention: dict[str, list[Projection]] = {}
    for p in projections:
        if type(p.attention).forward is not nn.MultiheadAttention.forward:
            by_attention.setdefault(p.attention_name, []).append(p)
    calls: dict[str, Call] | None = None
    for name, group in by_attention.items():
        key = _kind_of(group)
        if key not in _results:
            result = Verification(not_run="not tried")
            if example_inputs is None:
                result = verify_attention(model, group)
            if not result.verified:  # guessed arguments may be wrong, so observe those of the model
                if calls is None:
                    attentions = {name: group[0].attention for name, group in by_attention.items()}
                    calls = observe_model(model, attentions, example_inputs)
                result = verify_attention(model, group, [calls[name]]) if name in calls else result
            if not result.verified and not is_registered(group[0].attention):
                kinds = [n for n, g in by_attention.items() if _kind_of(g) == key]
                if discover_specs(model, kinds, example_inputs):
                    return False
            if result.not_run:
                raise _not_run_error(name, group, result.not_run)
            _results[key] = result
        if _results[key].problem:
            raise _problem_error(name, group, _results[key].problem)
    return True


def verify_attention(
    model: nn.Module, projections: Sequence[Projection], calls: Sequence[Call] = ()
) -> Verification:
    """Verify that the projections of one attention module are exactly its Q and K, and return the result.

    calls: The (args, kwargs) with which the model calls the module. If empty, they are guessed.
    """
    result = _try_calls(model, projections, calls, eager=False)
    if not result.verified and _attention_kernel(projections[0].attention) not in (None, "eager"):
        # Some attention kernels hide the scores. The "eager" kernel of transformers computes the same, and
        # its scores can be recorded.
        eager = _try_calls(model, projections, calls, eager=True)
        result = eager if eager.verified or result.not_run else result
    return result


@_cpu_by_default()
def _try_calls(
    model: nn.Module, projections: Sequence[Projection], calls: Sequence[Call], *, eager: bool
) -> Verification:
    """Return the result for the first of `calls` (or guessed calls) that runs without an error.

    Later guesses are not tried: they are less usual, so they might run only by chance.
    """
    try:
        trial = Trial(model, projections[0].attention, projections, eager=eager)
    except Exception as error:  # deepcopy of a user's module can raise anything
        return Verification(not_run=f"a float32 copy of it cannot be made, {_short(error)}")
    first_error = ""
    for args, kwargs in calls or trial.guess_calls():
        try:
            scores, output = trial.run(args, kwargs)
        except Exception as error:  # the module does not accept these arguments
            first_error = first_error or _short(error)
            continue
        if scores:
            try:
                return Verification(problem=trial.contradiction(args, kwargs, scores, output))
            except Exception as error:  # the tests call the module again, which can fail
                return Verification(not_run=f"a second call with the same arguments failed, {_short(error)}")
    return Verification(not_run=first_error or "it computes no softmax over scores")


def _attention_kernel(attention: nn.Module) -> str | None:
    """Return the attention kernel of a transformers module, such as "sdpa"; None for other modules."""
    return getattr(getattr(attention, "config", None), "_attn_implementation", None)


def _kind_of(group: Sequence[Projection]) -> Any:
    attention = group[0].attention
    claims = [
        (p.role, p.name[len(p.attention_name) :], p.num_heads, p.head_dim, p.weight.layout) for p in group
    ]
    return kind_of_module(attention), tuple(claims)


def _not_run_error(name: str, group: Sequence[Projection], reason: str) -> OelmError:
    return OelmError(
        f"{_title(name, group)}: oelm could not verify numerically that the projections are {_listed(group)} "
        f"({reason}), so nothing was changed. Pass a small batch that the model accepts:\n"
        f"    oelm.apply(model, method, example_inputs=batch)  # a dict, a tuple or a tensor\n"
        f"or, if you are certain, oelm.apply(model, method, verify=False); oelm.audit then reports that the "
        f"projections are not verified"
    )


def _problem_error(name: str, group: Sequence[Projection], problem: str) -> OelmError:
    kind = type(group[0].attention)
    heads = group[0].num_heads
    found = (
        f"{_title(name, group)}: oelm read the projections as {_listed(group)}, but {problem}. So nothing "
        f"was changed. "
    )
    for p in group:
        layer = p.weight.owner
        added = [own for own, _ in layer.named_parameters() if own not in ("weight", "bias")]
        if is_matrix(layer) and added:
            return OelmError(
                f"{found}{p.name} is a {type(layer).__name__} with parameters of its own "
                f"({', '.join(added)}), such as those of an adapter. Replace it by a plain linear layer "
                f"(merge the adapter). For a low-rank adapter on frozen Q and K, use the method oelm-lowrank"
            )
    return OelmError(
        f"{found}Tell oelm where the queries and keys are:\n"
        f'    oelm.register_attention("{kind.__module__}.{kind.__qualname__}", q=..., k=..., '
        f"num_heads={heads})  # all matrices that compute queries or keys\n"
        f'or, for a fused matrix, fused=..., layout=... ("block", "per-head" or "grouped"); for a class '
        f"without Q and K, ignore=True"
    )


def _title(name: str, group: Sequence[Projection]) -> str:
    return f"{name or 'the model'} ({type(group[0].attention).__name__})"


def _listed(group: Sequence[Projection]) -> str:
    return ", ".join(
        f"{p.name[len(p.attention_name) :].lstrip('.')} "
        f"({ROLE_NAMES[p.role]}, {p.num_heads} heads x {p.head_dim})"
        for p in group
    )


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0][:150] if str(error) else ''}"
