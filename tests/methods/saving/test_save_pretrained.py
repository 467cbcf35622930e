"""`save_pretrained` with a method: plain transformers loads the same function, or saving is refused."""

import copy
import dataclasses
import pickle
import subprocess
import sys

import pytest
import torch
import transformers
from huggingface_hub import PyTorchModelHubMixin
from safetensors.torch import load_file
from tiny_models import LLAMA, applied_model, build, equal_parameters, outputs, trained_model
from tiny_trainer import trainer

import oelm
from oelm.errors import OelmError
from oelm.methods.extras.extended import EXTRAS
from oelm.methods.method import Method
from oelm.methods.presets import find_method

NAMED = [m for m in oelm.methods().values() if not m.relative_bias]  # a relative bias needs our own GPT
COMBINED = [
    dataclasses.replace(find_method("oelm-lowrank"), name="all-linear", core=True, temperature=True),
    dataclasses.replace(
        find_method("oelm-plus"), name="all", conv=3, conv_value=4, core=True, temperature=True
    ),
]
ADDED = ("bias", "lowrank", "core", "temperature", "conv", "conv_value")
# One method for each set of extras and each set of frozen layers: they alone decide what is saved.
DISTINCT = {(m.freeze, *(bool(getattr(m, name)) for name in ADDED)): m for m in (*NAMED, *COMBINED)}


def has_no_place(family, method):
    return bool(method.conv or method.conv_value or (method.bias and family == "mistral"))


def applies(family, method):
    """Whether the method fits the family: a causal convolution needs a decoder."""
    return not (family == "bert" and (method.conv or method.conv_value))


def load_with_transformers(model, folder):
    plain, info = type(model).from_pretrained(folder, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return plain.eval()


@pytest.mark.parametrize(
    ("family", "method"),
    [
        *(("llama", method) for method in (*NAMED, *COMBINED)),
        *((f, m) for f in ("gpt2", "bert") for m in DISTINCT.values() if applies(f, m)),
        *((family, find_method("oelm-plus")) for family in ("gpt-neox", "qwen2", "mistral")),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_plain_transformers_computes_the_same_or_saving_is_refused(family, method, tmp_path):
    model = trained_model(family, method)
    if has_no_place(family, method):
        with pytest.raises(OelmError, match=r"does not have .*\.(conv|extra_bias).*oelm\.save\(model, "):
            model.save_pretrained(tmp_path)
        assert not list(tmp_path.iterdir())
        return
    model.save_pretrained(tmp_path)
    assert not {key.rpartition(".")[2] for key in load_file(tmp_path / "model.safetensors")} & set(EXTRAS)
    assert torch.allclose(
        outputs(load_with_transformers(model, tmp_path)), outputs(model), atol=1e-4, rtol=1e-4
    )
    again = oelm.load(tmp_path).eval()
    for (name, p), (other, q) in zip(again.named_parameters(), model.named_parameters(), strict=True):
        assert name == other
        assert torch.equal(p, q), name
    assert torch.equal(outputs(again), outputs(model))
    assert oelm.audit(again).ok


@pytest.mark.parametrize("name", ["oelm-lowrank", "oelm-plus", "oelm-conv"])
def test_transformers_never_loads_another_function_from_oelm_save(name, tmp_path):
    model = trained_model("llama", name)
    oelm.save(model, tmp_path)
    assert torch.equal(outputs(oelm.load(tmp_path)), outputs(model))
    assert torch.equal(outputs(oelm.load(tmp_path, model=build("llama"))), outputs(model))
    if name == "oelm-conv":
        with pytest.raises(OSError, match="safetensors"):
            type(model).from_pretrained(tmp_path)
    else:
        assert torch.allclose(outputs(load_with_transformers(model, tmp_path)), outputs(model), atol=1e-4)


def test_biases_of_a_llama_are_saved_as_a_llama_with_biases(tmp_path):
    model = trained_model("llama", "oelm-bias")
    model.save_pretrained(tmp_path)
    plain = load_with_transformers(model, tmp_path)
    assert plain.config.attention_bias
    assert not plain.model.layers[0].self_attn.o_proj.bias.any()
    assert not model.config.attention_bias  # the model itself is unchanged
    assert oelm.load(tmp_path).config.attention_bias is False
    assert torch.equal(outputs(oelm.load(tmp_path, model=build("llama")).eval()), outputs(model))


@pytest.mark.parametrize("compact", [False, True])
def test_auto_classes_load_what_only_oelm_can_load(compact, tmp_path):
    model = trained_model("llama", "oelm-conv")
    oelm.save(model, tmp_path, compact=compact)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert type(loaded) is type(model)
    assert torch.equal(outputs(loaded), outputs(model))
    assert oelm.audit(loaded).ok
    with pytest.raises(OelmError, match="LlamaForCausalLM, which AutoModelForTokenClassification does not"):
        transformers.AutoModelForTokenClassification.from_pretrained(tmp_path)
    with pytest.raises(OelmError, match="device_map"):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path, device_map="cpu")


def test_auto_classes_ignore_no_setting_of_a_folder_that_only_oelm_can_load(tmp_path):
    config = transformers.LlamaConfig(**{**LLAMA, "num_labels": 3})
    model = transformers.LlamaForSequenceClassification(config)
    oelm.apply(model, "oelm-conv")
    oelm.save(model, tmp_path)
    auto = transformers.AutoModelForSequenceClassification
    for saved in ({"num_labels": 3}, {"output_attentions": False}, {"dtype": torch.float32}):
        assert auto.from_pretrained(tmp_path, **saved).config.num_labels == 3
    for other in ({"num_labels": 5}, {"id2label": {0: "no"}}, {"problem_type": "regression"}):
        (name,) = other
        with pytest.raises(OelmError, match=rf"the option {name} .*leave {name} out, and change the loaded"):
            auto.from_pretrained(tmp_path, **other)
    for name in ("output_attentions", "attention_dropout", "attn_implementation"):
        with pytest.raises(OelmError, match=f"the option {name}"):
            auto.from_pretrained(tmp_path, **{name: "eager" if "impl" in name else 0.5})
    with pytest.raises(OelmError, match="the option use_cache"):
        auto.from_pretrained(tmp_path, use_cache=True)  # the convolution needs it off
    with pytest.raises(OelmError, match="the option num_labels"):
        transformers.AutoConfig.from_pretrained(tmp_path, num_labels=5)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    assert auto.from_pretrained(tmp_path, config=config).config.num_labels == 3
    config.num_labels = 5
    with pytest.raises(OelmError, match="the given config differs"):
        auto.from_pretrained(tmp_path, config=config)


def test_import_oelm_alone_registers_the_auto_classes(tmp_path):
    """In a new process, where transformers is imported after oelm; in this one, it was before."""
    oelm.save(trained_model("llama", "oelm-conv"), tmp_path)
    program = f"""
import oelm, sys
assert "torch" not in sys.modules and "transformers" not in sys.modules
from transformers import AutoConfig, AutoModelForCausalLM
print(AutoModelForCausalLM._model_mapping[type(AutoConfig.from_pretrained({str(tmp_path)!r}))].__name__)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == "OelmAutoModelForCausalLM"


def test_a_given_state_dict_must_fit_the_plain_architecture(tmp_path):
    model = trained_model("gpt2", "oelm-core")
    with pytest.raises(OelmError, match=r"state_dict contains .*core.*oelm\.folded_state"):
        model.save_pretrained(tmp_path, state_dict=model.state_dict())
    oelm.save(model, tmp_path)
    model.save_pretrained(tmp_path, state_dict=oelm.folded_state(model))
    load_with_transformers(model, tmp_path)
    assert not list(tmp_path.glob("oelm*"))  # the files of the earlier save are gone


def test_save_pretrained_of_a_submodule_folds_or_is_refused(tmp_path):
    model = trained_model("bert", "oelm-core")
    model.bert.save_pretrained(tmp_path / "part")
    assert not any("core" in key for key in load_file(tmp_path / "part" / "model.safetensors"))
    with pytest.raises(OelmError, match="does not have"):
        trained_model("llama", "oelm-conv").model.save_pretrained(tmp_path / "refused")


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copied_model_saves_itself(copied, tmp_path):
    model = trained_model("llama", "oelm-lowrank")
    other = copied(model)
    with torch.no_grad():
        other.lm_head.weight.mul_(2)
    other.save_pretrained(tmp_path)
    # The logits are as large as 15, and rounding differs between CPUs.
    assert torch.allclose(outputs(load_with_transformers(other, tmp_path)), outputs(other), atol=1e-3)
    assert oelm.audit(other).ok
    assert (outputs(other) - outputs(model)).abs().max() > 1e-2


def test_a_subclass_of_a_transformers_model_does_not_get_the_extras_twice(tmp_path):
    class Subclass(transformers.BertForSequenceClassification):
        pass

    config = build("bert").config
    model = Subclass(config).eval()
    oelm.apply(model, "oelm-plus")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(EXTRAS):
                parameter.add_(0.1)
    model.save_pretrained(tmp_path)
    assert equal_parameters(oelm.load(tmp_path, model=Subclass(config)), model)


def test_save_pretrained_that_takes_no_state_dict_is_refused_for_added_parameters(tmp_path):
    class Wrapper(torch.nn.Module, PyTorchModelHubMixin):
        def __init__(self):
            super().__init__()
            self.gpt = build("own-gpt")

    model = Wrapper()
    oelm.apply(model, "oelm-lowrank", verify=False)
    with pytest.raises(OelmError, match=r"Wrapper does not take a state_dict.*oelm\.save"):
        model.save_pretrained(tmp_path / "refused")
    assert not (tmp_path / "refused").exists()
    frozen_only = Wrapper()
    oelm.apply(frozen_only, "oelm-freeze", verify=False)
    frozen_only.save_pretrained(tmp_path / "saved")
    assert (tmp_path / "saved" / "model.safetensors").exists()


def test_a_cast_model_is_saved_without_metadata(tmp_path):
    model = trained_model("llama", "oelm-freeze").double()
    with pytest.warns(UserWarning, match=r"no oelm\.json"):
        model.save_pretrained(tmp_path)
    assert not (tmp_path / "oelm.json").exists()


# -- the Trainer -----------------------------------------------------------------------------------


def causal_trainer(model, folder, **changes):
    """Return a Trainer that trains a language model on the rows of the classification task."""

    def collate(rows):
        ids = torch.stack([row["input_ids"] for row in rows])
        return {"input_ids": ids, "labels": ids}

    run = trainer(model, folder, **changes)
    run.data_collator = collate
    return run


@pytest.mark.parametrize("name", ["oelm-lowrank", "oelm-plus", "oelm-conv"])
def test_checkpoints_of_the_trainer_load_and_resume_bit_equal(name, tmp_path):
    model = applied_model("llama", name)
    run = causal_trainer(model, tmp_path / "first", steps=4, save_steps=2)
    run.train()
    run.save_model(tmp_path / "final")
    for folder in (tmp_path / "final", tmp_path / "first" / "checkpoint-4"):
        assert torch.equal(outputs(oelm.load(folder)), outputs(model.eval()))
    resumed = applied_model("llama", name)
    causal_trainer(resumed, tmp_path / "again", steps=4, save_steps=2).train(
        resume_from_checkpoint=str(tmp_path / "first" / "checkpoint-2")
    )
    assert equal_parameters(model, resumed)
    # Without oelm, transformers either loads a model that gives the same outputs or raises an error. With
    # oelm, its auto classes load all of them.
    for folder in (tmp_path / "final", tmp_path / "first" / "checkpoint-4"):
        auto = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
        assert torch.allclose(outputs(auto), outputs(model), atol=1e-4)
        if name == "oelm-lowrank" or (name == "oelm-plus" and folder.name == "final"):
            assert torch.allclose(outputs(type(model).from_pretrained(folder)), outputs(model), atol=1e-4)
        else:
            with pytest.raises((OSError, RuntimeError)):
                type(model).from_pretrained(folder)


@pytest.mark.parametrize("bias", [False, True])
def test_the_trainer_loads_the_best_checkpoint_unfolded(bias, tmp_path):
    model = applied_model("llama", Method("mine", freeze="all", temperature=True, core=True, bias=bias))
    callback = oelm.OELMCallback()
    causal_trainer(
        model,
        tmp_path,
        callback=callback,
        steps=2,
        save_steps=1,
        eval_steps=1,
        eval_strategy="steps",
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        greater_is_better=True,  # the first checkpoint
    ).train()
    assert callback.report.ok
    assert torch.equal(outputs(oelm.load(tmp_path / "checkpoint-1")), outputs(model.eval()))


@pytest.mark.parametrize("name", ["oelm-freeze", "oelm-plus", "oelm-conv"])
def test_a_given_state_dict_is_saved_with_its_own_extras_after_the_trainer(name, tmp_path):
    model = applied_model("llama", name)
    causal_trainer(model, tmp_path / "run", steps=2).train()
    trains = {n for n, p in model.named_parameters() if p.requires_grad}
    average = {n: t / 2 if n in trains else t for n, t in model.state_dict().items()}
    model.save_pretrained(tmp_path / "average", state_dict=average)
    loaded = oelm.load(tmp_path / "average").state_dict()
    assert all(torch.equal(loaded[n], tensor) for n, tensor in average.items())
    added = [n for n in average if n.endswith(EXTRAS)]
    if not added:
        return
    partly = {n: t for n, t in average.items() if n != added[0]}
    with pytest.raises(OelmError, match=rf"state_dict lacks {added[0]}"):
        model.save_pretrained(tmp_path / "partly", state_dict=partly)
    if name == "oelm-plus":  # without biases, transformers has no plain model for a Llama with them
        plain = {n: t for n, t in average.items() if n not in added}
        model.save_pretrained(tmp_path / "plain", state_dict=plain)
        assert not list((tmp_path / "plain").glob("oelm*"))  # the extras of the model do not belong to it


@pytest.mark.parametrize(("name", "folder"), [("oelm-conv", "final"), ("oelm-bias", "checkpoint-2")])
def test_a_trainer_without_the_callback_cannot_save_what_it_could_not_resume(name, folder, tmp_path):
    model = applied_model("llama", name)
    arguments = transformers.TrainingArguments(str(tmp_path), report_to=[], use_cpu=True)
    with pytest.raises(OelmError, match=r"callbacks=\[oelm\.OELMCallback\(\)\]"):
        transformers.Trainer(model, arguments).save_model(tmp_path / folder)
