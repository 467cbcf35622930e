"""Every setting that affects the results of one run, as frozen dataclasses. The module does not import torch.

Settings that do not affect the results (folders, devices, threads, time limits) are in `Machine`, so that
runs with the same `RunConfig` are comparable even if different machines trained them.
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

    dataset: str  # name of a dataset (`oelm data list`)
    variant: str = ""  # variant of the dataset, such as the language of xnli
    source: Literal["auto", "local", "hub", "builtin"] = "auto"
    tokenizer: str = "gpt2"  # "gpt2", "model" (the pretrained model's own), or "bpe-<vocabulary size>"
    max_length: int = 512  # in tokens: context length of a language model; a classifier truncates rows to it
    train_rows: int = 0  # number of training rows to use, the same rows for all seeds; 0 = all
    eval_rows: int = 0  # number of rows to use of the validation split and of the test split; 0 = all
    pad_to_max: bool = False  # pad every row to max_length, as the original study did; slower


@dataclass(frozen=True)
class ModelConfig:
    """The architecture of the model, and whether it starts from pretrained weights."""

    family: Literal["gpt", "hf"] = "gpt"  # gpt: the built-in GPT; hf: a Hugging Face transformers model
    name: str = "medium-512"  # gpt: a size of the built-in GPT; hf: a hub ID, a folder or a tiny model
    pretrained: bool = False  # start from the pretrained weights of the model `name` (hf only)
    dropout: float = 0.1
    position: Literal["learned", "rope"] = "learned"  # position encoding (gpt only)
    causal: bool = True  # causal attention mask (gpt only); the classifiers of the original study have none


@dataclass(frozen=True)
class OptimConfig:
    """The optimizer (AdamW) and the learning-rate schedule."""

    lr: float = 3e-4
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_steps: int = 0
    warmup_share: float = 0.0  # warm-up as a fraction of all steps; used if warmup_steps is 0
    final_lr_share: float = 0.0  # learning rate at the end of the schedule, as a fraction of lr
    weight_decay: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    clip: float = 1.0  # maximum of the global gradient norm; 0 = no clipping
    layer_decay: float = 1.0  # layer-wise learning-rate decay; 1 = off
    qk_lr: float = 0.0  # learning rate of the trainable parameters of q and k; 0 = lr


@dataclass(frozen=True)
class BudgetConfig:
    """Batch size, length of the training, and intervals of validation, logging and checkpoints.

    If both `steps` and `epochs` are set, the run ends when the first of the two is reached.
    """

    batch_size: int = 8  # rows per micro-batch, summed over all processes of the run
    accumulation: int = 1  # micro-batches per optimizer step
    steps: int = 0  # length of the run in optimizer steps; 0 = given by epochs
    epochs: int = 0  # length of the run in passes over the training split; 0 = given by steps
    eval_every: int = 1000  # steps between validations; 0 = once per epoch, or at the end if epochs is 0
    log_every: int = 50  # optimizer steps between two rows of metrics.jsonl
    checkpoint_every: int = 0  # optimizer steps between checkpoints; 0 = at each validation
    patience: int = 0  # validations without improvement before an early stop; 0 = off

    @property
    def rows_per_step(self) -> int:
        """The number of rows per optimizer step, summed over all micro-batches and processes."""
        return self.batch_size * self.accumulation


QuestionRule = Literal["non-inferior", "superior", "equivalent"]


@dataclass(frozen=True)
class QuestionConfig:
    """The question whether a run is non-inferior to a reference, for example. The verdict answers it.

    rule: "non-inferior" (at most `margin` worse), "superior" (better by more than `margin`) or "equivalent"
        (within ± `margin`)
    margin: fraction of the reference's perplexity or accuracy; 0.05 is 5 %
    """

    reference: str  # experiment ID of the reference
    rule: QuestionRule = "non-inferior"
    margin: float = 0.05


@dataclass(frozen=True)
class CompareConfig:
    """What a run is compared with. It is part of the config, so that an analysis needs only run folders."""

    group: str = ""  # runs of the same group are compared with each other, e.g. "GPT/tinystories"
    arm: str = ""  # name of the arm (a method in a comparison), usually the name of the method
    baseline: str = ""  # experiment ID of the baseline of this arm; "" if the arm itself is the baseline
    control: str = ""  # ID of the experiment with the same architecture and trained Q/K; "" = the baseline
    # The part of the original study: phase 1 to 4 or "paper"; "extra" if it is a control that the original
    # study does not have; 0 if it is no part of the study `paper`.
    phase: int | str = 0
    questions: tuple[QuestionConfig, ...] = field(default=(), compare=False)  # from the user's study file
    # Maximum number of seeds if `oelm decide` adds seeds one after another; 0 = a fixed number of seeds.
    # `compare=False`, because it does not affect the result of the run and so must not change its hash.
    max_seeds: int = field(default=0, compare=False)


@dataclass(frozen=True)
class TuneConfig:
    """How the learning rate was chosen. A tuning trial never uses the test split."""

    trial: bool = False  # whether this run is a tuning trial: one learning rate of the grid, one seed
    grid: tuple[float, ...] = ()  # the grid that the learning rate was chosen from; () = not tuned
    seeds: tuple[int, ...] = ()  # seeds of the tuning trials


ArmKey = tuple[str, str, str]  # study, scale, experiment ID


@dataclass(frozen=True)
class RunConfig:
    """The config of one run. `oelm show ID` prints it, and config.yaml in the run folder contains it."""

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

    @property
    def arm_key(self) -> ArmKey:
        """What identifies the arm of this run: the runs of an arm differ only in their seed."""
        return self.study, self.scale, self.id


@dataclass(frozen=True)
class Machine:
    """Settings that differ between machines and do not affect the results of a run."""

    device: str = "auto"
    threads: int = 0  # CPU threads; 0 = torch's default
    data_dir: str = ""  # folder of local datasets; "" = the environment variable OELM_DATA_DIR
    cache_dir: str = ""  # folder of tokenized datasets; "" = $OELM_CACHE_DIR or ~/.cache/oelm
    time_limit: float = 0.0  # seconds after which the run saves a checkpoint and stops; 0 = no limit
    trackers: tuple[str, ...] = ()  # any of "tensorboard", "wandb" and "trackio"
    skip_bad_rows: bool = False  # skip and count unusable rows of a dataset, instead of raising an error
    shard: bool = False  # shard the model and the optimizer over the processes of a run (FSDP)
    command: str = ""  # the user's command line, kept in manifest.json; "" = `sys.argv` of this process
    # Where to print the lines of training.log; "" = with a progress bar on stderr, if that is a terminal.
    echo: Literal["", "stdout", "stderr"] = ""
    catalogue_files: tuple[str, ...] = ()  # the user's own catalogue files, which may register datasets
