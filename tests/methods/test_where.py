"""Choosing modules by name: `where` and `exclude` of apply and qk_projections, and oelm.preview."""

import dataclasses

import pytest
import torch
from tiny_models import build, equal_parameters, optimizer_of, outputs
from torch import nn
from transformers import BertModel, CLIPConfig, CLIPModel

import oelm
from oelm.errors import OelmError, UsageError
from oelm.methods.presets import find_method


def clip():
    tower = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = {**tower, "vocab_size": 64, "max_position_embeddings": 16}
    vision = {**tower, "image_size": 16, "patch_size": 8}
    torch.manual_seed(0)
    return CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)).eval()


def frozen(model):
    return {name for name, p in model.named_parameters() if not p.requires_grad}


class UnreadableAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.alpha, self.beta = nn.Linear(8, 8), nn.Linear(8, 8)


@pytest.mark.parametrize(
    ("where", "exclude"),
    [
        ("text_model.*", None),
        ("text_model", None),
        (None, "vision_model.*"),
        (["text_model.encoder.layers.0", "text_model.encoder.layers.1.*"], None),
        ("*.self_attn", ["vision_model"]),
    ],
)
def test_one_tower_of_clip_is_frozen(where, exclude):
    model = clip()
    applied = oelm.apply(model, "oelm-freeze", where=where, exclude=exclude)
    assert len(frozen(model)) == 2 * 2 * 2  # layers, q and k, weight and bias
    assert all(name.startswith("text_model.encoder.layers.") for name in frozen(model))
    assert applied.frozen == applied.qk_total == 2 * 2 * (32 * 32 + 32)
    assert "Q/K selected" in str(applied)
    assert oelm.audit(model, optimizer_of(model)).ok
    assert len(oelm.qk_projections(model, where=where, exclude=exclude)) == 4


def test_a_layer_that_only_one_of_its_names_selects_is_refused():
    model = nn.Transformer(16, 2, 2, 2, 32, batch_first=True)
    model.decoder.layers[1].self_attn = model.encoder.layers[0].self_attn
    for where in ("encoder", "decoder"):
        with pytest.raises(UsageError, match=r"encoder\.layers\.0.* and decoder\.layers\.1.* are one module"):
            oelm.apply(model, "oelm-freeze", where=where)
    assert not frozen(model)
    oelm.apply(model, "oelm-freeze", where=["encoder", "decoder.layers.1.self_attn"])
    assert len(frozen(model)) == 2 * 2 * 2


def test_one_part_of_a_fused_projection_is_chosen():
    model = build("gpt2")
    oelm.apply(model, "oelm-freeze", where="*.h.0.*", exclude="*.c_attn.k")
    assert frozen(model) == {f"transformer.h.0.attn.c_attn.q.{kind}" for kind in ("weight", "bias")}
    assert {type(b.attn.c_attn).__name__ for b in model.transformer.h[1:]} == {"Conv1D"}
    assert oelm.audit(model, optimizer_of(model)).ok


def test_extras_are_added_to_the_chosen_modules_alone():
    model = build("bart")
    applied = oelm.apply(model, "oelm-lowrank", where="model.decoder.*", exclude="*.encoder_attn")
    added = {name for name, _ in model.named_parameters() if "lowrank" in name}
    assert len(added) == 2 * 2 * 2
    assert all(".decoder.layers." in name and ".self_attn." in name for name in added)
    assert applied.qk_trainable == sum(model.get_parameter(name).numel() for name in added)


def test_the_choice_is_saved_and_loaded(tmp_path):
    model = build("bert")
    oelm.apply(model, "oelm-freeze", where="*.layer.1")
    for compact in (False, True):
        oelm.save(model, tmp_path / str(compact), compact=compact)
        again = oelm.load(tmp_path / str(compact))
        assert frozen(again) == frozen(model)
        assert equal_parameters(again, model)
        oelm.remove(again)
        assert not frozen(again)


def test_modules_outside_the_choice_need_not_be_readable():
    model = nn.ModuleDict({"text": build("bert"), "other": UnreadableAttention()})
    with pytest.raises(OelmError, match=r"does not recognise(.|\n)*exclude=\.\.\.\), or where="):
        oelm.apply(model, "oelm-freeze")
    applied = oelm.apply(model, "oelm-freeze", exclude="other")
    assert applied.qk_trainable == 0
    assert oelm.param_groups(model, lr=1e-3, qk_lr=1e-4, layer_decay=0.9)
    assert oelm.audit(model).ok


@pytest.mark.parametrize(
    ("where", "exclude", "message"),
    [
        (
            "txt_model.*",
            None,
            "where: 'txt_model.*' matches no module of CLIPModel; did.*text_model",
        ),
        (None, "vison_model", "exclude: 'vison_model' matches no module.*vision_model"),
        ("zzzzz", None, "the model has text_model, vision_model"),
        ("*.mlp", None, "select no query or key projection"),
        ([], None, "a name pattern or a list"),
        (["text_model", 3], None, "a name pattern or a list"),
        (3, None, "a name pattern or a list"),
    ],
)
def test_a_pattern_that_matches_nothing_is_an_error_that_names_near_matches(where, exclude, message):
    model = clip()
    with pytest.raises(UsageError, match=message):
        oelm.apply(model, "oelm-freeze", where=where, exclude=exclude)
    assert not frozen(model)


def test_a_choice_that_freezes_nothing_is_refused():
    last = dataclasses.replace(find_method("oelm-partial"), freeze="first", layers=1)
    with pytest.raises(UsageError, match="freezes none of the modules"):
        oelm.apply(build("bert"), last, where="*.layer.2")
    with pytest.raises(UsageError, match="acts on FFN matrices, but where= and exclude= select none"):
        oelm.apply(build("bert"), "oelm-ffn", where="*.attention")


# -- preview ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "method"),
    [
        ("gpt2", "oelm-freeze"),
        ("llama", "oelm-plus"),
        ("bert", "oelm-ffn"),
        ("own-gpt", "oelm-relative"),
        ("gpt2", "orthogonal-init"),
        ("torch-transformer", "oelm-gradual"),
        ("bart", "oelm-early"),
        ("bert", "baseline"),
    ],
)
def test_the_preview_has_the_counts_of_apply_and_changes_nothing(family, method):
    model, untouched = build(family), build(family)
    shown = oelm.preview(model, method)
    assert equal_parameters(model, untouched)
    assert torch.equal(outputs(model), outputs(untouched))
    applied = oelm.apply(model, method)
    assert (shown.total, shown.frozen, shown.trainable) == (applied.total, applied.frozen, applied.trainable)
    assert shown.added == applied.total - sum(p.numel() for p in untouched.parameters())
    assert {row.module for row in shown.rows if row.part != "ffn"} == {
        p.name for p in oelm.qk_projections(model)
    }


def test_the_printed_preview_merges_layers_and_names_the_rest():
    text = str(oelm.preview(clip(), "oelm-lowrank", where="text_model.*"))
    assert "text_model.encoder.layers.*.self_attn.q_proj  q     4 x 8  headwise  frozen" in text
    assert "2 x 1,056" in text
    assert "vision_model" not in text
    assert "trains, frozen from 15 % of the run on" in str(oelm.preview(build("bert"), "oelm-early"))
    assert "frozen until" in str(oelm.preview(build("bert"), "oelm-gradual"))


def test_the_preview_raises_the_errors_and_warnings_of_apply(tmp_path):
    build("bert").save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="replaces the trained query and key weights") as caught:
        oelm.preview(BertModel.from_pretrained(tmp_path), "oelm-freeze")
    assert caught[0].filename == __file__
    with pytest.raises(UsageError, match="unknown method"):
        oelm.preview(build("bert"), "oelm-freze")
