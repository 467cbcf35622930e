"""Read a study file and return its experiments. Every error names the file, the line and the key."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from oelm.config.limits import check_config, check_model
from oelm.config.mapping import convert, from_mapping
from oelm.config.run_config import BudgetConfig, DataConfig, ModelConfig, QuestionConfig
from oelm.config.yaml import errors_with_lines, read_yaml_as
from oelm.data.catalogue import SPLITS, Dataset, dataset, is_path, register_dataset
from oelm.errors import OelmError, UsageError, unknown_name
from oelm.experiments.experiment import Experiment, require_folder_name
from oelm.experiments.scales import SCALES
from oelm.experiments.studies.comparison import ArmSpec, comparison
from oelm.experiments.study_file.sections import (
    MARGINS,
    ArmSection,
    BudgetSection,
    DataSection,
    ModelSection,
    StudyFile,
)
from oelm.methods.method import Method
from oelm.methods.presets import check_name_is_free, find_method
from oelm.models.sizes import shape_name

_COLUMNS = ("text", "premise", "hypothesis", "label")


@dataclass(frozen=True)
class Study:
    """The content of a study file."""

    name: str
    title: str
    experiments: tuple[Experiment, ...]  # one per arm, in the order of the file
    # Whether the dataset is on the Hugging Face hub. It is then described only in the study file, so worker
    # processes must load the file, too.
    registers_data: bool


def load_study(path: Path | str) -> Study:
    """Return the study that a YAML file describes; add its hub dataset, if any, to oelm's catalogue.

    Raises UsageError for an unknown key, an invalid value, or settings that cannot be trained.
    """
    place = Path(path).expanduser()
    if place.is_dir():
        raise UsageError(f"{path} is a folder, not a study file")
    if not place.is_file():
        raise UsageError(f"the study file {path} does not exist; `oelm init {path}` writes one to start from")
    file, lines = read_yaml_as(StudyFile, place)
    with errors_with_lines(path, lines):
        return _study(file, place.resolve().parent)


@contextmanager
def _about(field: str) -> Iterator[None]:
    """Add the key `field` of the study file to errors of the `with` block that do not name a key."""
    try:
        yield
    except UsageError as error:
        error.field = error.field or field
        raise
    except OelmError as error:  # for example a data folder that cannot be read
        raise UsageError(str(error), field=field) from None


def _study(file: StudyFile, folder: Path) -> Study:
    with _about("study"):
        require_folder_name(file.study, "a study's name")
    model = _model(file.model, folder)
    data = _data(file, folder, model)
    with _about("data"):
        task = file.task or dataset(data.dataset).task
    if not file.arms:
        raise UsageError("the study has no arms; add at least one, such as baseline: baseline", field="arms")
    _check_arm_names(file.arms)
    arms = {name: arm if isinstance(arm, ArmSection) else ArmSection(arm) for name, arm in file.arms.items()}
    specs = [_arm(name, arm, file.arms[name]) for name, arm in arms.items()]
    _check_method_controls(specs)
    _check_scales(file)
    smoke = {"data.source": "auto", **file.smoke} if is_path(data.dataset) else file.smoke
    settings: dict[str, Any] = {
        "study": file.study,
        "task": task,
        "model": model,
        "optim": file.optim,
        "budget": _budget(file.budget, data, task),
        "tuned": bool(file.grid),
        "grids": {"full": file.grid} if file.grid else {},
        "trial_share": file.trial_share,
        "seeds": file.seeds,
        "mini": file.mini,
        "smoke": smoke,
    }
    made = comparison(lambda _, **own: Experiment(data=data, **own), "", specs, stem=file.study, **settings)
    by_arm = dict(zip(arms, made, strict=True))
    experiments = tuple(_with_comparisons(name, arm, by_arm, file) for name, arm in arms.items())
    for e in experiments:
        _check(e)
    return Study(file.study, file.title, experiments, registers_data=bool(file.data.hub))


def _check_arm_names(names: Iterable[str]) -> None:
    """Raise UsageError if names differ only in case: experiment IDs are found in any case."""
    seen: dict[str, str] = {}
    for name in names:
        other = seen.setdefault(name.lower(), name)
        if other != name:
            raise UsageError(
                f"the names of the arms {other} and {name} differ only in case; rename one",
                field=f"arms.{name}",
            )


def _arm(name: str, arm: ArmSection, written: str | ArmSection) -> ArmSpec:
    place = f"arms.{name}"
    with _about(place):
        require_folder_name(name, "an arm's name")
    place = place if isinstance(written, str) else f"{place}.method"
    method: str | Method = arm.method if isinstance(arm.method, str) else _own_method(name, arm.method, place)
    with _about(place):
        found = find_method(method)
    return ArmSpec(name, method, arm.title or found.purpose)


def _own_method(name: str, given: dict[str, Any], place: str) -> Method:
    """Return the method that the user describes by its fields.

    given: fields of `Method`; the key "base" may name a known method, from which the other fields are copied
    place: where the fields are in the study file, for error messages
    """
    given = dict(given)
    base: dict[str, Any] = {}
    if "name" in given:
        raise UsageError("the method has the name of its arm; leave this key out", field=f"{place}.name")
    if "base" in given:
        with _about(f"{place}.base"):
            base = find_method(convert(str, given.pop("base"), f"{place}.base")).to_dict()
    method = from_mapping(Method, {**base, "name": name, "purpose": "", **given}, place)
    with _about(f"arms.{name}"):
        check_name_is_free(method)  # tables and controls name methods
    return method


def _check_method_controls(specs: list[ArmSpec]) -> None:
    """Raise UsageError if a method of the file names a control that is neither its method nor a known one."""
    names = [find_method(spec.method).name for spec in specs]
    for spec in specs:
        control = find_method(spec.method).control
        if control and control not in names:
            with _about(f"arms.{spec.name}.method.control"):
                find_method(control)


def _check_scales(file: StudyFile) -> None:
    """Raise UsageError if a setting for a smaller scale would change the arms or how they compare."""
    for scale, changes in (("mini", file.mini), ("smoke", file.smoke)):
        for name in changes:
            if name.partition(".")[0] in ("method", "tune", "compare"):
                raise UsageError(
                    f"'{name}' cannot differ between scales, because it would be the same for all arms; "
                    "leave it out",
                    field=f"{scale}.{name}",
                )


def _model(section: ModelSection, folder: Path) -> ModelConfig:
    shape = [section.width, section.layers, section.heads]
    named = [key for key in ("size", "hub", "folder") if getattr(section, key)] + ["width"] * any(shape)
    if len(named) > 1:
        raise UsageError(
            f"the model is given twice: {' and '.join(named)} exclude each other; keep one", field="model"
        )
    if section.hub or section.folder:
        name = section.hub or str((folder / Path(section.folder).expanduser()).resolve())
        pretrained = section.pretrained and (section.hub == "minilm" or not section.is_built_in)
        return ModelConfig("hf", name, pretrained, section.dropout, section.position, section.causal)
    size = section.size or ModelConfig.name
    if section.ff and not any(shape):
        raise UsageError("ff belongs to a shape: give width, layers and heads, too", field="model")
    if any(shape):
        if not all(shape):
            raise UsageError("the shape is incomplete: give width, layers and heads", field="model")
        size = shape_name(section.width, section.layers, section.heads, section.ff or 4 * section.width)
    return ModelConfig("gpt", size, False, section.dropout, section.position, section.causal)


def _data(file: StudyFile, folder: Path, model: ModelConfig) -> DataConfig:
    section = file.data
    named = [key for key in ("dataset", "folder", "hub") if getattr(section, key)]
    if len(named) != 1:
        given = " and ".join(named) if named else "none of them"
        raise UsageError(f"give exactly one of dataset, folder and hub, not {given}", field="data")
    name = section.dataset
    if section.folder:
        name = str((folder / Path(section.folder).expanduser()).resolve())
    elif section.hub:
        entry = _hub_dataset(file.study, section)
        with _about("data.hub"):
            name = register_dataset(entry).name
    for key in ("config", "splits", "columns", "classes"):
        if getattr(section, key) and not section.hub:
            raise UsageError(
                f"{key} is allowed only together with the key hub; remove it", field=f"data.{key}"
            )
    with _about(f"data.{named[0]}"):
        dataset(name)
    pretrained = model.family == "hf" and model.pretrained
    tokenizer = section.tokenizer or ("model" if pretrained else DataConfig.tokenizer)
    return _base(DataConfig, replace(section, dataset=name, tokenizer=tokenizer))


def _hub_dataset(study: str, section: DataSection) -> Dataset:
    for key, valid in (("splits", SPLITS), ("columns", _COLUMNS)):
        for name in getattr(section, key):
            if name not in valid:
                raise unknown_name(f"key of data.{key}", name, valid, field=f"data.{key}.{name}")
    pairs = {"premise", "hypothesis"} & set(section.columns)
    if len(pairs) == 1 or (pairs and "text" in section.columns):
        raise UsageError("give either the key text, or both premise and hypothesis", field="data.columns")
    return Dataset(
        name=f"{study}-{section.hub.rpartition('/')[2]}",
        about=f"{section.hub}, described in the study file of {study}",
        fields=("premise", "hypothesis") if pairs else ("text",),
        label_names=section.classes,
        aliases={ours: (theirs,) for ours, theirs in section.columns.items()},
        hub=section.hub,
        config=section.config,
        hub_splits=section.splits or {"train": "train"},
    )


def _budget(section: BudgetSection, data: DataConfig, task: str) -> BudgetConfig:
    budget = _base(BudgetConfig, section)
    if budget.steps and budget.epochs:
        raise UsageError("give either steps or epochs, not both", field="budget.epochs")
    if not section.tokens:
        return budget
    if task != "lm" or budget.steps or budget.epochs:
        raise UsageError(
            "tokens is allowed only for language modelling and without steps and epochs; "
            "give steps or epochs instead",
            field="budget.tokens",
        )
    per_step = budget.rows_per_step * data.max_length
    return replace(budget, steps=math.ceil(section.tokens / max(1, per_step)))


def _base(cls: Any, section: Any) -> Any:
    """Return `section` as its base class `cls`, without the keys that only study files have."""
    return cls(**{f.name: getattr(section, f.name) for f in fields(cls)})


def _with_comparisons(name: str, arm: ArmSection, arms: dict[str, Experiment], file: StudyFile) -> Experiment:
    """Return the experiment of the arm `name` with the baseline, control and questions of the study file.

    arms: the experiments of all arms, by arm name
    """
    e = arms[name]
    for role, other in (("baseline", arm.baseline), ("control", arm.control)):
        if other == name:
            raise UsageError(
                f"an arm cannot be its own {role}; name a different arm", field=f"arms.{name}.{role}"
            )
    if arm.baseline:
        e = replace(e, baseline=_id_of(arm.baseline, arms, f"arms.{name}.baseline"))
    if arm.control:
        e = replace(e, control=_id_of(arm.control, arms, f"arms.{name}.control"))
    questions = []
    for number, asked in enumerate(file.questions):
        place = f"questions[{number}]"
        _id_of(asked.arm, arms, f"{place}.arm")
        if asked.arm != name:
            continue
        reference = _id_of(asked.reference, arms, f"{place}.reference") if asked.reference else e.baseline
        if reference in ("", e.id):
            raise UsageError(
                f"the arm {name} cannot be compared with itself; set reference to a different arm",
                field=f"{place}.reference",
            )
        margin = MARGINS[asked.rule] if asked.margin is None else asked.margin
        if not 0 <= margin < 1 or (margin == 0 and asked.rule == "equivalent"):
            raise UsageError(
                "must be at least 0 and below 1, such as 0.05 for 5 %; above 0 for the rule equivalent",
                field=f"{place}.margin",
            )
        question = QuestionConfig(reference, asked.rule, margin)
        if question in questions:
            raise UsageError(f"the question about {name} is asked twice; leave one out", field=place)
        questions.append(question)
    return replace(e, arm=name, questions=tuple(questions))


def _id_of(arm: str, arms: dict[str, Experiment], place: str) -> str:
    if arm not in arms:
        raise unknown_name("arm", arm, arms, field=place)
    return arms[arm].id


def _check(e: Experiment) -> None:
    """Raise UsageError if a run with the settings of this experiment could not be trained."""
    with _about("model"):
        check_model(e.planned())
    with _about("data"):
        check_config(e.planned())
    for scale in SCALES[1:]:
        with _about(scale):
            e.planned(scale)
    if any(not 0 < lr < math.inf for lr in e.grids.get("full", ())):
        raise UsageError("learning rates must be above 0", field="grid")
    if not 0 < e.trial_share <= 1:
        raise UsageError("must be above 0 and at most 1", field="trial_share")
    if not e.seeds or min(e.seeds) < 0:
        raise UsageError("must have at least one seed, and none below 0", field="seeds")
