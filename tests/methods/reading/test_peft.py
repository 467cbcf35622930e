"""PEFT before and after `oelm.apply`: LoRA, DoRA, prompt tuning; merged, unloaded and saved."""

import dataclasses

import pytest
import torch
from tiny_models import applied_model, build, faults, optimizer_of, outputs, trained_model
from tiny_trainer import trainer

import oelm
from oelm.errors import OelmError
from oelm.methods.method import Method

peft = pytest.importorskip("peft")


def adapted(model, *targets, **fields):
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=list(targets), r=2, **fields))


def prompt_tuned(model):
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    return peft.get_peft_model(model, config)


def train(model, optimizer, steps=2):
    batch = torch.arange(3, 13).reshape(2, 5)
    for _ in range(steps):
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("name", ["oelm-bias", "oelm-gradual", "oelm-freeze"])
def test_a_run_is_resumed_only_if_its_peft_checkpoint_holds_all_that_trained(name, tmp_path):
    def run():
        model = adapted(build("bert"), "value", task_type="SEQ_CLS")
        oelm.apply(model, name, seed=1)
        return trainer(model, tmp_path, save_steps=2, steps=4)

    run().train()
    if name == "oelm-freeze":
        run().train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    else:
        with pytest.raises(OelmError, match="cannot resume from a checkpoint of a PEFT model"):
            run().train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


ADAPTERS = {
    "lora": lambda model: adapted(model, "v_proj", "o_proj"),
    "dora": lambda model: adapted(model, "v_proj", use_dora=True),
    "prompt": prompt_tuned,
}


@pytest.mark.parametrize("kind", ADAPTERS)
@pytest.mark.parametrize("order", ["apply first", "peft first"])
def test_both_orders_train_the_adapter_and_freeze_q_and_k(kind, order):
    if order == "apply first":
        model = ADAPTERS[kind](applied_model("llama"))
    else:
        model = ADAPTERS[kind](build("llama"))
        oelm.apply(model, "oelm-freeze", seed=1)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = optimizer_of(model)
    train(model, optimizer)
    report = oelm.audit(model, optimizer)
    assert report.ok, report
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]) != p.requires_grad, name
    assert report.trainable == sum(p.numel() for p in model.parameters() if p.requires_grad) > 0
    assert report.frozen + report.trainable == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("order", ["apply first", "peft first"])
def test_tensors_that_thaw_later_are_in_the_groups_and_train_after_the_thaw(order):
    model = prompt_tuned(applied_model("llama", "oelm-gradual") if order == "apply first" else build("llama"))
    if order == "peft first":
        oelm.apply(model, "oelm-gradual", seed=1)
    optimizer, schedule = optimizer_of(model), oelm.Applied(model)
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    queries = [p.weight.parameter for p in oelm.qk_projections(model)]
    assert {id(p) for p in queries} < held  # the optimizer also holds the prompt's embedding
    schedule.step(9, 10, optimizer)
    before = [p.detach().clone() for p in queries]
    train(model, optimizer)
    assert not any(torch.equal(p, b) for p, b in zip(queries, before, strict=True))
    assert oelm.audit(model, optimizer).ok


@pytest.mark.parametrize("order", ["apply first", "peft first"])
@pytest.mark.parametrize(
    ("kind", "end"), [("lora", "merge_and_unload"), ("lora", "unload"), ("dora", "merge_and_unload")]
)
def test_the_record_survives_merging_and_unloading(order, kind, end, tmp_path):
    model = ADAPTERS[kind](applied_model("llama") if order == "apply first" else build("llama"))
    if order == "peft first":
        oelm.apply(model, "oelm-freeze", seed=1)
    train(model, optimizer_of(model))
    plain = getattr(model, end)()
    assert type(plain).__name__ == "LlamaForCausalLM"
    assert oelm.audit(plain).ok
    assert oelm.Applied(plain).seed == 1
    oelm.save(plain, tmp_path)
    assert torch.equal(outputs(oelm.load(tmp_path)), outputs(plain.eval()))


@pytest.mark.parametrize("kind", ADAPTERS)
@pytest.mark.parametrize("order", ["apply first", "peft first"])
def test_remove_leaves_peft_alone(kind, order):
    model = ADAPTERS[kind](applied_model("llama") if order == "apply first" else build("llama"))
    if order == "peft first":
        oelm.apply(model, "oelm-freeze", seed=1)
    train(model, optimizer_of(model))
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    batch = torch.arange(3, 13).reshape(2, 5)
    want = model.eval()(input_ids=batch).logits
    oelm.remove(model)
    assert {name for name, p in model.named_parameters() if p.requires_grad} == trainable
    assert torch.equal(model(input_ids=batch).logits, want)
    oelm.apply(model, "oelm-freeze", seed=2)
    assert oelm.audit(model, optimizer_of(model)).ok


def test_an_adapter_on_a_split_part_must_be_merged_before_remove():
    model = adapted(applied_model("gpt2"), "c_attn.v")
    with pytest.raises(OelmError, match=r"c_attn has a PEFT adapter; call merge_and_unload"):
        oelm.remove(model)
    plain = oelm.remove(model.merge_and_unload())
    assert type(plain.transformer.h[0].attn.c_attn).__name__ == "Conv1D"


# -- the low-rank adapters of oelm as a LoRA adapter --------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "bert"])
@pytest.mark.parametrize("rank", [3, (6, 2)])
def test_peft_loads_the_low_rank_adapters(family, rank, tmp_path):
    method = dataclasses.replace(oelm.methods()["oelm-lowrank"], name="mine", lowrank=rank, lowrank_scale=4.0)
    model = trained_model(family, method)
    want = outputs(model)
    oelm.save_peft_adapter(model, tmp_path / "adapter")
    oelm.remove(model, fold=False).save_pretrained(tmp_path / "base")
    base = type(model).from_pretrained(tmp_path / "base")
    again = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    torch.testing.assert_close(outputs(again.get_base_model()), want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(outputs(again.merge_and_unload()), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "method", "message"),
    [
        ("gpt2", "oelm-lowrank", "a part of the fused matrix"),
        ("llama", "oelm-temperature", "a LoRA adapter cannot contain .*temperature"),
        ("llama", "oelm-freeze", "adds no low-rank adapter"),
    ],
)
def test_what_lora_cannot_hold_is_refused(family, method, message, tmp_path):
    with pytest.raises(OelmError, match=message):
        oelm.save_peft_adapter(applied_model(family, method), tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()


def test_the_audit_reports_an_adapter_on_a_frozen_projection():
    model = adapted(applied_model("llama"), "q_proj", "v_proj")
    found = faults(oelm.audit(model))
    assert len(found) == 3
    assert "a PEFT adapter changes it" in found["model.layers.0.self_attn.q_proj.weight"]
    assert "lora_B.default" in found["model.layers.0.self_attn.q_proj.weight"]
    train(model, torch.optim.AdamW(p for p in model.parameters() if p.requires_grad))
    found = faults(oelm.audit(model.merge_and_unload()))
    assert "its bytes changed" in found["model.layers.0.self_attn.q_proj.weight"]


def test_an_adapter_on_a_part_of_a_split_projection():
    model = adapted(applied_model("gpt2"), "c_attn.v")
    assert oelm.audit(model, optimizer_of(model)).ok
    state = model.get_base_model().state_dict()  # q, k and v stay separate while v has an adapter
    for part in ("q", "k", "v.base_layer"):
        assert f"transformer.h.0.attn.c_attn.{part}.weight" in state
    model.get_base_model().load_state_dict(state)
    assert "transformer.h.0.attn.c_attn.weight" in model.merge_and_unload().state_dict()
    assert len(faults(oelm.audit(adapted(applied_model("gpt2"), "c_attn.q")))) == 3


@pytest.mark.parametrize(
    ("family", "target", "name"),
    [
        ("llama", "q_proj", "oelm-freeze"),
        ("llama", "k_proj", "oelm-lowrank"),
        ("llama", "k_proj", "oelm-bias"),
        ("llama", "v_proj", Method("conv-on-v", conv_value=4)),
        ("llama", "up_proj", "oelm-ffn"),
        ("gpt2", "c_attn", "oelm-freeze"),
    ],
)
def test_a_method_that_replaces_a_layer_with_an_adapter_is_refused(family, target, name):
    model = adapted(build(family), target, fan_in_fan_out=family == "gpt2")
    before = {n: t.clone() for n, t in model.state_dict().items()}
    method = getattr(name, "name", name)
    with pytest.raises(OelmError, match=rf"{target} has a PEFT adapter, but '{method}'"):
        oelm.apply(model, name)
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())


def test_a_method_that_freezes_nothing_works_with_adapters_on_q_and_k():
    model = adapted(build("gpt2"), "c_attn", fan_in_fan_out=True)
    oelm.apply(model, "orthogonal-init", seed=1)
    plain = applied_model("gpt2", "orthogonal-init")
    heads = [p.heads() for p in oelm.qk_projections(model)]
    assert all(torch.equal(h, p.heads()) for h, p in zip(heads, oelm.qk_projections(plain), strict=True))
    assert oelm.audit(model, optimizer_of(model)).ok


def test_trainable_extras_need_get_peft_model_before_apply():
    found = faults(oelm.audit(adapted(applied_model("llama", "oelm-lowrank"), "v_proj")))
    assert len(found) == 12
    assert all("call get_peft_model before oelm.apply" in text for text in found.values())
    model = adapted(build("llama"), "v_proj")
    oelm.apply(model, "oelm-lowrank")
    assert oelm.audit(model, optimizer_of(model)).ok


def test_the_audit_reports_modules_to_save_on_a_frozen_layer():
    model = adapted(applied_model("llama"), "v_proj", modules_to_save=["q_proj"])
    assert len(faults(oelm.audit(model))) == 3


def test_the_adapter_and_the_base_model_are_saved_separately(tmp_path):
    model = adapted(applied_model("llama"), "v_proj")
    train(model, optimizer_of(model))
    want = outputs(model.get_base_model().eval())
    with pytest.raises(OelmError, match=r"with a PEFT adapter.*unload"):
        oelm.save(model, tmp_path / "base")
    model.save_pretrained(tmp_path / "adapter")
    oelm.save(model.unload(), tmp_path / "base")
    again = peft.PeftModel.from_pretrained(oelm.load(tmp_path / "base"), tmp_path / "adapter")
    assert torch.equal(outputs(again.get_base_model().eval()), want)
    assert oelm.audit(again).ok


def test_an_adapter_added_by_transformers_itself(tmp_path):
    model = applied_model("llama")
    model.add_adapter(peft.LoraConfig(target_modules=["v_proj"], r=2))
    assert oelm.audit(model, optimizer_of(model)).ok
    model.save_pretrained(tmp_path)  # the adapter alone, as without oelm
    assert {f.name for f in tmp_path.glob("*.safetensors")} == {"adapter_model.safetensors"}


def test_the_trainer_with_an_adapter(tmp_path):
    from tiny_trainer import trainer

    def model():
        return adapted(applied_model("bert", "oelm-gradual"), "value", modules_to_save=["classifier"])

    callback = oelm.OELMCallback()
    run = trainer(model(), tmp_path, callback, steps=4, save_steps=2)
    run.train()
    assert callback.report.ok
    with pytest.raises(OelmError, match="contains a PEFT adapter without its base model"):
        oelm.load(tmp_path / "checkpoint-2")


@pytest.mark.parametrize("take_out", ["unload", "merge_and_unload"])
def test_a_classifier_whose_head_peft_had_copied_is_saved_and_loaded(take_out, tmp_path):
    model = adapted(build("bert"), "value", task_type="SEQ_CLS")
    oelm.apply(model, "oelm-freeze", seed=1)
    base = getattr(model, take_out)()
    oelm.save(base, tmp_path)
    assert torch.equal(outputs(oelm.load(tmp_path).eval()), outputs(base.eval()))
