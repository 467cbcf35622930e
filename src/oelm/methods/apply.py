"""`oelm.apply`: initialise and freeze the query and key projections (Q/K) of a model as a method says.

The steps, and the modules that do them:

    1. find the method by name                                  presets.py, method.py
    2. find the projections and FFN matrices of the model       reading/find.py, reading/feed_forward.py
    3. raise an error if the method cannot be applied           checks.py
    4. verify numerically that the projections are Q and K      reading/verify.py
    5. split fused weights, initialise, add extras              install.py, extras/, orthogonal.py
    6. freeze the tensors that the method freezes at step 0     record.py
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import distributed, nn

from oelm.errors import OelmError, UsageError
from oelm.methods.checks import check_before_apply, check_no_method_yet, check_seed
from oelm.methods.install import install
from oelm.methods.method import Method
from oelm.methods.presets import find_method
from oelm.methods.reading.feed_forward import ffn_matrices
from oelm.methods.reading.find import find_projections, linear_attentions
from oelm.methods.reading.projection import names_by_module
from oelm.methods.reading.select import Patterns, Selection
from oelm.methods.reading.verify import verify_projections
from oelm.methods.reading.wrappers import unwrap
from oelm.methods.record import follow_schedule, record_of, require_parameter, require_record, thawing


def apply(
    model: nn.Module,
    method: str | Method,
    *,
    seed: int = 0,
    where: Patterns = None,
    exclude: Patterns = None,
    verify: bool = True,
    example_inputs: Any = None,
) -> Applied:
    """Initialise and freeze the tensors of `model` as `method` says, in place.

    Build the optimizer after `oelm.apply()`, which replaces a fused Q/K/V tensor by one tensor each for Q, K
    and V. An optimizer built earlier still contains the fused tensor, so V would never train.
    `oelm.audit(model, optimizer)` reports this mistake.

    Args:
        model: Any transformer whose attention oelm can read: Hugging Face models, torch.nn.Transformer,
            oelm's own GPT, or your own class after `oelm.register_attention()`. Load weights and cast to a
            dtype before `oelm.apply()`, because a hash of each frozen tensor is recorded.
        method: A name from `oelm.methods()`, an alias, or an `oelm.Method`.
        seed: Seed of all random tensors; each tensor has its own generator, made from the seed and its name.
        where: Act only on modules whose name matches this pattern, or one of a list of patterns, such as
            "text_model.*". They are shell patterns over the names in `model.named_modules()`, in which `*`
            also matches dots; a matched module includes everything inside it. oelm need not recognise the
            attention classes of other modules. Layers are counted in the whole model, not only among the
            matched modules. `oelm.preview()` shows the effect.
        exclude: Leave out modules that match this pattern, or one of a list of patterns.
        verify: Verify numerically, on a copy of each kind of attention module, that the projections found are
            exactly Q and K (see `oelm.methods.reading.verify`). If False, the report of `oelm.audit()` says
            that the projections are not verified.
        example_inputs: A small batch that the model accepts (a dict, a tuple or a tensor). Needed only if an
            error asks for it, because oelm cannot guess how to call an attention module.

    Examples:
        >>> import torch
        >>> encoder = torch.nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
        >>> applied = apply(encoder, "oelm-freeze", seed=42)
        >>> applied.total, applied.frozen, applied.trainable  # 2 x (16 x 16 weights + 16 biases) are frozen
        (2224, 544, 1680)
    """
    check_seed(seed)
    model, chosen, selection = unwrap(model), find_method(method), Selection.of(where, exclude)
    check_model(model, chosen, selection, verify=verify, example_inputs=example_inputs)
    if linear := linear_attentions(model, selection):
        warnings.warn(
            f"{len(linear)} modules of linear attention ({linear[0]}, ...) compute no attention scores, so "
            f"they have no Q and K to freeze; they are left as they are",
            stacklevel=2,
        )
    record = install(model, chosen, seed, init=True, selection=selection)
    record.verified = verify
    follow_schedule(model, record, progress=0.0)
    return Applied(model)


def check_model(
    model: nn.Module, method: Method, selection: Selection, *, verify: bool, example_inputs: Any
) -> None:
    """Raise an error if the method cannot be applied to the selected modules of `model`."""
    check_no_method_yet(model)
    while True:
        projections = find_projections(model, selection, example_inputs)
        matrices = ffn_matrices(model, selection) if "ffn" in method.parts else []
        check_before_apply(model, method, projections, matrices)
        if not verify or method.changes_nothing:
            return
        # The numeric check needs all query and key projections of an attention module, also those that
        # `where` or `exclude` leave out.
        if not selection.is_everything:
            modules = names_by_module(model)
            names = dict.fromkeys(name for p in projections for name in modules[id(p.attention)])
            projections = find_projections(model, Selection(() if "" in names else tuple(names)))
        if verify_projections(model, projections, example_inputs):
            return


class Applied:
    """The result of `oelm.apply()`: parameter counts, and `step()`, which follows the method's schedule."""

    def __init__(self, model: nn.Module) -> None:
        self.model = unwrap(model)
        self._record = require_record(model, "Applied")

    @property
    def method(self) -> Method:
        return self._record.method

    @property
    def seed(self) -> int:
        return self._record.seed

    @property
    def progress(self) -> float:
        """The fraction of the training run that was completed at the last call of `step()`, from 0 to 1."""
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
        """The number of parameters in the query and key projections and in all extras, also those on v."""
        return sum(size for size, _ in self._qk_sizes())

    @property
    def qk_trainable(self) -> int:
        return sum(size for size, trains in self._qk_sizes() if trains)

    def _qk_sizes(self) -> Iterator[tuple[int, bool]]:
        """Yield (number of parameters, whether they train) for each weight, bias and extra of Q/K."""
        for projection in find_projections(self.model, self._record.selection):
            for part in projection.slices:
                yield part.size, part.parameter.requires_grad
        for name in self._record.extras:
            parameter = require_parameter(self.model, name)
            yield parameter.numel(), parameter.requires_grad

    def step(
        self,
        step: int,
        total_steps: int,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        rewraps: bool = False,
    ) -> bool:
        """Freeze and unfreeze tensors as the schedule says at this step; return whether anything changed.

        Which tensors are frozen afterwards depends only on `step` and `total_steps`. Call this method before
        every optimizer step; when a run is resumed, load the weights first. Tensors that are unfrozen later
        are in `oelm.param_groups()` from the first step on: torch's optimizers ignore parameters without a
        gradient, so the groups never have to change.

        Args:
            step: The number of optimizer steps that are already done.
            total_steps: The number of optimizer steps of the whole run.
            optimizer: If given, its state is deleted for each tensor that this call freezes.
            rewraps: The caller wraps the model in DDP again whenever this method returns True. By default, it
                is an error to unfreeze a tensor that DDP does not know (see `unfreeze_until_step()`).
        """
        if total_steps < 1 or not 0 <= step <= total_steps:
            raise UsageError(
                f"step must be between 0 and total_steps, and total_steps at least 1, "
                f"got step {step} and total_steps {total_steps}"
            )
        if record_of(self.model) is not self._record:
            raise OelmError(
                f"step: '{self.method.name}' was removed from the model; use the result of the last call of "
                f"oelm.apply"
            )
        if not rewraps:
            self._check_ranks(step / total_steps)
        changed = follow_schedule(self.model, self._record, step / total_steps)
        for parameter in changed:
            if optimizer is not None and not parameter.requires_grad:
                optimizer.state.pop(parameter, None)
        return bool(changed)

    def unfreeze_until_step(self) -> list[nn.Parameter]:
        """Make the tensors that the schedule unfreezes later trainable until the next `step()`; return them.

        Call this before DistributedDataParallel wraps the model. DDP averages the gradients of those
        parameters that are trainable at that moment, so without this call each rank would train its own copy
        of a tensor that is unfrozen later.
        """
        found = thawing(self.model, self._record)
        for parameter in found:
            parameter.requires_grad_(True)
        self._record.known_to_ddp = self._record.trainable_until_step = True
        return found

    def _check_ranks(self, progress: float) -> None:
        """Raise OelmError if a tensor is unfrozen now whose gradients DDP does not average."""
        if self._record.known_to_ddp or not _several_ranks():
            return
        for name, tensor in self._record.tensors.items():
            # FSDP averages the gradients of all its parameters. They are DTensors.
            sharded = hasattr(require_parameter(self.model, name), "full_tensor")
            if tensor.sha256 and not tensor.frozen_at(progress) and not sharded:
                raise OelmError(
                    f"step: '{self.method.name}' unfreezes {name}, which was frozen when DDP wrapped the "
                    f"model, so each rank would train its own copy. Call applied.unfreeze_until_step() "
                    f"before the model is wrapped, and wrap it with find_unused_parameters=True"
                )

    def to_dict(self) -> dict[str, Any]:
        """Return the method's name, the seed and the parameter counts."""
        counts = ("total", "trainable", "frozen", "qk_total", "qk_trainable")
        return {
            "method": self.method.name,
            "seed": self.seed,
            **{name: getattr(self, name) for name in counts},
        }

    def __str__(self) -> str:
        frozen_share = f"{100 * self.frozen / max(self.total, 1):.1f} % of all"
        trained_share = f"{100 * self.qk_trainable / max(self.qk_total, 1):.1f} % of Q/K"
        rows = [
            ("parameters", self.total, ""),
            ("trainable", self.trainable, ""),
            ("frozen", self.frozen, frozen_share),
            ("Q/K" if self._record.selection.is_everything else "Q/K selected", self.qk_total, ""),
            ("Q/K trainable", self.qk_trainable, trained_share),
        ]
        purpose = f": {self.method.purpose}" if self.method.purpose else ""
        title = f"{type(self.model).__name__} with {self.method.name} (seed {self.seed}){purpose}"
        return "\n".join([title, *(f"  {label:<14}{n:>14,}  {note}".rstrip() for label, n, note in rows)])

    __repr__ = __str__


def _several_ranks() -> bool:
    ready = distributed.is_available() and distributed.is_initialized()
    return ready and distributed.get_world_size() > 1
