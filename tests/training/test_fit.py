"""Complete runs at smoke scale, and what is in their folders."""

from __future__ import annotations

import importlib.machinery
import json
import logging
import math
import sys
import types
from dataclasses import replace
from functools import partialmethod
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import oelm
from oelm.data.sources.open import open_corpus
from oelm.data.tokenize.tokenizers import Tokenizer, load_tokenizer
from oelm.errors import OelmError, UsageError
from oelm.models.gpt import GPT
from oelm.runs.folder import RunFolder
from oelm.runs.schema import PrecisionFacts, to_json
from oelm.training.build_model import build_model
from oelm.training.checkpoints.file import load_checkpoint
from oelm.training.fit import fit
from oelm.training.prepare import _noise, prepare
from oelm.training.tasks.classification import class_logits
from oelm.training.tasks.lm import LanguageModelling
from oelm.training.tasks.task import Evaluation


def rows(folder, kind):
    return [row.to_json() for row in RunFolder(folder).metrics(kind)]


def test_language_model_run_leaves_every_file(tmp_path, machine, make):
    config = make("lm")
    outcome = fit(config, tmp_path, machine)
    assert (outcome.state, outcome.exit_code) == ("finished", 0)
    folder = RunFolder(tmp_path)
    assert folder.config() == config
    results, manifest, status = folder.results(), folder.manifest(), folder.status()
    assert results.metric == "ppl"
    assert results.test.ppl == pytest.approx(math.exp(results.test.loss))
    assert results.steps == 12
    assert results.tokens_seen == 12 * 4 * 16
    assert results.parameters.frozen == results.parameters.qk_total == 4096
    assert results.fairness.batch_rows == 4
    assert manifest.precision == PrecisionFacts("fp32", "the default on cpu")
    assert manifest.data.fingerprints.keys() == {"train", "validation", "test"}
    assert manifest.tokenizer.vocab_size == 300
    assert manifest.disk_bytes_planned > folder.latest.stat().st_size
    assert status.state == "finished"
    assert status.step == status.total_steps == 12
    assert [r["step"] for r in rows(tmp_path, "train")] == [3, 6, 9, 12]
    assert [r["step"] for r in rows(tmp_path, "validation")] == [4, 8, 12]
    assert [len(r["layers"]) for r in rows(tmp_path, "attention")] == [2, 2, 2]
    best = min(rows(tmp_path, "validation"), key=lambda r: r["loss"])
    assert results.validation.loss == best["loss"]
    assert results.validation.step == best["step"]
    audits = folder.freeze_audit()
    assert audits.start.ok
    assert audits.end.ok
    timing = folder.timing()
    assert timing.num_steps_measured == 9
    assert 0 < timing.predicted_saving < 4 / 72
    memory = np.fromfile(tmp_path / "step_memory.bin", "<f8")  # measured with each row of the training loss
    assert (np.flatnonzero(memory) + 1).tolist() == [3, 6, 9, 12]
    assert 0 < memory.max() <= timing.peak_memory_bytes
    assert "disk: at most" in folder.log_file.read_text(encoding="utf-8")
    # Files that must be equal after a resume contain no times.
    assert not {"time", "seconds", "host"} & set(to_json(results))


def test_the_best_folder_can_be_loaded_without_the_run(tmp_path, machine, make):
    fit(make("lm"), tmp_path / "run", machine)
    (tmp_path / "run" / "best").rename(tmp_path / "elsewhere")
    model = oelm.load(tmp_path / "elsewhere")
    tokenizer = Tokenizer.load(tmp_path / "elsewhere")
    assert isinstance(model, GPT)
    assert oelm.audit(model).ok
    assert tokenizer.decode(tokenizer.encode("Once upon a time")) == "Once upon a time"


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["gpt-cls", "bert", "t5-cls", "bart-cls"])
def test_classification_runs(tmp_path, machine, make, shape):
    config = make(shape, budget={"accumulation": 2, "steps": 0, "epochs": 2, "eval_every": 0})
    assert fit(config, tmp_path, machine).state == "finished"
    folder = RunFolder(tmp_path)
    results, predictions = folder.results(), folder.predictions()
    assert results.metric == "accuracy"
    assert results.steps == 10  # 2 epochs of 40 rows, 8 rows per step
    right = [a == b for a, b in zip(predictions.labels, predictions.predicted, strict=True)]
    assert results.test.accuracy == sum(right) / len(right)
    assert results.test.n == len(right) == 6
    assert [r["step"] for r in rows(tmp_path, "validation")] == [5, 10]  # once per epoch


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["t5", "bart"])
def test_denoising_runs(tmp_path, machine, make, shape):
    assert fit(make(shape, budget={"steps": 2}), tmp_path, machine).state == "finished"
    assert RunFolder(tmp_path).results().test.ppl > 1
    assert_losses_add_up(tmp_path)


def assert_losses_add_up(folder: Path) -> int:
    """Compare test_losses.json with results.json; return the number of documents or blocks."""
    results, losses = RunFolder(folder).results(), RunFolder(folder).test_losses()
    assert len(losses.tokens) == len(losses.losses)
    assert sum(losses.tokens) == results.test.n
    assert sum(losses.losses) == pytest.approx(
        results.test.n * results.test.loss, abs=1e-3 * len(losses.losses)
    )
    return len(losses.tokens)


@pytest.mark.parametrize("documents", [4, 20])
def test_the_test_loss_is_kept_per_document_or_per_block_if_documents_are_few(
    tmp_path, machine, make, documents
):
    config = make("lm", data={"eval_rows": documents}, budget={"steps": 2})
    assert fit(config, tmp_path, machine).state == "finished"
    parts = assert_losses_add_up(tmp_path)
    if documents == 20:
        assert parts == documents
        assert not RunFolder(tmp_path).damage()
        stored = json.loads((tmp_path / "checksums.json").read_text(encoding="utf-8"))
        assert "test_losses.json" in stored["files"]
    else:
        assert parts == -(-RunFolder(tmp_path).results().test.n // config.data.max_length)


@pytest.mark.parametrize("shape", ["lm", "gpt-cls"])
def test_accumulating_two_batches_of_8_equals_one_batch_of_16(tmp_path, machine, make, shape):
    losses = []
    for batch, accumulation in ((8, 2), (16, 1)):
        budget = {"batch_size": batch, "accumulation": accumulation, "steps": 6, "log_every": 1}
        config = make(shape, model={"dropout": 0.0}, budget=budget)
        fit(config, tmp_path / str(batch), machine)
        losses.append([r["loss"] for r in rows(tmp_path / str(batch), "train")])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_a_folder_with_another_config_is_refused_with_the_differences(tmp_path, machine, make):
    fit(make("lm", budget={"steps": 2}), tmp_path, machine)
    before = (tmp_path / "status.json").read_bytes()
    with pytest.raises(UsageError, match=r"budget\.steps: 2 -> 3"):
        fit(make("lm", budget={"steps": 3}), tmp_path, machine)
    assert (tmp_path / "status.json").read_bytes() == before


def test_the_test_split_is_scored_with_the_best_weights_not_the_last(tmp_path, machine, make, monkeypatch):
    """With only the first validation as the best, a longer run has the same results as a shorter one."""
    monkeypatch.setattr(Evaluation, "better_than", lambda evaluation, best: best is None)
    results, last = {}, {}
    for steps in (4, 12):
        config = make("lm", "oelm-plus", optim={"schedule": "constant"}, budget={"steps": steps})
        fit(config, tmp_path / str(steps), machine)
        results[steps] = RunFolder(tmp_path / str(steps)).results()
        last[steps] = load_checkpoint(tmp_path / str(steps) / "latest.pt")["model"]["tokens.weight"]
    assert not torch.equal(last[4], last[12])
    assert results[4].test == results[12].test
    assert results[4].validation == results[12].validation


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "name", "steps", "backend"),
    [
        ("lm", "oelm-plus", 2, "aot_eager"),  # also traces the backward pass
        ("gpt-cls", "oelm-gradual", 4, "eager"),  # unfreezes a layer, so the model is traced again
    ],
)
def test_a_compiled_run_has_the_losses_of_a_plain_one(
    tmp_path, machine, make, monkeypatch, shape, name, steps, backend
):
    """Traced as by torch.compile, without the slow code generation."""
    monkeypatch.setattr(torch.nn.Module, "compile", partialmethod(torch.nn.Module.compile, backend=backend))
    config = make(
        shape,
        name,
        model={"dropout": 0.0, "position": "rope"},
        budget={"steps": steps, "log_every": 1},
    )
    losses = []
    for compiled in (False, True):
        folder = tmp_path / str(compiled)
        assert fit(replace(config, compile=compiled), folder, machine).state == "finished"
        losses.append([row["loss"] for row in rows(folder, "train")])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_finished_run_is_left_alone(tmp_path, machine, make):
    config = make("lm", budget={"steps": 2})
    fit(config, tmp_path, machine)
    before = {p.name: p.stat().st_mtime_ns for p in tmp_path.iterdir()}
    outcome = fit(config, tmp_path, machine)
    assert outcome.state == "finished"
    assert {p.name: p.stat().st_mtime_ns for p in tmp_path.iterdir()} == before


def test_tuning_trial_never_sees_the_test_split(tmp_path, machine, make, monkeypatch):
    asked = []
    original = LanguageModelling.eval_batches

    def watched(self, split, rows):
        asked.append(split)
        return original(self, split, rows)

    monkeypatch.setattr(LanguageModelling, "eval_batches", watched)
    fit(make("lm", tune={"trial": True}), tmp_path, machine)
    folder = RunFolder(tmp_path)
    assert folder.results().test is None
    assert folder.results().validation.loss > 0
    assert set(asked) == {"validation"}
    assert "test" not in folder.manifest().data.fingerprints


def test_a_tuning_trial_reports_its_lowest_loss_also_if_another_step_is_more_accurate(
    tmp_path, machine, make, monkeypatch
):
    monkeypatch.setattr(Evaluation, "better_than", lambda evaluation, best: best is None)
    fit(make("lm", tune={"trial": True}), tmp_path, machine)
    losses = [row["loss"] for row in rows(tmp_path, "validation")]
    assert RunFolder(tmp_path).results().validation.loss == min(losses) < losses[0]


def test_early_stopping(tmp_path, machine, make):
    config = make("lm", optim={"lr": 1e-30}, budget={"steps": 40, "eval_every": 2, "patience": 2})
    fit(config, tmp_path, machine)
    results = RunFolder(tmp_path).results()
    assert results.steps == 6  # one best, two without improvement
    assert results.stopped_early
    assert "stopped early" in rows(tmp_path, "event")[0]["text"]


@pytest.mark.parametrize("name", ["oelm-gradual", "oelm-early"])
def test_schedules_act_at_their_steps(tmp_path, machine, make, name):
    config = make("lm", name, budget={"steps": 20})
    assert fit(config, tmp_path, machine).state == "finished"
    steps = [row["step"] for row in rows(tmp_path, "event")]
    method = config.method
    if name == "oelm-early":
        expected = [math.ceil(method.freeze_at * 20) + 1]
    else:
        expected = [math.ceil(share * 20) + 1 for share in (method.thaw_from, method.thaw_to)]
    assert steps == expected
    folder = RunFolder(tmp_path)
    counts = folder.results().parameters
    assert counts.qk_trainable == counts.qk_total  # because they trained at some time
    assert folder.manifest().disk_bytes_planned >= 3 * folder.latest.stat().st_size


def test_tensorboard_gets_the_rows_and_missing_trackers_are_named(tmp_path, machine, make):
    pytest.importorskip("tensorboard")
    fit(make("lm"), tmp_path / "run", replace(machine, trackers=("tensorboard",)))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    assert [e.step for e in events.Scalars("train/loss")] == [3, 6, 9, 12]
    with pytest.raises(UsageError, match="did you mean 'tensorboard'"):
        fit(make("lm"), tmp_path / "typo", replace(machine, trackers=("tensorbord",)))


def test_a_tracker_receives_each_row_once_over_resumes(tmp_path, machine, make, monkeypatch):
    sent, started = [], []
    service = types.ModuleType("trackio")
    service.__spec__ = importlib.machinery.ModuleSpec("trackio", None)
    service.init = lambda **settings: started.append(settings)
    service.log = lambda values, step: sent.append((step, sorted(values)))
    service.finish = lambda: None
    monkeypatch.setitem(sys.modules, "trackio", service)
    config, tracked = make("lm", budget={"checkpoint_every": 100}), replace(machine, trackers=("trackio",))
    fit(config, tmp_path, tracked)
    RunFolder(tmp_path).results_file.unlink()
    (tmp_path / "latest.pt").unlink()  # as if killed before its only checkpoint: every step is done again
    assert fit(config, tmp_path, tracked).state == "finished"
    steps = [step for step, _ in sent]
    assert steps == sorted(set(steps)) == [3, 4, 6, 8, 9, 12]
    assert started[0]["name"] == started[1]["name"]
    assert sent[-1][1] == [
        f"{kind}/{what}"
        for kind, what in (
            ("train", "grad_norm"),
            ("train", "loss"),
            ("train", "lr"),
            ("train", "tokens"),
            ("validation", "loss"),
            ("validation", "n"),
            ("validation", "ppl"),
        )
    ]
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UsageError, match=r"pip install '\.\[wandb\]'"):
        fit(config, tmp_path / "other", replace(machine, trackers=("wandb",)))


def test_fp16_model_files_are_trained_in_fp32(tmp_path, make):
    hf = pytest.importorskip("transformers")
    shape = hf.BertConfig(
        vocab_size=300, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    hf.BertModel(shape).half().save_pretrained(tmp_path)
    config = make("bert", model={"name": str(tmp_path), "pretrained": True, "dropout": 0.3})
    model = build_model(config, vocab_size=300, classes=3, pad_id=0, eos_id=1)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model.config.num_labels == 3
    assert model.config.hidden_dropout_prob == 0.3
    hf.BertForSequenceClassification(shape).save_pretrained(tmp_path / "two")  # a head of two classes
    other = make("bert", model={"name": str(tmp_path / "two"), "pretrained": True})
    with pytest.raises(OelmError, match="a different number of classes"):
        build_model(other, vocab_size=300, classes=3, pad_id=0, eos_id=1)


def test_a_decoder_classifies_the_last_token_before_the_padding(tmp_path, make):
    hf = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    hf.LlamaConfig(vocab_size=300, pad_token_id=0, **sizes).save_pretrained(tmp_path)
    config = make("bert", model={"name": str(tmp_path), "dropout": 0.0})
    model = build_model(config, vocab_size=300, classes=3, pad_id=2, eos_id=2).eval()
    short, long = (
        class_logits(model, {"ids": torch.tensor([[5, 6, 7, *padding]]), "lengths": torch.tensor([3])})
        for padding in ([], [2, 2, 2, 2])
    )
    assert torch.allclose(short, long, atol=1e-6)
    hf.XLNetConfig(vocab_size=300, d_model=16, n_layer=1, n_head=2, d_inner=16).save_pretrained(tmp_path)
    with pytest.raises(UsageError, match="XLNet"):
        build_model(config, vocab_size=300, classes=3, pad_id=0, eos_id=1)


def test_the_noise_depends_on_the_type_of_the_model_and_not_on_its_path(tmp_path, make):
    hf = pytest.importorskip("transformers")
    tokenizer = load_tokenizer("bpe-300", corpus=open_corpus("stories").limit(train=50))
    for shape, folder, style in ((hf.T5Config(), "bart/t5", "t5"), (hf.BartConfig(), "mine", "bart")):
        shape.save_pretrained(tmp_path / folder)
        config = make("t5", model={"name": str(tmp_path / folder)})
        assert _noise(config, tokenizer)[1].style == style


def test_dropout_is_set_in_every_part_of_a_transformers_model(tmp_path, make):
    hf = pytest.importorskip("transformers")
    shape = hf.DistilBertConfig(vocab_size=300, dim=16, n_layers=1, n_heads=2, hidden_dim=16)
    shape.attention_dropout = 0  # an integer, as some files have it
    shape.save_pretrained(tmp_path)
    model = build_model(
        make("bert", model={"name": str(tmp_path), "dropout": 0.3}),
        vocab_size=300,
        classes=3,
        pad_id=0,
        eos_id=1,
    )
    assert {m.p for m in model.modules() if isinstance(m, torch.nn.Dropout)} == {0.3}
    assert model.config.attention_dropout == 0.3


def test_pretrained_weights_with_other_names_are_an_error(tmp_path, make, caplog, monkeypatch):
    hf = pytest.importorskip("transformers")
    shape = hf.BertConfig(
        vocab_size=300, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    hf.BertModel(shape, add_pooling_layer=False).save_pretrained(tmp_path)  # a new pooler is accepted
    config = make("bert", model={"name": str(tmp_path), "pretrained": True})
    monkeypatch.setattr(logging.getLogger("transformers"), "handlers", [caplog.handler])
    build_model(config, vocab_size=300, classes=3, pad_id=0, eos_id=1)
    assert not caplog.messages  # such as a table of the new head and pooler for every arm of a study
    state = load_file(tmp_path / "model.safetensors")
    save_file({f"module.{k}": v for k, v in state.items()}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UsageError, match="would be random"):
        build_model(config, vocab_size=300, classes=3, pad_id=0, eos_id=1)


@pytest.mark.parametrize("own", ["", "other", "same"])  # the tokenizer in the folder of the model
def test_a_pretrained_model_needs_its_own_tokenizer(tmp_path, machine, make, own):
    hf = pytest.importorskip("transformers")
    folder = tmp_path / "model"
    shape = hf.BertConfig(
        vocab_size=400, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    hf.BertModel(shape).save_pretrained(folder)
    config = make("bert", model={"name": str(folder), "pretrained": True}, data={"tokenizer": "bpe-300"})
    corpus = open_corpus(config.data.dataset, source=config.data.source).limit(train=config.data.train_rows)
    if own:
        load_tokenizer("bpe-280" if own == "other" else "bpe-300", corpus=corpus).save(folder)
    if own == "same":
        assert prepare(config, machine).tokenizer.vocab_size == 300
        return
    with pytest.raises(UsageError, match="not the tokenizer of the pretrained model"):
        prepare(config, machine)


def test_fit_does_not_change_the_global_random_state(tmp_path, machine, make):
    before = torch.get_rng_state()
    fit(make("lm", budget={"steps": 2}), tmp_path, machine)
    assert torch.equal(torch.get_rng_state(), before)


def test_equal_seeds_give_equal_runs_and_other_seeds_do_not(tmp_path, machine, make):
    base = make("lm", budget={"steps": 3, "log_every": 1})
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        fit(replace(base, seed=seed), tmp_path / name, machine)
    a, b, c = ((tmp_path / n / "metrics.jsonl").read_bytes() for n in "abc")
    assert a == b != c
    assert json.loads((tmp_path / "a" / "results.json").read_text(encoding="utf-8"))["seed"] == 1
