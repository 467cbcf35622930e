"""`oelm list`, `show`, `diff`, `methods`: the catalogue, without torch but for the counts of show."""

from __future__ import annotations

import argparse
from typing import Any

from oelm.cli.options import (
    add_catalogue,
    add_changes,
    add_json,
    add_phase,
    add_runs,
    add_scale,
    command_parser,
    load_own,
)
from oelm.cli.output import print, print_json, print_table
from oelm.config.diff import config_diff
from oelm.config.hash import config_hash
from oelm.config.mapping import to_mapping
from oelm.config.overrides import changes_from_words
from oelm.config.run_config import RunConfig
from oelm.config.yaml import config_to_yaml
from oelm.experiments.catalogue import PHASES, STUDIES, experiment, experiments, select
from oelm.experiments.experiment import DEFAULT_SEED, Experiment, stand_ins
from oelm.experiments.fairness import check_experiment
from oelm.experiments.study import Request
from oelm.methods.presets import ALIASES, methods
from oelm.units import bytes_text, duration_text


def add_parser(subparsers: Any) -> None:
    listing = command_parser(subparsers, "list", "the experiments of the catalogue", "oelm list --study gap")
    listing.add_argument("--study", default="", help="only this study's")
    add_phase(listing, "only these phases of the original study")
    add_catalogue(listing)
    add_json(listing)

    show = command_parser(
        subparsers,
        "show",
        "all that one experiment will do",
        "oelm show GPT-02 --scale mini --set optim.lr=1e-3",
    )
    show.add_argument("id", metavar="ID")
    show.add_argument("--seed", type=int, default=DEFAULT_SEED)
    show.add_argument("--data-dir", default="", metavar="DIR", help="local datasets (or OELM_DATA_DIR)")
    add_scale(show)
    add_changes(show)
    add_runs(show)
    add_catalogue(show)
    add_json(show)

    diff = command_parser(
        subparsers, "diff", "what differs between two experiments", "oelm diff GPT-01 GPT-02"
    )
    diff.add_argument("first", metavar="ID")
    diff.add_argument("second", metavar="ID")
    diff.add_argument("--data-dir", default="", metavar="DIR", help="local datasets (or OELM_DATA_DIR)")
    add_scale(diff)
    add_catalogue(diff)
    add_json(diff)

    named = command_parser(subparsers, "methods", "the named methods", "oelm methods --json")
    add_json(named)


def run(args: argparse.Namespace) -> int:
    return {"list": _list, "show": _show, "diff": _diff, "methods": _methods}[args.command](args)


def _list(args: argparse.Namespace) -> int:
    load_own(args)
    if args.study or args.phase:
        chosen = select(phases=args.phase, study=args.study)
    else:
        chosen = list(experiments().values())
    if args.json:
        print_json([_facts(e) for e in chosen])
        return 0
    groups: dict[tuple[str, int | str], list[Experiment]] = {}
    for e in chosen:
        groups.setdefault((e.study, e.phase), []).append(e)
    for (study, phase), members in groups.items():
        title = f"phase {phase}: {PHASES.get(phase, '')}" if phase else STUDIES.get(study, "")
        print(f"\n{study}, {title}" if title else f"\n{study}")
        rows = [
            (e.id, e.data.dataset, e.method_name, _budget(e), str(e.reported or "-"), e.title)
            for e in members
        ]
        print_table(("ID", "data", "method", "budget", "reported", "what"), rows, indent="  ")
    print(f"\n{len(chosen)} experiments. `oelm show ID` prints one in full; scales: full, mini, smoke.")
    return 0


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
        "reported": reported,
        "notes": list(e.notes),
    }


def _show(args: argparse.Namespace) -> int:
    from oelm.experiments.plan import estimate

    load_own(args)
    e = experiment(args.id)
    request = Request(
        [e], changes=changes_from_words(args.changes), study=args.study_name, data_dir=args.data_dir
    )
    config = request.config(e, args.scale, args.seed)
    plan = estimate(config, args.runs)
    unequal = check_experiment(e, lambda arm: request.config(arm, args.scale, args.seed))
    if args.json:
        facts = {"config": to_mapping(config), "config_hash": config_hash(config), "plan": plan.to_dict()}
        print_json(
            {**_facts(e), **facts, "stand_ins": stand_ins(config), "unequal": [u.to_dict() for u in unequal]}
        )
        return 0
    print(f"{e.id}: {e.title} (study {e.study}{f', phase {e.phase}' if e.phase else ''})")
    if e.reported:
        print(f"the study reported {e.reported}{f' ({e.reported.note})' if e.reported.note else ''}")
    for note in (*e.notes, *stand_ins(config)):
        print(f"note: {note}")
    for setting in unequal:
        print(f"unequal: {setting}")
    if e.tuned:
        grid = ", ".join(f"{lr:g}" for lr in e.grid(args.scale))
        print(f"its learning rate is chosen from {grid} on validation loss")
    print_table(("", ""), _plan_rows(config, plan, args.data_dir))
    print(f"\nconfig {config_hash(config)[:12]}\n{config_to_yaml(config)}", end="")
    return 0


def _plan_rows(config: RunConfig, plan: Any, data_dir: str) -> list[tuple[str, str]]:
    from oelm.data.sources.open import describe_source

    rows = [("method", f"{config.method.name}: {config.method.purpose}")]
    if plan.parameters:
        p = plan.parameters
        rows.append(
            ("parameters", f"{p['total']:,} total, {p['trainable']:,} trainable, {p['frozen']:,} frozen")
        )
        rows.append(("frozen share", f"{100 * p['frozen'] / p['total']:.1f} % of all"))
        share = 100 * p["qk_trainable"] / max(p["qk_total"], 1)
        rows.append(("of Q/K", f"{p['qk_total']:,}, of which {p['qk_trainable']:,} train ({share:.1f} %)"))
    else:
        rows.append(("parameters", plan.parameters_note))
    rows.append(("data", describe_source(config.data.dataset, config.data.source, data_dir)))
    rows.append(("steps", plan.steps_text))
    rows.append(("tokens", plan.tokens_text))
    rows.append(("disk", f"{bytes_text(plan.disk_bytes)} at most" if plan.disk_bytes else "unknown"))
    rows.append(
        (
            "time",
            f"about {duration_text(plan.seconds)} ({plan.time_basis})" if plan.seconds else plan.time_basis,
        )
    )
    rows.append(("folder", str(plan.folder)))
    return rows


def _diff(args: argparse.Namespace) -> int:
    load_own(args)
    pair = [experiment(name).at(args.scale, data_dir=args.data_dir) for name in (args.first, args.second)]
    found = config_diff(*pair)
    if args.json:
        print_json({name: list(values) for name, values in found.items()})
        return 0
    if not found:
        print("nothing differs")
        return 0
    print_table(("field", pair[0].id, pair[1].id), [(n, *map(repr, values)) for n, values in found.items()])
    return 0


def _methods(args: argparse.Namespace) -> int:
    names: dict[str, list[str]] = {}
    for alias, name in ALIASES.items():
        names.setdefault(name, []).append(alias)
    if args.json:
        print_json({n: {**m.to_dict(), "aliases": names.get(n, [])} for n, m in methods().items()})
        return 0
    for name, method in methods().items():  # lines rather than columns: four of them fit no terminal
        typed = f" (also typed as {', '.join(names[name])})" if name in names else ""
        print(f"{name}{typed}\n  {method.purpose}")
        if method.controls:
            print(f"  controls for: {method.controls}")
        if method.control:
            print(f"  its own control: {method.control}")
        if method.reference:
            print(f"  from: {method.reference}")
    return 0
