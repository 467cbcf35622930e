"""Modules of one class whose settings differ, and modules beside the transformer layers."""

from __future__ import annotations

from collections import OrderedDict
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import oelm
from oelm.errors import OelmError, UsageError
from oelm.methods.reading.feed_forward import ffn_matrices
from oelm.models.gpt import GPT, gpt_config


class Fused(nn.Module):
    """Attention with one matrix for q, k and v, whose rows are in blocks or divided by heads."""

    def __init__(self, per_head: bool) -> None:
        super().__init__()
        self.num_heads, self.per_head = 4, per_head
        self.qkv, self.o = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        B, T, d = x.shape
        y = self.qkv(x)
        if self.per_head:
            q, k, v = (part.transpose(1, 2) for part in y.view(B, T, 4, 3, 8).unbind(3))
        else:
            q, k, v = (part.view(B, T, 4, 8).transpose(1, 2) for part in y.chunk(3, -1))
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, T, d))


class Stack(nn.Module):
    def __init__(self, flags: list[bool]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Fused(flag) for flag in flags)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def test_the_layout_of_each_instance_is_read_by_itself():
    model = Stack([False, True])
    rows = {p.attention_name: p.weight.layout for p in oelm.qk_projections(model) if p.role == "q"}
    blocks, per_head = rows["layers.0"], rows["layers.1"]
    assert (blocks.groups, per_head.groups) == (1, 4)
    (alone,) = (p for p in oelm.qk_projections(Stack([True])) if p.role == "q")
    assert alone.weight.layout == per_head


class Ordered(nn.Module):
    """Attention whose blocks of rows are in the order that an attribute says."""

    def __init__(self, **settings: object) -> None:
        super().__init__()
        self.num_heads = 4
        self.qkv = nn.Linear(32, 96)
        vars(self).update(settings)

    def order(self) -> tuple[str, ...]:
        return self.rows

    def forward(self, x: Tensor) -> Tensor:
        parts = dict(zip(self.order(), self.qkv(x).chunk(3, -1), strict=True))
        q, k, v = (parts[role].unflatten(-1, (4, 8)).transpose(1, 2) for role in "qkv")
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class OrderedByConfig(Ordered):
    def order(self) -> tuple[str, ...]:
        return self.config.rows["order"]


@pytest.mark.parametrize(
    "build",
    [
        lambda rows: Ordered(rows=rows),
        lambda rows: OrderedByConfig(config=SimpleNamespace(rows={"order": list(rows)})),
    ],
    ids=["tuple", "config"],
)
def test_a_second_model_with_other_settings_is_read_by_itself(build):
    oelm.apply(nn.Sequential(build(("q", "k", "v"))), "freeze-pretrained")
    model = nn.Sequential(build(("v", "q", "k")))
    oelm.apply(model, "freeze-pretrained")
    assert model[0].qkv.layout.roles == ("v", "q", "k")


def test_a_subclass_of_torchs_attention_with_its_own_forward_is_refused():
    class Tripled(nn.MultiheadAttention):
        def forward(self, *args, **kwargs):
            y, weights = super().forward(*args, **kwargs)
            return 3 * y + 1, weights

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = Tripled(16, 4, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.attn(x, x, x, need_weights=False)[0]

    with pytest.raises(UsageError, match="would be lost"):
        oelm.apply(Model(), "freeze-pretrained", example_inputs=torch.randn(2, 5, 16))


def test_the_mlp_of_a_classification_head_is_no_ffn():
    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.head = nn.Module()
            self.head.fc1, self.head.fc2 = nn.Linear(16, 16), nn.Linear(16, 3)

    assert {matrix.name.split(".")[0] for matrix in ffn_matrices(Classifier())} == {"encoder"}


def test_layer_decay_does_not_depend_on_the_selected_layers():
    model = GPT(gpt_config("smoke-3", vocab_size=16, context=8))
    oelm.apply(model, "oelm-freeze", where="blocks.2")
    names = {id(p): name for name, p in model.named_parameters()}
    groups = oelm.param_groups(model, lr=1.0, layer_decay=0.5)
    rates = {names[id(p)]: group["lr"] for group in groups for p in group["params"]}
    assert [rates[f"blocks.{layer}.mlp.up.weight"] for layer in range(3)] == [0.125, 0.25, 0.5]


def test_a_projection_whose_memory_is_not_contiguous_is_refused():
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.num_heads = 4
            self.query = nn.Parameter(torch.randn(16, 4, 4).transpose(1, 2))
            self.key = nn.Parameter(torch.randn(16, 4, 4))
            self.value = nn.Parameter(torch.randn(16, 4, 4))

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (torch.einsum("btd,dhe->bhte", x, w) for w in (self.query, self.key, self.value))
            return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    model = nn.ModuleDict({"attention": Attention()})
    with pytest.raises(OelmError, match="not contiguous"):
        oelm.apply(model, "oelm-random", example_inputs=None)


def test_rotary_frequencies_keep_their_precision_when_a_compact_save_is_loaded(tmp_path):
    transformers = pytest.importorskip("transformers")
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=64, num_key_value_heads=2, **shape)
    transformers.LlamaForCausalLM(config).half().save_pretrained(tmp_path / "plain")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float16)
    oelm.apply(model, "oelm-freeze")
    oelm.save(model, tmp_path / "saved", compact=True)
    loaded = oelm.load(tmp_path / "saved")
    for name, buffer in model.named_buffers():
        assert torch.equal(loaded.get_buffer(name), buffer), name
    assert loaded.lm_head.weight.dtype == torch.float16


def test_layers_of_a_sequential_may_have_names():
    layers = {f"encoder_layer_{i}": nn.TransformerEncoderLayer(16, 2, 32) for i in range(3)}
    model = nn.Sequential(OrderedDict(layers))
    found = {p.attention_name: p.place.layer for p in oelm.qk_projections(model)}
    assert found == {f"encoder_layer_{i}.self_attn": i for i in range(3)}


class Head(nn.Module):
    """One attention head."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(16, 4, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(x).transpose(-2, -1) / 2
        return scores.softmax(-1) @ self.value(x)


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(Head() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([head(x) for head in self.heads], dim=-1)


def test_heads_in_a_list_are_in_one_layer():
    model = nn.Sequential(Heads(), Heads(), Heads())
    oelm.apply(model, "oelm-partial")
    trained = {name for name, p in model.named_parameters() if p.requires_grad and "value" not in name}
    assert trained == {f"2.heads.{i}.{name}.weight" for i in range(4) for name in ("query", "key")}
