"""One dataclass for each JSON file of a run folder: training writes the files, all other code reads them.

`from_json()` builds a dataclass from parsed JSON. It ignores unknown fields. For a value of the wrong type it
raises an error that names the file and the field. `to_json()` returns the JSON object to write.
"""

from __future__ import annotations

import dataclasses
import math
import socket
import time
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from oelm.config.mapping import from_mapping
from oelm.config.run_config import RunConfig
from oelm.errors import OelmError, UsageError
from oelm.files.locks import process_alive
from oelm.runs.states import State

T = TypeVar("T")
_OMIT_NONE = {"omit_none": True}  # marks a field that `to_json()` leaves out if its value is None


def from_json(cls: type[T], value: Any, where: str) -> T:
    """Return an instance of the dataclass `cls` from parsed JSON; `where` is the file name, for errors."""
    try:
        return from_mapping(cls, value, json=True)
    except UsageError as error:
        raise OelmError(f"{where}: {error}") from None


def to_json(value: Any) -> Any:
    """Return an instance of a dataclass of this module as dicts and lists, ready to write as JSON."""
    if dataclasses.is_dataclass(value):
        held = {f.name: (getattr(value, f.name), f.metadata) for f in dataclasses.fields(value)}
        return {
            name: to_json(inner)
            for name, (inner, options) in held.items()
            if inner is not None or not options.get("omit_none")
        }
    if isinstance(value, tuple | list):
        return [to_json(item) for item in value]
    return value


# -- status.json --------------------------------------------------------------------------------


@dataclass(frozen=True)
class BestMetric:
    """The best validation score (`name` is "ppl" or "accuracy") that a run has reached so far."""

    name: str
    value: float


@dataclass(frozen=True)
class Status:
    """The content of status.json, which `oelm status` shows. The file is rewritten while the run trains."""

    state: State = "running"
    step: int = 0
    total_steps: int = 0
    loss: float | None = None
    metric: BestMetric | None = None
    steps_per_second: float | None = None
    eta_seconds: float | None = None
    preparing: str = ""  # progress of the tokenization, e.g. "train 42%"; "" before and after it
    heartbeat: float = 0.0  # unix time at which this status was written
    started: float = 0.0  # unix time at which the current process of the run started
    pid: int = 0
    host: str = ""
    attempt: int = 1  # how often the run was started, including this time
    resumes: int = 0  # how many of these starts resumed from a checkpoint
    reason: str = ""

    @property
    def age(self) -> float:
        """Seconds since the last heartbeat."""
        return time.time() - self.heartbeat

    def alive(self) -> bool | None:
        """Return whether the process of the run exists; None (unknown) if the run is on another host."""
        if self.host != socket.gethostname() or self.pid <= 0:
            return None
        return process_alive(self.pid)


# -- results.json, predictions.json and test_losses.json ----------------------------------------

Metric = Literal["ppl", "accuracy"]


@dataclass(frozen=True)
class Scores:
    """The scores on one split. `loss` is the mean over `n` tokens; in classification over `n` rows."""

    loss: float
    n: int = 0
    ppl: float | None = field(default=None, metadata=_OMIT_NONE)
    accuracy: float | None = field(default=None, metadata=_OMIT_NONE)
    step: int | None = field(default=None, metadata=_OMIT_NONE)  # step of the best model (validation only)

    def problem(self, metric: Metric) -> str:
        """Return why these scores are impossible (for example an accuracy above 1), else ""."""
        value = self.ppl if metric == "ppl" else self.accuracy
        if value is None:
            return f"{metric} is missing"
        if metric == "accuracy":
            return "" if 0 <= value <= 1 else f"accuracy is {value}, outside 0 to 1"
        if value < 1:
            return f"ppl is {value}, below 1"
        equal = abs(math.log(value) - self.loss) <= 1e-6 * max(1.0, abs(self.loss))
        return "" if equal else f"ppl is {value}, but exp(loss) is exp({self.loss})"


@dataclass(frozen=True)
class ParameterCounts:
    """Exact parameter counts of the model."""

    total: int
    trainable: int
    frozen: int
    qk_total: int
    qk_trainable: int


@dataclass(frozen=True)
class Fairness:
    """The data and settings that must be equal in two runs for their comparison to be fair."""

    data: str = ""  # fingerprint of the training rows
    tokenizer: str = ""  # hash of the tokenizer
    eval_set: str = ""  # fingerprint of the test rows, or of the validation rows of a tuning trial
    batch_rows: int = 0
    steps: int = 0
    schedule: str = ""


@dataclass(frozen=True)
class Results:
    """The content of results.json: no times or host names, so that resuming a run does not change it."""

    id: str
    study: str
    scale: str
    seed: int
    task: str
    dataset: str
    arm: str
    method: str
    metric: Metric
    test: Scores | None  # None for a tuning trial
    validation: Scores | None
    parameters: ParameterCounts
    steps: int
    tokens_seen: int
    lr: float
    checkpoint_bytes: int | None
    stopped_early: bool
    fairness: Fairness

    @classmethod
    def of(cls, config: RunConfig, **measured: Any) -> Results:
        """Return the results of a run: some fields are copied from `config`, the others are `measured`."""
        return cls(
            id=config.id,
            study=config.study,
            scale=config.scale,
            seed=config.seed,
            task=config.task,
            dataset=config.data.dataset,
            arm=config.compare.arm or config.method.name,
            method=config.method.name,
            lr=config.optim.lr,
            **measured,
        )

    def score(self, split: Literal["test", "validation"]) -> float | None:
        """Return the perplexity or accuracy on a split; None if the split was not evaluated."""
        scores: Scores | None = getattr(self, split)
        return None if scores is None else getattr(scores, self.metric)

    def problem(self) -> str:
        """Return why these results are impossible (for example a perplexity below 1), else ""."""
        for split in ("test", "validation"):
            scores: Scores | None = getattr(self, split)
            if scores is not None and (problem := scores.problem(self.metric)):
                return f"{split}.{problem}"
        return ""


@dataclass(frozen=True)
class Predictions:
    """The content of predictions.json (classification only): label and prediction of each test example."""

    labels: tuple[int, ...]
    predicted: tuple[int, ...]


@dataclass(frozen=True)
class TestLosses:
    """The content of test_losses.json (language models only), with one entry per document of the test split.

    `tokens` has the number of target tokens, `losses` the sum of their losses. If there are few documents,
    or their borders are unknown, an entry is one evaluation window instead of a document.
    """

    __test__ = False  # tells pytest that this class is not a test, in spite of its name

    tokens: tuple[int, ...]
    losses: tuple[float, ...]


# -- manifest.json ------------------------------------------------------------------------------


@dataclass(frozen=True)
class PrecisionFacts:
    """The precision (dtype of matmuls) with which a run trained, and the reason for this choice.

    A run that was resumed with another precision has both, such as "bf16 then fp32".
    """

    dtype: str = ""
    reason: str = ""


@dataclass(frozen=True)
class DataFacts:
    """The origin and size of a run's data. `fingerprints`, `rows` and `tokens` have one entry per split."""

    origin: str = ""
    dataset: str = ""
    fingerprints: dict[str, str] = field(default_factory=dict)
    rows: dict[str, int] = field(default_factory=dict)
    tokens: dict[str, int] = field(default_factory=dict)
    folder_note: str = ""  # field "notes" of the data folder's dataset_info.json; not in results files
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class TokenizerFacts:
    """The tokenizer that a run used."""

    name: str = ""
    hash: str = ""
    vocab_size: int = 0


@dataclass(frozen=True)
class Manifest:
    """The content of manifest.json: the software, machine and data that are needed to repeat the run."""

    config_hash: str = ""
    command: str = ""
    created: str = ""
    versions: dict[str, Any] = field(default_factory=dict)
    machine: dict[str, Any] = field(default_factory=dict)
    git_commit: str | None = None
    precision: PrecisionFacts = field(default_factory=PrecisionFacts)
    data: DataFacts = field(default_factory=DataFacts)
    tokenizer: TokenizerFacts = field(default_factory=TokenizerFacts)
    disk_bytes_planned: int = 0

    @property
    def data_identity(self) -> dict[str, Any]:
        """Hashes of the data and the tokenizer; they must be the same when a run is resumed."""
        return {"fingerprints": self.data.fingerprints, "tokenizer": self.tokenizer.hash}


# -- the other files ----------------------------------------------------------------------------


@dataclass(frozen=True)
class AuditRecord:
    """The result of one call of `oelm.audit()`, which checks that the frozen tensors are unchanged."""

    method: str = ""
    seed: int = 0
    progress: float = 0.0
    frozen: int = 0
    trainable: int = 0
    rows: tuple[Any, ...] = ()
    verified: bool = True
    ok: bool = True


@dataclass(frozen=True)
class FreezeAudit:
    """The content of freeze_audit.json: the audits at the start and at the end of a run."""

    start: AuditRecord | None = field(default=None, metadata=_OMIT_NONE)
    end: AuditRecord | None = field(default=None, metadata=_OMIT_NONE)

    @property
    def ok(self) -> bool:
        """Whether all audits passed."""
        return all(record.ok for record in (self.start, self.end) if record is not None)


@dataclass(frozen=True)
class TimingStats:
    """The content of timing_stats.json; times are in seconds.

    A time is None if no training step was measured. The first steps of each process are not measured,
    because they are slower; `warmup_steps` is their number.
    """

    total_wall_time: float | None = None
    num_steps_measured: int = 0
    warmup_steps: int = 0
    mean_step_time: float | None = None
    std_step_time: float | None = None
    median_step_time: float | None = None
    min_step_time: float | None = None
    max_step_time: float | None = None
    p95_step_time: float | None = None
    p99_step_time: float | None = None
    total_validation_time: float = 0.0
    num_validations: int = 0
    tokens_per_second: float | None = None
    peak_memory_bytes: int | None = None
    flops_per_step: float | None = None
    flops_per_second: float | None = None
    predicted_saving: float | None = None  # fraction of FLOPs that freezing saves; calculated, not measured


@dataclass(frozen=True)
class MetricsRow:
    """One line of metrics.jsonl: {"step": 20, "kind": "train", ...values}. Times are in other files."""

    step: int
    kind: str  # "train", "validation", "attention" or "event"
    values: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_json(cls, row: dict[str, Any], where: str) -> MetricsRow:
        """Return the row from a parsed line. Raise OelmError (naming `where`) if step or kind is missing."""
        step, kind = row.pop("step", None), row.pop("kind", None)
        if type(step) is not int or not isinstance(kind, str):
            raise OelmError(f"{where}: expected a step and a kind, got {step!r} and {kind!r}")
        return cls(step, kind, row)

    def to_json(self) -> dict[str, Any]:
        """Return the row as a JSON object."""
        return {"step": self.step, "kind": self.kind, **self.values}
