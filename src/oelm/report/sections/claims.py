"""Generate docs/claims.md: the claims of the original study, checked by arithmetic and by our own runs.

The catalogue of experiments has the perplexities and accuracies of the original study; its other numbers are
quoted in this module. Module `arithmetic` has the calculations. Our own results come from run folders.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from oelm.analysis.analyze import Analysis
from oelm.analysis.compare import Comparison
from oelm.data.catalogue import dataset
from oelm.experiments.catalogue import experiments
from oelm.printable import printable
from oelm.report import numbers
from oelm.report.sections import arithmetic
from oelm.report.sentences import sentences
from oelm.units import duration_text

NO_RUNS = "We have no finished run for this claim yet."
MAX_RESULTS = 12  # maximum number of comparisons of our runs that are listed per claim
QUOTED_GAIN = '"6.0 % better"'
OPENWEBTEXT_REPORTED, OPENWEBTEXT_FILES = 40e6, 99e6  # tokens: in the original study's text, in its files
FINE_TUNED = {"xnli": "XNLI-02", "sst2": "SST-2-02", "mnli": "MNLI-02"}


@dataclass(frozen=True)
class Claim:
    """A claim of the original study with our checks of it."""

    title: str
    reported: str
    checks: Sequence[str]
    results: Sequence[str] | None = ()  # results of our runs; None if no run could check the claim
    checks_title: str = "Arithmetic."


def claims(analysis: Analysis | None) -> list[Claim]:
    """Return all claims in the order of the original study; if `analysis` is None, without our results."""
    return [
        _parameters(analysis),
        _speed(analysis),
        _target(analysis),
        _orthogonality(analysis),
        _learning_rates(analysis),
        _fine_tuning(analysis),
        _phase_four(analysis),
        _corpus_sizes(analysis),
        _run_times(),
        _operations(),
    ]


def _parameters(analysis: Analysis | None) -> Claim:
    shape = arithmetic.GPTShape()
    share = 100 * shape.qk / shape.parameters
    bert = 100 * arithmetic.BERT_FROZEN / arithmetic.BERT_TOTAL
    full, frozen = (b / arithmetic.MIB for b in (shape.checkpoint_bytes, shape.frozen_checkpoint_bytes))
    results = []
    for arm in analysis.arms if analysis else ():
        counts = arm.finished[0].result.parameters if arm.finished and arm.finished[0].result else None
        if counts and arm.config.scale == "full" and arm.config.model.name == "medium-512":
            results.append(f"{arm.id} ({arm.name}): {counts.total:,} parameters, {counts.frozen:,} frozen.")
    return Claim(
        "Parameters of GPT Medium-512",
        "About 82M parameters, 71M trainable, 12.9 % saved.",
        (
            f"The described architecture has {shape.parameters:,} parameters. Q and K are {shape.qk:,} of "
            f"them, {share:.1f} %.",
            f"12.9 % is the share of Q and K in BERT-base with three classes: {arithmetic.BERT_FROZEN:,} of "
            f"{arithmetic.BERT_TOTAL:,}, {bert:.1f} %.",
            "The checkpoints of the original study agree with the smaller count: weights and two Adam "
            f"moments in fp32 take {full:.0f} MiB, or {frozen:.0f} MiB without moments for Q/K. It stored "
            "514 and 490 MiB.",
        ),
        results,
    )


_ORDER = {"turns": "the arms took turns", "processes": "one process at a time"}


def _speed(analysis: Analysis | None) -> Claim:
    bound = 100 * arithmetic.weight_gradient_bound()
    return Claim(
        "Training speed",
        "57 % faster on BERT; on GPT, 0.7 % less time per step.",
        (
            f"Freezing saves only the weight gradients of Q and K: at most 4/72 = {bound:.1f} % of a block's "
            f"matmul FLOPs, a speedup of at most {1 / (1 - bound / 100):.3f}x. 57 % is ten times this bound.",
            "The timer of the original study counted one of two micro-batches under gradient accumulation.",
            "A speed comparison needs repeated measurements in random order, equal batches and full "
            "optimizer steps.",
        ),
        [
            f"{b.method} on {b.model}: step time {b.ratio:.3f} of the baseline's (95 % confidence interval "
            f"{b.interval[0]:.3f} to {b.interval[1]:.3f}), {_ORDER[b.order]} ({b.source.name})."
            for b in (analysis.benchmarks if analysis else ())
        ],
    )


def _target(analysis: Analysis | None) -> Claim:
    checks = []
    for id, e in experiments().items():
        base = experiments().get(e.baseline)
        if not e.reported or e.reported.metric != "ppl" or base is None or base.reported is None:
            continue
        gap = math.log(e.reported.value / base.reported.value)
        verdict = "misses" if gap > math.log(1.05) else "meets"
        checks.append(
            f"{id} ({e.method_name}): {e.reported.value:g} against {base.reported.value:g}, "
            f"{numbers.change(gap)}. By the original study's own figures (one seed, no interval) this "
            f"{verdict} the 5 % target."
        )
    return Claim(
        "At most 5 % loss in language modelling",
        "The target: a perplexity of at most 1.05 times the baseline's.",
        checks,
        _results(analysis, lambda c: c.kind == "baseline" and c.metric == "ppl" and _as_in_the_study(c)),
    )


def _orthogonality(analysis: Analysis | None) -> Claim:
    norm, ratio = arithmetic.row_norm(0.02, 512), arithmetic.logit_ratio(0.02, 512)
    freeze, random = _reported("GPT-02"), _reported("GPT-03")
    more, less = 100 * (random / freeze - 1), 100 * (1 - freeze / random)
    return Claim(
        "Orthogonality helps",
        f"Frozen orthogonal rows are better than frozen random rows: {freeze:g} against {random:g}, "
        f"{QUOTED_GAIN}.",
        (
            f"{random:g} is {more:.1f} % above {freeze:g}; as a reduction, {freeze:g} is {less:.1f} % below "
            f"{random:g}.",
            f"Orthonormal rows have norm 1, rows of N(0, 0.02) at width 512 have norm {norm:.2f}, so the "
            f"attention logits differ by a factor of {ratio:.1f}. Orthogonality and scale changed together, "
            "so the comparison cannot separate them.",
            "The missing control is a frozen Gaussian of the same scale, N(0, 1/d).",
        ),
        _results(analysis, lambda c: c.kind == "orthogonality"),
    )


def _learning_rates(analysis: Analysis | None) -> Claim:
    checks = []
    for id, base in (("GPT-02", "GPT-01"), ("XNLI-02", "XNLI-01")):
        a, b = experiments()[id].optim.lr, experiments()[base].optim.lr
        checks.append(
            f"{id} has learning rate {a:g}, its baseline {base} has {b:g}: a factor of {a / b:.1f}."
        )
    checks.append(
        "The baseline was not tuned, each arm had one seed, and the best of several arms was chosen on the "
        "reported split."
    )
    tuned = _results(
        analysis,
        lambda c: (
            c.kind == "baseline"
            and c.arm.method.name in ("oelm-freeze", "oelm-random")
            and _as_in_the_study(c)
            and bool(c.arm.config.tune.grid)
            and c.arm.config.tune.grid == c.reference.config.tune.grid
        ),
    )
    return Claim(
        "The arms were comparable",
        "Frozen arms and baselines are compared directly; the table of settings gives their learning rates.",
        checks,
        ["With the same learning-rate grid for both arms:", *tuned] if tuned else (),
    )


def _fine_tuning(analysis: Analysis | None) -> Claim:
    reported, checks = [], []
    for id in FINE_TUNED.values():
        e = experiments()[id]
        a, b = _reported(id), _reported(e.baseline)
        reported.append(f"{e.data.dataset} {a:g} against {b:g}")
        splits = {split: n for split, n in dataset(e.data.dataset).sizes.items() if split != "train"}
        noise = ", ".join(
            f"{arithmetic.accuracy_noise(a, b, n):.1f} on {split} ({n:,} rows)" for split, n in splits.items()
        )
        checks.append(
            f"{id}: {numbers.points(a - b)} points with one seed. The standard error from the test set "
            f"alone, in points: {noise}."
        )
    checks.append(
        "The code orthonormalised the pretrained rows instead of random ones, and changed Q/K of the "
        "baseline too, so neither arm is the one described. Freezing the pretrained Q/K unchanged was not "
        "tried."
    )
    return Claim(
        "Frozen Q/K in BERT fine-tuning",
        f"Accuracy of OELM-Freeze against the baseline: {'; '.join(reported)}.",
        checks,
        _results(
            analysis,
            lambda c: (
                c.kind == "baseline"
                and c.arm.config.model.family == "hf"
                and c.arm.config.data.dataset in FINE_TUNED
                and c.arm.freezes
            ),
        ),
    )


def _reported(id: str) -> float:
    figure = experiments()[id].reported
    if figure is None:
        raise ValueError(f"the catalogue has no number from the original study for {id}")
    return figure.value


def _phase_four(analysis: Analysis | None) -> Claim:
    many, few = (arithmetic.accuracy_noise(85, 85, rows) for rows in (25_000, 1000))
    return Claim(
        "Task type or architecture (phase 4)",
        "Planned: GPT classifiers from scratch. If OELM loses at most 2 points to the baseline, scenario A; "
        "more than 5 points, B; between them, C.",
        (
            "A rule on point estimates mistakes noise for a scenario: at 85 % accuracy, the test set alone "
            f"has a standard error of {many:.2f} points with IMDB's 25,000 rows, and {few:.1f} points with "
            "1,000 rows. We decide on the confidence interval, or leave the scenario undecided.",
        ),
        _results(analysis, lambda c: c.scenario is not None),
    )


def _corpus_sizes(analysis: Analysis | None) -> Claim:
    passes = [
        f"{name}: about {tokens / 1e6:.0f}M tokens, {arithmetic.epochs(steps, 8, 512, tokens):.1f} "
        f"passes in {steps:,} steps."
        for name, tokens, steps in (
            ("TinyStories", 470e6, 100_000),
            ("OpenWebText as reported", OPENWEBTEXT_REPORTED, 100_000),
            ("OpenWebText as in the files of the public scripts", OPENWEBTEXT_FILES, 100_000),
            ("WikiText-103", 118e6, 200_000),
        )
    ]
    stories = dataset("tinystories").sizes["train"]
    mnli, imdb = dataset("mnli").sizes, dataset("imdb").sizes
    return Claim(
        "More data, more loss",
        "The gap grows with the size of the corpus; TinyStories has 2M tokens, OpenWebText 40M.",
        (
            f"{stories:,} is the number of stories in TinyStories. In GPT-2 tokens:",
            *passes,
            "TinyStories has the most tokens and the smallest gap, and the number of passes differs widely, "
            "so the conclusion does not follow.",
            f"Other sizes: IMDB {imdb['train']:,} train and {imdb['test']:,} test; MNLI validation "
            f"{mnli['validation_matched']:,} matched and {mnli['validation_mismatched']:,} mismatched.",
        ),
        _results(
            analysis,
            lambda c: (
                c.kind == "baseline"
                and c.metric == "ppl"
                and c.arm.method.name == "oelm-freeze"
                and _as_in_the_study(c)
            ),
        ),
    )


def _run_times() -> Claim:
    stated, seconds = 4 * 3600 + 31 * 60, 0.184 * 100_000
    other = (9 * 3600 + 10 * 60) / 100_000
    return Claim(
        "Run times",
        "0.184 s per step and 4 h 31 min for 100K steps; 9 h 10 min for another 100K.",
        (
            f"0.184 s x 100,000 is {duration_text(seconds)}, not {duration_text(stated)}.",
            f"9 h 10 min over 100,000 steps is {other:.2f} s per step.",
        ),
        results=None,
    )


def _operations() -> Claim:
    return Claim(
        "Operational problems",
        "A disk full of checkpoints; resumes that restarted the epoch and raised the learning rate again; a "
        "label of -1 found after training; time-outs at 89 % of the last epoch; numbers copied by hand that "
        "no longer matched.",
        (
            "Checkpoints: a run has two while it trains and deletes them when it has finished, and "
            "`oelm doctor` checks the disk first.",
            "Resumes: data order, learning-rate schedule and random state continue at the exact step.",
            "Labels: `oelm doctor` and `oelm data check mnli` read every row before training.",
            "Time-outs: a run saves a checkpoint before its time limit and exits with code 75; the same "
            "command continues it.",
            "Numbers: every table, and this page, is generated from the run folders.",
        ),
        results=None,
        checks_title="What this software does.",
    )


def _as_in_the_study(c: Comparison) -> bool:
    """Return whether the claims of the original study are about arms (compared methods) like this one.

    Such an arm freezes Q/K, has no trainable extras, and its model has learned position embeddings.
    """
    learned = c.arm.config.model.position == "learned"
    return c.arm.freezes and learned and not c.arm.method.has_extras and not c.arm.probes


def _results(analysis: Analysis | None, wanted: Callable[[Comparison], bool]) -> list[str]:
    """Return sentences about the comparisons of our runs for which `wanted` is true."""
    chosen = [c for c in analysis.comparisons.made if wanted(c)] if analysis else []
    lines = [
        _without_markup(f"{c.group}, {c.arm.config.scale} scale: {' '.join(map(str, sentences(c)))}")
        for c in chosen[:MAX_RESULTS]
    ]
    if len(chosen) > MAX_RESULTS:
        lines.append(f"… and {len(chosen) - MAX_RESULTS} more (`oelm analyze`).")
    return lines


def _without_markup(text: str) -> str:
    """Return the text with HTML and links escaped, because a name in a config may contain them."""
    return printable(text).replace("<", "&lt;").replace("](", "]\\(")


def claims_page(analysis: Analysis | None, command: str) -> str:
    """Return the Markdown page with all claims and our checks.

    command: the command that generates the page, to be shown on it
    """
    parts = [
        "# The original study's claims, checked",
        f"Generated by `{command}`; edit the code, not this page. The original study is an earlier report on "
        "frozen Q/K in BERT and GPT. *Reported* is what it printed. *Arithmetic* is what its own figures "
        "imply. *Our runs* are results of run folders and benchmarks of this software, at the scale they "
        "name.",
    ]
    for i, claim in enumerate(claims(analysis), 1):
        parts.append(f"## {i}. {claim.title}")
        parts.append(f"**Reported.** {claim.reported}")
        parts.append(f"**{claim.checks_title}**\n\n" + "\n".join(f"- {line}" for line in claim.checks))
        if claim.results is not None:
            parts.append("**Our runs.**\n\n" + "\n".join(f"- {line}" for line in claim.results or [NO_RUNS]))
    return "\n\n".join(parts) + "\n"
