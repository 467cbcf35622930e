"""Benchmarks against other tools: every arm trains the same architecture, and the page shows all of them."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import classification, corpus, folders, kernels, page, peers, regime, startup, step

from oelm import compiled
from oelm.bench import methods, worker
from oelm.bench.harness import Measured
from oelm.compiled import products
from oelm.models.gpt import GPT, gpt_config

WORK = methods.Workload("smoke", vocabulary=64, context=8, batch=2)


def measured(specs, plan, progress, timed=True):
    """Builds the arms here and takes one step of each; the times are made up.

    timed: whether the reference computation was timed
    """
    found = {}
    for number, spec in enumerate(specs):
        module = peers if spec["build"].startswith("benchmarks.peers") else methods
        arm = module.build(spec)
        arm.step()
        memory = {"peak_bytes": 1 << 20, "gradient_bytes": 0, "optimizer_bytes": 0} | arm.memory()
        reference = [[[1.0] * 2] * 2] * 3 if timed else []
        found[spec["arm"]] = Measured([[[1.0 + number] * 2] * 2] * 3, arm.facts, [memory], reference)
    return found


def test_all_peers_have_our_parameter_count_and_appear_on_the_page(monkeypatch):
    monkeypatch.setattr(step, "measure_alone", measured)
    monkeypatch.setattr(worker, "GEMM_SIZE", 8)
    bench = methods.MethodsBench(("baseline", "oelm-freeze", "orthogonal-init"), WORK)
    result = step.run(bench, peers.PEERS, progress=print)
    config = gpt_config("smoke", vocab_size=64, context=8)
    ours = sum(p.numel() for p in GPT(config).parameters())
    counts = {arm["name"]: arm["parameters"] for arm in result["arms"]}
    attention_biases = config.layers * 4 * config.width  # GPT-2 of transformers cannot do without
    assert counts["nanogpt"] == counts["baseline"] == ours
    assert counts["transformers"] == counts["trainer"] == ours + attention_biases
    text = "\n".join(page.step(result))
    for name in (*peers.PEERS, "baseline (again)"):
        assert name in text
    # the stand-in of `measured` needs 2 s for a step of oelm-freeze and 3 s for one of its control
    assert "`oelm-freeze` takes 0.67 [0.67, 0.67] of the time of its control `orthogonal-init`" in text
    assert page.ALONE in text
    assert page.REFERENCE in text


def test_methods_without_other_tools_take_turns(monkeypatch):
    monkeypatch.setattr(methods, "measure_together", partial(measured, timed=False))
    monkeypatch.setattr(worker, "GEMM_SIZE", 8)
    bench = methods.MethodsBench(("baseline", "oelm-freeze"), WORK)
    text = "\n".join(page.step(step.run(bench, (), progress=print)))
    assert page.TOGETHER in text
    assert page.REFERENCE not in text


def nanogpt_names(ours):
    """Our weights under the names of the nanoGPT peer, which has one fused qkv projection."""
    import torch

    names = {"tokens": "wte", "positions": "wpe", "norm1": "ln_1", "norm2": "ln_2", "attn.o": "c_proj"}
    names |= {"mlp.up": "up", "mlp.down": "down", "norm.": "ln_f."}
    found = {"lm_head.weight": ours["tokens.weight"]}
    for name, tensor in ours.items():
        if name.endswith("attn.q.weight"):
            parts = [ours[name.replace("attn.q", f"attn.{part}")] for part in "qkv"]
            found[name.replace("attn.q", "c_attn")] = torch.cat(parts)
        elif ".attn.k." not in name and ".attn.v." not in name:
            for old, new in names.items():
                name = name.replace(old, new)
            found[name] = tensor
    return found


def test_nanogpt_peer_computes_the_function_of_our_model():
    import torch

    config = gpt_config("smoke", vocab_size=64, context=8)
    ours, theirs = GPT(config, torch.Generator().manual_seed(0)).eval(), peers.NanoGPT(config).eval()
    theirs.load_state_dict(nanogpt_names(ours.state_dict()))
    ids = torch.randint(64, (2, 9), generator=torch.Generator().manual_seed(1))
    expected = ours.loss(ids[:, :-1], ids[:, 1:])
    targets = ids[:, 1:].contiguous()
    assert theirs(ids[:, :-1], targets).item() == pytest.approx(expected.item(), rel=1e-5)


def test_every_turn_of_classification_has_short_and_long_batches():
    turns = classification.spread(np.arange(100), turns=4, steps=4)
    assert len({number for turn in turns for number in turn}) == 16
    means = [np.mean(turn) for turn in turns]
    assert max(means) - min(means) < 5


def test_copied_run_folders_are_finished_runs_with_valid_checksums(tmp_path, in_process):
    from oelm.analysis.load import load_runs
    from oelm.cli.main import main

    origin = tmp_path / "origin"
    for name in ("GPT-01", "GPT-02"):
        assert main(["train", name, "--scale", "smoke", "--seed", "0", "--runs", str(origin)]) == 0
    folders.copy_runs(origin, tmp_path / "many", 6)
    loaded = load_runs(tmp_path / "many")
    assert len([run for run in loaded.runs if run.result]) == 6, [str(w) for w in loaded.warnings]
    assert {run.config.seed for run in loaded.runs} == {1, 2, 3}


def test_trainer_order_is_a_permutation_of_the_rows():
    order = classification._trainer_order(np.arange(40) % 7, rows=4, seed=0)
    assert sorted(order) == list(range(40))
    assert replace(classification.ClassificationBench(), rows=4).rows == 4


def test_regimes_are_compared_by_noise_and_cpu_time_and_recorded_runs_are_not_repeated(tmp_path):
    small = "model.name=smoke,data.max_length=16,data.eval_rows=12,data.train_rows=40,budget.steps=4"
    bench = regime.RegimeBench(
        (f"{small},budget.batch_size=2", f"{small},budget.batch_size=4"),
        ("GAP-TS-baseline-rope", "GAP-TS-oelm-freeze-rope"),
        (1, 2),
        "",
        str(tmp_path / "record.jsonl"),
    )
    said: list[str] = []
    result = regime.run(bench, said.append)
    assert len(said) == 8
    assert regime.run(bench, said.append) == result
    assert len(said) == 8
    for row in result["rows"]:
        assert row["seeds"] == [1, 2]
        assert row["weights"]["last"]["noise"] > 0
    assert len(regime.lines(result)) == 2 + 2 * 3


def test_a_corpus_of_numbered_documents_is_prepared_and_measured(tmp_path):
    paths = [tmp_path / f"{split}.jsonl" for split in ("train", "validation", "test")]
    for path in paths:
        path.write_text('{"text": "one story"}\n{"text": "another story"}\n')
    files = ",".join(map(str, paths))
    result = corpus.run(corpus.CorpusBench(f"file:{files}", (0,), workers=1), print)
    assert result["sizes"][0]["tokens"] > 3
    assert result["sizes"][0]["peak_bytes"] > 2**20
    title, section = page.SECTIONS[result["kind"]]
    assert title(result)
    assert "MiB" in section(result)[-1]


def test_the_performance_page_is_generated_from_the_results(tmp_path):
    root = Path(page.__file__).parents[1]
    made = page.make(root / "benchmarks" / "results", tmp_path / "performance.md")
    assert made == (root / "docs" / "performance.md").read_text(encoding="utf-8"), "run `make documents`"


@pytest.mark.skipif(compiled.library() is None, reason="oelm was installed without a C++ compiler")
def test_the_arms_of_the_kernels_benchmark_use_different_attention(monkeypatch):
    import torch

    counts = {kernels.OURS: 0, kernels.TORCH: 0}

    def counting(name, function):
        def call(*args, **kwargs):
            counts[name] += 1
            return function(*args, **kwargs)

        return call

    functional = torch.nn.functional
    monkeypatch.setattr(compiled, "attention", counting(kernels.OURS, compiled.attention))
    theirs = counting(kernels.TORCH, functional.scaled_dot_product_attention)
    monkeypatch.setattr(functional, "scaled_dot_product_attention", theirs)
    before = torch.get_num_threads()
    bench = kernels.KernelsBench((kernels.Case(replace(WORK, position="rope")),), rounds=2, steps=3)
    result = kernels.run(bench, print)
    assert torch.get_num_threads() == before
    layers = gpt_config("smoke").layers
    assert counts[kernels.OURS] >= 2 * 4 * layers
    assert counts[kernels.TORCH] >= 2 * 4 * layers
    (model,) = result["models"]
    arms = {*counts, kernels.TORCHS_PRODUCTS} if products.available() else {*counts}
    assert {arm: np.shape(turns) for arm, turns in model["seconds"].items()} == dict.fromkeys(arms, (2, 3))
    ours, theirs = (np.log(np.median(model["seconds"][arm], axis=1)) for arm in counts)
    assert model["ratios"][kernels.TORCH]["value"] == pytest.approx(np.exp(np.mean(ours - theirs)))
    text = "\n".join(page.SECTIONS[result["kind"]][1](result))
    assert "smoke, rotary positions, 2 x 8 tokens" in text
    assert page.KERNELS in text


def test_startup_is_on_the_page():
    run = {"id": "GPT-02", "scale": "smoke", "way": "forked", "first": 4.0, "further": 0.7}
    assert page.SECTIONS["startup"][1]({"runs": [run]}) == startup.lines({"runs": [run]})
