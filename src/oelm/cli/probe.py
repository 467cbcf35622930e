"""`oelm probe`: analyse the queries and keys of a trained language model."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from oelm.cli.model import OneRun
from oelm.cli.options import DataDir, Json
from oelm.cli.output import print, print_json, print_table
from oelm.cli.values import PositiveCount
from oelm.errors import OelmError, UsageError
from oelm.files.atomic import write_text
from oelm.runs.folder import RunFolder

RANKS = (0, 1, 2, 4, 8, 16, 32)
DISTANCES = 8


def probe(
    *experiments: str,
    rows: PositiveCount = 64,
    figure: Path | None = None,
    data_dir: DataDir = "",
    which: OneRun = OneRun(),
    json: Json = False,
) -> None:
    """Print how constant q and k are over tokens, and attention by distance.

    Also print how the perplexity rises if the learned change of W_Q and W_K is cut to a low rank.

    Parameters
    ----------
    experiments
        Run folders, or IDs of experiments.
    rows
        Rows of validation text to use.
    figure
        SVG file for a figure of all runs; runs of the same method are averaged.
    """
    if not experiments:
        raise UsageError("no run given: name a run folder or an experiment, e.g. GAP-TS-baseline-rope")
    folders = [which.folder(run) for run in experiments]
    for folder in folders:
        if (task := folder.config().task) != "lm":
            raise OelmError(
                f"{folder.path} cannot be probed: its task is {task}, and only language models (task lm) can "
                "be probed"
            )
    found = []
    for folder in folders:
        found.append(_measure(folder, rows, data_dir))
        if not json:
            _print(found[-1])
    if json:
        print_json(found[0] if len(found) == 1 else found)
    if figure is not None:
        from oelm.report.figures.probes import probe_figure

        write_text(figure, probe_figure(found, figure.stem).svg())


def _print(facts: dict[str, Any]) -> None:
    print(f"{facts['run']}, {facts['tokens']:,} tokens of validation text, perplexity {facts['ppl']:.4g}")
    print("\nShare of the constant part (mean over tokens) in the energy of q and k, in %:")
    shares = [(i, *(f"{100 * row[role]:.1f}" for role in "qk")) for i, row in enumerate(facts["constant"], 1)]
    print_table(("layer", "q", "k"), shares, indent="  ")
    print("\nAttention weight by distance in tokens, mean over heads, in %:")
    weights = [(i, *(f"{100 * w:.1f}" for w in row)) for i, row in enumerate(facts["by_distance"], 1)]
    print_table(("layer", *map(str, range(DISTANCES))), weights, indent="  ")
    if facts["truncation"]:
        print("\nPerplexity if the learned change of W in all layers is cut to a rank, change in %:")
        cells = [(rank, f"{100 * (math.exp(d) - 1):+.2f}") for rank, d in facts["truncation"].items()]
        print_table(("rank", "change"), cells, indent="  ")
        print("\nThe same for one layer at a time, cut to rank 0:")
        alone = [(i, f"{100 * (math.exp(d) - 1):+.2f}") for i, d in enumerate(facts["undone"], 1)]
        print_table(("layer", "change"), alone, indent="  ")


def _measure(folder: RunFolder, rows: int, data_dir: str) -> dict[str, Any]:
    """Return what `oelm probe` prints about a trained run.

    "truncation" is {rank: increase of the loss if the learned change of W_Q and W_K is cut to that rank}.
    "undone" is, for each layer, the increase if W_Q and W_K of only this layer are set back to their initial
    values. Both are in nats per token.
    """
    from itertools import islice

    import torch

    from oelm.config.run_config import Machine
    from oelm.methods.apply import apply
    from oelm.methods.saving.load import load
    from oelm.models.gpt import GPT
    from oelm.training.measure.probe import attention_by_distance, constant_share, truncation
    from oelm.training.prepare import prepare

    config = folder.config()
    model = load(folder.best)
    prepared = prepare(config, Machine(data_dir=data_dir))
    held = folder.manifest()
    if held is not None and held.data_identity != prepared.identity:
        raise OelmError(
            f"{folder.path} cannot be probed: its data or tokenizer ({prepared.data_facts.origin}) has "
            "changed since the run; restore the data, or correct --data-dir"
        )
    initial = prepared.model
    assert isinstance(model, GPT)
    assert isinstance(initial, GPT)
    apply(initial, config.method, seed=config.seed)
    model.eval()
    batches = list(islice(prepared.task.eval_batches("validation", 8), -(-rows // 8)))
    tokens = sum(batch.weight for batch in batches)

    @torch.no_grad()
    def loss() -> float:
        return sum(float(prepared.task.loss(model, batch.tensors)) for batch in batches) / tokens

    ids = torch.cat([batch.tensors["ids"] for batch in batches if batch.length == batches[0].length])
    whole = loss()
    cut: dict[int, float] = {}
    undone: list[float] = []
    if config.method.trains_qk:
        most = min(model.config.width, max(RANKS))
        found = truncation(model, initial, loss, [rank for rank in RANKS if rank <= most])
        cut = {rank: value - whole for rank, value in found.items()}
        for layer in range(model.config.layers):
            undone.append(truncation(model, initial, loss, [0], [layer])[0] - whole)
    return {
        "run": str(folder.path),
        "method": config.method.name,
        "tokens": tokens,
        "ppl": math.exp(whole),
        "constant": constant_share(model, ids),
        "by_distance": [w.mean(0).tolist() for w in attention_by_distance(model, ids, DISTANCES)],
        "truncation": cut,
        "undone": undone,
    }
