"""`oelm list`, `show`, `diff` and `methods`: print the experiments that oelm knows, and its methods."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from oelm.cli.gpu import GpuName
from oelm.cli.options import (
    ArmName,
    Catalogue,
    Changes,
    DataDir,
    ExperimentId,
    IdOrFile,
    Json,
    OneScale,
    Phases,
    Runs,
    Seed,
    Study,
    load_catalogues,
)
from oelm.cli.output import print, print_json, print_table
from oelm.config.run_config import RunConfig
from oelm.errors import UsageError
from oelm.experiments.catalogue import (
    PHASES,
    STUDIES,
    experiment,
    experiments,
    is_study_file,
    one_experiment,
    select,
    study_arms,
)
from oelm.experiments.experiment import Experiment, stand_ins
from oelm.methods.presets import ALIASES, methods
from oelm.units import bytes_text, duration_text

if TYPE_CHECKING:
    from oelm.experiments.plan import Plan


def list_experiments(
    *, study: Study = "", phase: Phases = (), catalogue: Catalogue = (), json: Json = False
) -> None:
    """Print the experiments, grouped by study and phase."""
    load_catalogues(catalogue)
    chosen = select(phases=phase, study=study) if study or phase else list(experiments().values())
    if json:
        print_json([_facts(e) for e in chosen])
        return
    groups: dict[tuple[str, int | str], list[Experiment]] = {}
    for e in chosen:
        groups.setdefault((e.study, e.phase), []).append(e)
    for (name, number), members in groups.items():
        title = f"phase {number}: {PHASES.get(number, '')}" if number else STUDIES.get(name, "")
        print(f"\n{name}, {title}" if title else f"\n{name}")
        rows = [
            (e.id, e.data.dataset, e.method_name, _budget(e), str(e.reported or "-"), e.title)
            for e in members
        ]
        print_table(("ID", "data", "method", "budget", "reported", "title"), rows, indent="  ")
    print(f"\n{len(chosen)} experiments. `oelm show ID` prints one in full; scales: full, mini, smoke.")


def _budget(e: Experiment) -> str:
    return f"{e.budget.epochs} epochs" if e.budget.epochs else f"{e.budget.steps:,} steps"


def _facts(e: Experiment) -> dict[str, Any]:
    reported = None
    if e.reported:
        reported = {"metric": e.reported.metric, "value": e.reported.value, "note": e.reported.note}
    return {
        "id": e.id,
        "study": e.study,
        "phase": e.phase,
        "title": e.title,
        "task": e.task,
        "dataset": e.data.dataset,
        "method": e.method_name,
        "baseline": e.baseline,
        "control": e.control,
        "tuned": e.tuned,
        "questions": [asdict(q) for q in e.questions],
        "reported": reported,
        "notes": list(e.notes),
    }


def show(
    id: IdOrFile,
    arm: ArmName = "",
    /,
    *,
    scale: OneScale = "full",
    seed: Seed = None,
    changes: Changes = Changes(),
    data_dir: DataDir = "",
    runs: Runs = "runs",
    gpu: GpuName = "",
    catalogue: Catalogue = (),
    json: Json = False,
) -> None:
    """Print the settings of one experiment, its parameter counts, and the disk and time that a run needs."""
    from oelm.config.hash import config_hash
    from oelm.config.mapping import to_mapping
    from oelm.config.yaml import config_to_yaml
    from oelm.experiments.fairness import check_experiment
    from oelm.experiments.plan import estimate
    from oelm.experiments.predict import Predictor, find_gpu
    from oelm.experiments.request import Request

    load_catalogues(catalogue)
    if is_study_file(id) and not arm:
        arms = study_arms(id)
        if scale != "full" or seed is not None or changes != Changes() or gpu:
            raise UsageError(
                f"--scale, --seed, --set, --as and --gpu show one arm of a study file; name the arm, as in "
                f"`oelm show {id} {arms[-1].arm} --scale smoke`"
            )
        _show_study(id, arms, json)
        return
    e = one_experiment(id, arm)
    seed = e.seeds[0] if seed is None else seed
    changed = changes.values()
    # As `oelm train` does: a learning rate of the user's own is not tuned, and has a study folder of its own.
    tune = False if "optim.lr" in changed and e.tuned else None
    request = Request([e], changes=changed, study=changes.study_name, tune=tune, data_dir=data_dir)
    config = request.config(e, scale, seed)
    plan = estimate(config, runs)
    predicted = Predictor(find_gpu(gpu), runs).predict(config) if gpu else None
    # Changes of the method are for this experiment alone: its baseline may not have the changed part.
    shared = {name: value for name, value in request.changes.items() if name.partition(".")[0] != "method"}
    compared = replace(request, changes=shared)
    unequal = check_experiment(e, lambda other: compared.config(other, scale, seed))
    if json:
        facts = {"config": to_mapping(config), "config_hash": config_hash(config), "plan": plan.to_dict()}
        facts |= {"predicted": predicted.to_dict()} if predicted else {}
        print_json(
            {**_facts(e), **facts, "stand_ins": stand_ins(config), "unequal": [u.to_dict() for u in unequal]}
        )
        return
    title = f": {e.title}" if e.title else ""
    print(f"{e.id}{title} (study {e.study}{f', phase {e.phase}' if e.phase else ''})")
    if e.reported:
        print(f"the original study reported {e.reported}{f' ({e.reported.note})' if e.reported.note else ''}")
    for note in (*e.notes, *stand_ins(config)):
        print(f"note: {note}")
    for setting in unequal:
        print(f"unequal: {setting}")
    if e.tuned and tune is None:
        grid = ", ".join(f"{lr:g}" for lr in e.grid(scale))
        print(f"the learning rate is chosen from {grid} by validation loss")
    print_table(("", ""), [*_plan_rows(config, plan, data_dir), *(predicted.rows() if predicted else ())])
    print(f"\nconfig {config_hash(config)[:12]}\n{config_to_yaml(config)}", end="")


def _show_study(path: str, arms: Sequence[Experiment], json: bool) -> None:
    """Print the arms and questions of a study file."""
    if json:
        print_json([_facts(e) for e in arms])
        return
    first = arms[0]
    seeds = ", ".join(map(str, first.seeds))
    print(f"{first.study}: {first.task} on {first.data.dataset}, {_budget(first)}, seeds {seeds}")
    rows = [(e.arm, e.id, e.method_name, e.baseline or "-", e.control or "-", e.title) for e in arms]
    print_table(("arm", "ID", "method", "baseline", "control", "title"), rows)
    for e in arms:
        for q in e.questions:
            print(f"question: is {e.id} {q.rule} to {q.reference}? margin {100 * q.margin:g} %")
    if first.grids:
        grid = ", ".join(f"{lr:g}" for lr in first.grid("full"))
        print(f"the learning rate of each arm is chosen from {grid} by validation loss")
    print(f"\n`oelm show {path} {arms[-1].arm}` prints one arm in full; `oelm run {path}` trains all.")


def _plan_rows(config: RunConfig, plan: Plan, data_dir: str) -> list[tuple[str, str]]:
    from oelm.data.sources.open import describe_source

    rows = [("method", f"{config.method.name}: {config.method.purpose}")]
    if p := plan.parameters:
        share = 100 * p["qk_trainable"] / max(p["qk_total"], 1)
        rows += [
            ("parameters", f"{p['total']:,} total, {p['trainable']:,} trainable, {p['frozen']:,} frozen"),
            ("frozen share", f"{100 * p['frozen'] / p['total']:.1f} % of all parameters"),
            ("Q/K", f"{p['qk_total']:,} parameters, {p['qk_trainable']:,} trainable ({share:.1f} %)"),
        ]
    else:
        rows.append(("parameters", plan.parameters_note))
    time = f"about {duration_text(plan.seconds)} ({plan.time_basis})" if plan.seconds else plan.time_basis
    return [
        *rows,
        ("data", describe_source(config.data.dataset, config.data.source, data_dir)),
        ("steps", plan.steps_text),
        ("tokens", plan.tokens_text),
        ("disk", f"{bytes_text(plan.disk_bytes)} at most" if plan.disk_bytes else "unknown"),
        ("time", time),
        ("folder", str(plan.folder)),
    ]


def diff(
    first: ExperimentId,
    second: ExperimentId,
    /,
    *,
    scale: OneScale = "full",
    data_dir: DataDir = "",
    catalogue: Catalogue = (),
    json: Json = False,
) -> None:
    """Print the fields that differ between the configs of two experiments."""
    from oelm.config.diff import config_diff

    load_catalogues(catalogue)
    pair = [experiment(id).at(scale, data_dir=data_dir) for id in (first, second)]
    found = config_diff(*pair)
    if json:
        print_json({field: list(values) for field, values in found.items()})
    elif found:
        print_table(("field", pair[0].id, pair[1].id), [(f, *map(repr, both)) for f, both in found.items()])
    else:
        print(f"the configs of {pair[0].id} and {pair[1].id} do not differ in any field")


def list_methods(*, json: Json = False) -> None:
    """Print the named methods with their aliases, purposes and controls."""
    names: dict[str, list[str]] = {}
    for alias, name in ALIASES.items():
        names.setdefault(name, []).append(alias)
    if json:
        print_json({n: {**m.to_dict(), "aliases": names.get(n, [])} for n, m in methods().items()})
        return
    for name, method in methods().items():  # as text, because a table would be too wide for a terminal
        also = f" (aliases: {', '.join(names[name])})" if name in names else ""
        print(f"{name}{also}\n  {method.purpose}")
        if method.controls:
            print(f"  controls for: {method.controls}")
        if method.control:
            print(f"  its control: {method.control}")
        if method.reference:
            print(f"  reference: {method.reference}")
