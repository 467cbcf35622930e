"""`oelm doctor`: check this machine and the given experiments before hours are spent on training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from oelm.cli.options import Changes, Json, MachineOptions, OneScale, Runs, Seeds, Selection
from oelm.cli.output import print, print_json
from oelm.config.run_config import Machine, RunConfig
from oelm.experiments.request import Request
from oelm.runs.states import EXIT_INTERRUPTED

if TYPE_CHECKING:
    from oelm.experiments.resume.check import Case, Interruption, Reference

_RESUME_CHECK_ID = "GPT-02"  # for --resume without an experiment; its smoke scale needs no download


def doctor(
    *ids: str,
    selection: Selection = Selection(),
    resume: bool = False,
    preempt: bool = False,
    seeds: Seeds = (),
    scale: OneScale = "full",
    changes: Changes = Changes(),
    runs: Runs = "runs",
    machine: MachineOptions = MachineOptions(),
    json: Json = False,
) -> int:
    """Check this machine and the given experiments; return exit code 1 if there is a problem.

    Parameters
    ----------
    ids
        IDs of experiments to check (`oelm list`), or study files such as my.yaml.
    resume
        Kill and resume short runs on the disk of --runs, and check that they write the same bytes as an
        uninterrupted run. Without an experiment, GPT-02 at smoke scale is used.
    preempt
        Like --resume, but interrupt the runs with the signals that schedulers send (SIGTERM, SIGUSR1, ...).
    """
    named = bool(ids) or not selection.is_empty()
    if (resume or preempt) and not named:
        ids, scale, named = (_RESUME_CHECK_ID,), "smoke", True
    request = Request(
        selection.experiments(ids) if named else [],
        (scale,),
        seeds,
        changes.values(),
        changes.study_name,
        data_dir=machine.data_dir,
    )
    if resume or preempt:
        from oelm.experiments.resume.check import KILLS, PREEMPTIONS

        interruptions = (KILLS if resume else ()) + (PREEMPTIONS if preempt else ())
        configs = [arm.runs[0] for arm in request.arms()]
        chosen = tuple(dict.fromkeys(interruptions))
        return _check_resume(configs, chosen, runs, machine.machine(), json, preempted=preempt)
    return _examine(request, runs, machine.machine(), json)


def _examine(request: Request, runs: str, machine: Machine, json: bool) -> int:
    from oelm.experiments.doctor import examine

    findings = []
    for finding in examine(request.arms(), runs, machine):
        findings.append(finding)
        if json:
            continue
        print(f"{'ok' if finding.ok else 'problem':8} {finding.subject}: {finding.text}", flush=True)
        for note in finding.notes:
            print(f"{'':8} note: {note}", flush=True)
        if finding.remedy:
            print(f"{'':8} what to do: {finding.remedy}", flush=True)
    problems = [f for f in findings if not f.ok]
    if json:
        print_json({"ok": not problems, "findings": [f.to_dict() for f in findings]})
    else:
        print(f"\n{len(problems)} problems" if problems else "\nno problems found")
    return 1 if problems else 0


def _check_resume(
    configs: Sequence[RunConfig],
    interruptions: Sequence[Interruption],
    runs: str,
    machine: Machine,
    json: bool,
    *,
    preempted: bool,
) -> int:
    """Interrupt and resume short runs of each config; return exit code 1 if their files differ, otherwise 0.

    The files are compared with those of an uninterrupted run.

    preempted: whether the interruptions imitate a scheduler; then also print how long the runs took to stop
    """
    from oelm.experiments.resume.check import resume_check

    reports = []
    for config in configs:
        with resume_check(config, runs, machine) as check:
            reference = check.reference()
            if not json:
                _print_reference(config, check.place, reference)
            cases = []
            for interruption in interruptions:
                cases.append(check.case(interruption))
                if not json:
                    _print_case(cases[-1])
        if not json:
            print(_conclusion(reference, cases))
            if preempted and all(case.ok for case in cases):
                print(_time_to_stop(cases))
        reports.append(
            {
                "id": config.id,
                "scale": config.scale,
                "ok": all(case.ok for case in cases),
                "file_system": str(check.place.parent),
                "reference": reference.to_dict(),
                "cases": [case.to_dict() for case in cases],
            }
        )
    ok = all(report["ok"] for report in reports)
    if json:
        print_json({"ok": ok, "checks": reports})
    return 0 if ok else 1


def _time_to_stop(cases: Sequence[Case]) -> str:
    """Return a sentence that compares the longest time that a run took to stop with the time SLURM allows."""
    from oelm.experiments.launch.slurm_options import SlurmOptions

    slowest = max((case.stop_seconds or 0.0 for case in cases if case.interruption.graceful), default=0.0)
    grace = SlurmOptions().grace_seconds
    enough = "" if slowest < grace else ", which is too short: ask your cluster's staff for a longer one"
    return (
        f"after a signal, a run wrote its checkpoint and exited with code {EXIT_INTERRUPTED}, which asks for "
        f"requeueing, within {slowest:.1f} s; `oelm run --on slurm` asks SLURM for "
        f"{grace} s{enough}\n"
    )


def _print_reference(config: RunConfig, place: Path, reference: Reference) -> None:
    from oelm.experiments.resume.check import SPREAD_FACTOR, STEPS

    print(
        f"{config.id} ({config.scale}) on {reference.device} in {reference.precision}, files in "
        f"{place.parent}: a run of {STEPS} steps takes {reference.seconds:.0f} s"
    )
    if reference.deterministic:
        print("two uninterrupted runs are equal byte by byte: this device is deterministic")
    else:
        print("two uninterrupted runs differ: this device is not deterministic")
        for difference in reference.spread:
            print(f"  {difference}")
        print(
            "an interrupted run passes if it differs from an uninterrupted one by no more than "
            f"{SPREAD_FACTOR:g} times these differences"
        )
    print(f"\n{'interrupted by':24}{'ended after':>12}{'continued from':>18}   result", flush=True)


def _print_case(case: Case) -> None:
    seconds = "-" if case.stop_seconds is None else f"{case.stop_seconds:.1f} s"
    origin = {None: "-", 0: "the beginning"}.get(case.resumed_after, f"step {case.resumed_after}")
    result = case.result if case.result != "failed" else f"failed: {case.problem}"
    print(f"{case.interruption!s:24}{seconds:>12}{origin:>18}   {result}", flush=True)
    for difference in case.differences:
        print(f"{'':57}{difference}", flush=True)


def _conclusion(reference: Reference, cases: Sequence[Case]) -> str:
    from oelm.experiments.resume.check import SPREAD_FACTOR

    bad = sum(not case.ok for case in cases)
    if bad:
        return (
            f"\nnot proven: {bad} of {len(cases)} interruptions change the results of the run. "
            "Please report this table as an issue.\n"
        )
    if reference.deterministic:
        return (
            f"\nproven: after each of {len(cases)} interruptions, the metrics, results, best model and last "
            "checkpoint are equal byte by byte to those of an uninterrupted run\n"
        )
    return (
        f"\nproven as far as this device allows: after each of {len(cases)} interruptions, a run differs "
        f"from an uninterrupted one by no more than {SPREAD_FACTOR:g} times what two uninterrupted runs "
        "differ by\n"
    )
