"""Calls of attention modules, and inputs of models, that are guessed for the numeric check."""

import pytest
import torch
import transformers as hf
from torch import nn
from torch.nn import functional as F

import oelm

W, H = 32, 4
SMALL = {"hidden_size": W, "num_attention_heads": H, "num_hidden_layers": 1, "intermediate_size": W}


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_heads = H
        self.q, self.k, self.v = (nn.Linear(W, W) for _ in range(3))

    def attend(self, x, values):
        q, k, v = (
            p(t).unflatten(-1, (H, -1)).transpose(1, 2)
            for p, t in ((self.q, x), (self.k, x), (self.v, values))
        )
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class NeedsPositions(Mixer):
    def forward(self, x, object_queries=None):
        return self.attend(x + object_queries, x)


class HandsAMaskOn(Mixer):
    def forward(self, x, **kwargs):
        return self.kernel(x, **kwargs)

    def kernel(self, x, attention_mask):
        return self.attend(x, x)


@pytest.mark.parametrize("kind", [NeedsPositions, HandsAMaskOn])
def test_a_call_of_the_module_is_guessed(kind):
    model = kind()
    oelm.apply(model, "oelm-freeze")
    assert {n for n, p in model.named_parameters() if not p.requires_grad} > {"q.weight", "k.weight"}
    assert oelm.audit(model).ok


def layoutlmv3():
    shape = {"vocab_size": 50, "input_size": 32, "coordinate_size": 5, "shape_size": 6}
    return hf.LayoutLMv3Model(hf.LayoutLMv3Config(**SMALL, **shape))


def perceiver():
    shape = {"num_latents": 4, "d_latents": W, "d_model": 2 * W, "num_blocks": 1}
    counts = {"num_self_attends_per_block": 1, "num_self_attention_heads": H, "num_cross_attention_heads": H}
    return hf.PerceiverModel(hf.PerceiverConfig(**shape, **counts))


def patches_with_a_grid():
    from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLVisionConfig
    from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VisionTransformerPretrainedModel

    return Qwen2VisionTransformerPretrainedModel(
        Qwen2VLVisionConfig(depth=1, embed_dim=W, num_heads=H, hidden_size=W, mlp_ratio=1, patch_size=4)
    )


@pytest.mark.parametrize("build", [layoutlmv3, perceiver, patches_with_a_grid])
def test_an_input_of_the_model_is_guessed(build):
    from oelm.methods.reading.calls import observe_model

    torch.manual_seed(0)
    model = build().eval()
    attentions = {p.attention_name: p.attention for p in oelm.qk_projections(model)}
    assert observe_model(model, attentions, None).keys() == attentions.keys()
    oelm.apply(model, "oelm-freeze")
    assert oelm.audit(model).ok
