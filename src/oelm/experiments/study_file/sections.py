"""The keys of a study file, as frozen dataclasses.

The JSON Schema shows the comment on the line of a field as its description (`schema.py`), so each comment
must make sense by itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from oelm.config.run_config import BudgetConfig, DataConfig, OptimConfig, QuestionRule, Task
from oelm.experiments.experiment import DEFAULT_SEED
from oelm.models.sizes import TINY

MARGINS: dict[str, float] = {"non-inferior": 0.05, "superior": 0.0, "equivalent": 0.01}


@dataclass(frozen=True)
class DataSection(DataConfig):
    """The data. Give exactly one of `dataset`, `folder` and `hub`."""

    dataset: str = ""  # name of a dataset that oelm knows (`oelm data list`)
    tokenizer: str = ""  # "gpt2", "bpe-<vocabulary size>", or "model" (the tokenizer of a pretrained model)
    folder: str = ""  # folder with train.jsonl, validation.jsonl, test.jsonl (or csv, tsv, parquet, txt)
    hub: str = ""  # dataset on the Hugging Face hub, such as stanfordnlp/imdb
    config: str = ""  # configuration (subset) of the hub dataset
    splits: dict[str, str] = field(default_factory=dict)  # train, validation, test -> name of the hub's split
    columns: dict[str, str] = field(default_factory=dict)  # text, label, premise, hypothesis -> hub column
    classes: tuple[str, ...] = ()  # class names of a hub dataset; leave out for language modelling


@dataclass(frozen=True)
class ModelSection:
    """The model. Give a `size`, or a shape (`width`, `layers`, `heads`), or `hub`, or `folder`."""

    size: str = ""  # size of the built-in GPT: medium-512, small-256, mini, tiny or smoke
    width: int = 0  # embedding size of the built-in GPT
    layers: int = 0  # number of layers of the built-in GPT
    heads: int = 0  # number of attention heads of the built-in GPT
    ff: int = 0  # hidden size of the feed-forward layers of the built-in GPT; 0 = 4 x width
    hub: str = ""  # model on the Hugging Face hub, such as bert-base-uncased
    folder: str = ""  # folder with a transformers model
    pretrained: bool = True  # whether a model of `hub` or `folder` starts from its pretrained weights
    dropout: float = 0.1  # dropout probability of all layers
    position: Literal["learned", "rope"] = "learned"  # position embeddings of the built-in GPT
    causal: bool = True  # whether the built-in GPT has a causal attention mask; false for classification only

    @property
    def is_built_in(self) -> bool:
        """Whether `hub` names a model that is not on the hub: a tiny random model, or MiniLM from pip."""
        return self.hub == "minilm" or self.hub in TINY


@dataclass(frozen=True)
class ArmSection:
    """One arm: its method, and the arms that it is compared with."""

    method: str | dict[str, Any]  # name of a method (`oelm methods`), or the fields of a new method
    title: str = ""  # one line about this arm, for tables
    baseline: str = ""  # name of the arm that this arm is compared with; default: the first arm
    control: str = ""  # name of the arm with the same architecture and init, but trained Q/K


@dataclass(frozen=True)
class BudgetSection(BudgetConfig):
    """Batch size, length of the training, and intervals of validation, logging and checkpoints.

    Set one of `steps`, `tokens` and `epochs`.
    """

    tokens: int = 0  # length of the run in tokens, for language modelling; rounded up to whole steps


@dataclass(frozen=True)
class QuestionSection:
    """A question about an arm, with the rule and the margin that decide the answer.

    rule: "non-inferior" (at most `margin` worse), "superior" (better by more than `margin`) or "equivalent"
        (within ± `margin`)
    """

    arm: str  # name of the arm that the question is about
    reference: str = ""  # name of the arm to compare with; default: the baseline of the arm
    rule: QuestionRule = "non-inferior"  # by rule: at most margin worse; over margin better; within +- margin
    margin: float | None = None  # fraction of the reference's score; default by rule: 0.05 (5 %), 0 or 0.01


@dataclass(frozen=True)
class StudyFile:
    """A study: arms that differ only in their method, and the questions about them."""

    study: str  # name of the study: the folder of its runs, and the first part of the experiment IDs
    data: DataSection  # the dataset and the tokenizer
    arms: dict[str, str | ArmSection]  # name of each arm -> its method; the first arm is the baseline
    title: str = ""  # one line about the study
    task: Task | None = None  # default: classification if the data has classes, otherwise lm
    model: ModelSection = field(default_factory=ModelSection)  # the model; default: built-in GPT medium-512
    optim: OptimConfig = field(default_factory=OptimConfig)  # optimizer (AdamW) and learning rate
    budget: BudgetSection = field(default_factory=BudgetSection)  # batch size and length of a run
    grid: tuple[float, ...] = ()  # learning rates to try; each arm gets the one with the best validation loss
    trial_share: float = 0.5  # length of a tuning trial as a fraction of the length of a run
    questions: tuple[QuestionSection, ...] = ()  # the questions that the comparisons must answer
    seeds: tuple[int, ...] = (DEFAULT_SEED,)  # seeds of the runs, unless --seeds gives others
    mini: dict[str, Any] = field(default_factory=dict)  # settings for --scale mini, such as budget.steps: 100
    smoke: dict[str, Any] = field(default_factory=dict)  # settings for --scale smoke
