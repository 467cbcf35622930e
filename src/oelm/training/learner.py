"""`Learner`: the model of a run, together with its method, optimizer and precision."""

from __future__ import annotations

from oelm.compiled.products import speed_up_linear_layers
from oelm.config.run_config import RunConfig
from oelm.methods.apply import apply
from oelm.runs.schema import ParameterCounts
from oelm.training.measure.flops import flop_model
from oelm.training.optimizer import build_optimizer
from oelm.training.parallel.world import World
from oelm.training.precision import Precision
from oelm.training.prepare import Prepared
from oelm.training.tasks.task import Batch, Objective


class Learner:
    """The model of a run with the method applied, its optimizer, its precision and its loss.

    `objective` computes the loss of a batch, and averages the gradients over the ranks in its backward pass.
    """

    def __init__(self, config: RunConfig, prepared: Prepared, world: World, precision: Precision) -> None:
        self.model = prepared.model
        self.task = prepared.task
        self.world = world
        self.compile = config.compile
        self.precision = precision
        self.scaler = precision.scaler()
        self.applied = apply(self.model.train(), config.method, seed=config.seed)
        world.place_model(self.model)
        if not config.compile and world.device.type == "cpu":
            speed_up_linear_layers(self.model)
        self.optimizer = build_optimizer(self.model, config.optim)
        self.schedule_changed = False  # whether this step has changed which parameters are frozen
        self.in_update = False  # whether optimizer.step() has started but not ended
        self._max_qk_trainable = 0
        self.rebuild()

    def rebuild(self) -> None:
        """Build the objective and the FLOP model again; call this after parameters are frozen or unfrozen."""
        objective = Objective(self.model, self.task)
        if self.compile:
            objective.compile()
        self.objective = self.world.average_gradients(objective)
        self._flops = flop_model(self.model)
        self._full_flops = self._flops.all_trained()
        self._max_qk_trainable = max(self._max_qk_trainable, self.applied.qk_trainable)

    def follow_schedule(self, step: int, total_steps: int) -> None:
        """Freeze and unfreeze parameters as the method's schedule says for the optimizer step `step`."""
        if self.applied.step(step, total_steps, self.optimizer, rewraps=True):
            self.schedule_changed = True
            self.rebuild()

    def step_flops(self, batches: list[Batch]) -> tuple[float, float]:
        """Return the FLOPs of a step over `batches`: as the model is, and as if no parameter were frozen."""
        shapes = [(b.rows, b.length, b.target_length) for b in batches]
        return (
            sum(self._flops.step(*shape).total for shape in shapes),
            sum(self._full_flops.step(*shape).total for shape in shapes),
        )

    def parameter_counts(self) -> ParameterCounts:
        """Return the parameter counts; a parameter that is trainable in any step counts as trainable."""
        trained = sum(p.numel() for group in self.optimizer.param_groups for p in group["params"])
        return ParameterCounts(
            total=self.applied.total,
            trainable=trained,
            frozen=self.applied.total - trained,
            qk_total=self.applied.qk_total,
            qk_trainable=self._max_qk_trainable,
        )
