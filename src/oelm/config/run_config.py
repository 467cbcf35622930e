"""Everything that affects the numbers of one run, as frozen dataclasses without torch.

What does not affect numbers (folders, devices, threads, time limits) is in `Machine`, so that runs of two
machines with the same `RunConfig` are comparable.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from oelm.methods.method import Method

Task = Literal["lm", "classification", "denoising"]
Scale = Literal["full", "mini", "smoke"]


@dataclass(frozen=True)
class DataConfig:
    """The dataset, the tokenizer, and how much of the data is used."""

    dataset: str  # a name of the data catalogue
    variant: str = ""  # e.g. the language of xnli
    source: Literal["auto", "local", "hub", "builtin"] = "auto"
    tokenizer: str = "gpt2"  # "gpt2", "model" (the pretrained one's own) or "bpe-<vocab>" from the corpus
    max_length: int = 512  # context of a language model, truncation length of a classifier
    train_rows: int = 0  # use only the first n rows of the (seed-independent) shuffled split; 0 = all
    eval_rows: int = 0  # the same for validation and test
    pad_to_max: bool = False  # pad every row to max_length, as the original study did; for comparison only


@dataclass(frozen=True)
class ModelConfig:
    """The model."""

    family: Literal["gpt", "hf"] = "gpt"  # ours, or a transformers model
    name: str = "medium-512"  # a size of models.gpt, or a transformers id / folder / built-in tiny config
    pretrained: bool = False  # initialise from the named weights (hf only)
    dropout: float = 0.1
    position: Literal["learned", "rope"] = "learned"  # gpt only
    causal: bool = True  # gpt only; the original study classifies with causal=False


@dataclass(frozen=True)
class OptimConfig:
    """The optimizer (AdamW) and the learning-rate schedule."""

    lr: float = 3e-4
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_steps: int = 0
    warmup_share: float = 0.0  # share of all steps, used when warmup_steps is 0
    final_lr_share: float = 0.0  # the schedule ends at this share of lr
    weight_decay: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    clip: float = 1.0  # global gradient norm; 0 = off
    layer_decay: float = 1.0  # layer-wise learning-rate decay, 1 = off
    qk_lr: float = 0.0  # learning rate of trainable Q/K; 0 = lr


@dataclass(frozen=True)
class BudgetConfig:
    """Batch size, length of the training, and intervals of validation, logging and checkpoints."""

    batch_size: int = 8  # rows per micro-batch over all processes; rows per step = batch_size x accumulation
    accumulation: int = 1
    steps: int = 0  # optimizer steps; 0 = decided by epochs
    epochs: int = 0
    eval_every: int = 1000  # optimizer steps between validations; 0 = once per epoch / at the end
    log_every: int = 50
    checkpoint_every: int = 0  # optimizer steps; 0 = with each validation
    patience: int = 0  # validations without improvement before an early stop; 0 = off


@dataclass(frozen=True)
class CompareConfig:
    """What the run is compared with; the analysis needs nothing but the run folders."""

    group: str = ""  # runs of one group are compared, e.g. "GPT/tinystories"
    arm: str = ""  # the name shown for this arm, usually the method's
    baseline: str = ""  # experiment ID of the arm's baseline; "" when this is the baseline
    control: str = ""  # experiment ID of the same architecture with trained Q/K, when that is another one
    phase: int | str = 0  # of the original study: 1 to 4, "paper", or "extra" for our controls; 0 = none


@dataclass(frozen=True)
class TuneConfig:
    """How the learning rate was chosen. A tuning trial never uses the test split."""

    trial: bool = False  # this run is one point of a learning-rate grid, scored on validation
    grid: tuple[float, ...] = ()  # the grid that the learning rate was chosen from; () = not tuned
    seeds: tuple[int, ...] = ()  # seeds of the trials


@dataclass(frozen=True)
class RunConfig:
    """One run. `oelm show ID` prints it, and config.yaml of the run folder contains it."""

    id: str
    study: str
    task: Task
    data: DataConfig
    model: ModelConfig
    method: Method
    optim: OptimConfig = field(default_factory=OptimConfig)
    budget: BudgetConfig = field(default_factory=BudgetConfig)
    compare: CompareConfig = field(default_factory=CompareConfig)
    tune: TuneConfig = field(default_factory=TuneConfig)
    scale: Scale = "full"
    seed: int = 42
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    compile: bool = False


@dataclass(frozen=True)
class Machine:
    """Settings that differ between machines and do not affect the numbers of a run."""

    device: str = "auto"
    threads: int = 0  # 0 = torch's own choice
    data_dir: str = ""  # "" = OELM_DATA_DIR
    cache_dir: str = ""  # "" = OELM_CACHE_DIR or ~/.cache/oelm
    time_limit: float = 0.0  # seconds after which the run saves a checkpoint and stops; 0 = none
    trackers: tuple[str, ...] = ()  # of tensorboard, wandb, trackio
    skip_bad_rows: bool = False
    shard: bool = False  # shard the model and the optimizer over the processes of a run (FSDP)
    command: str = ""  # what the user typed, for manifest.json; "" = the arguments of this process
    catalogue_files: tuple[str, ...] = ()  # the user's own catalogue files, which may register datasets
