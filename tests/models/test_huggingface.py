"""Our GPT has the logits and gradients of the Hugging Face GPT-2, and with rotary positions of GPT-NeoX."""

import pytest
import torch

from oelm.errors import OelmError
from oelm.methods.apply import apply
from oelm.models.generate import generate
from oelm.models.gpt import GPT, gpt_config
from oelm.models.huggingface import export_hf, import_hf, to_hf


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def trained(method="baseline", position="learned"):
    """Return a model after three training steps, so that biases and norms have changed."""
    model = GPT(gpt_config("smoke", vocab_size=61, context=24, position=position), seeded())
    apply(model, method)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    ids = torch.randint(61, (4, 25), generator=seeded(1))
    for _ in range(3):
        optimizer.zero_grad()
        model.loss(ids[:, :-1], ids[:, 1:]).backward()
        optimizer.step()
    model.zero_grad()
    return model.eval()


EXPORTED = ["baseline", "oelm-freeze", "oelm-lowrank", "oelm-core", "oelm-temperature"]
WITH_BIASES = ["oelm-bias", "oelm-plus", "baseline-bias"]


@pytest.mark.parametrize("method", EXPORTED)
def test_exported_and_imported_models_have_the_same_logits(tmp_path, method):
    from transformers import GPT2LMHeadModel

    ours = trained(method)
    ids = torch.randint(61, (2, 24), generator=seeded(2))
    export_hf(ours, tmp_path)
    theirs = GPT2LMHeadModel.from_pretrained(tmp_path).eval()
    assert theirs.config.n_ctx == theirs.config.n_positions  # the GGUF converter of llama.cpp reads n_ctx
    back = import_hf(tmp_path).eval()
    with torch.no_grad():
        assert torch.allclose(theirs(ids).logits, ours.logits(ids), atol=1e-4)
        assert torch.allclose(back.logits(ids), ours.logits(ids), atol=1e-5)


@pytest.mark.parametrize("position", ["learned", "rope"])
@pytest.mark.parametrize("method", [*WITH_BIASES, "oelm-core", "baseline"])
def test_plain_transformers_computes_the_same_and_generates_with_a_cache(tmp_path, method, position):
    from transformers import AutoModelForCausalLM

    ours = trained(method, position)
    ids = torch.randint(61, (2, 24), generator=seeded(2))
    export_hf(ours, tmp_path, eos_id=0)
    theirs, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert theirs.config.model_type == ("gpt_neox" if position == "rope" else "gpt2")
    with torch.no_grad():
        assert torch.allclose(theirs.eval()(ids).logits, ours.logits(ids), atol=1e-4)
    prompt = ids[0, :4]
    want = generate(ours, prompt, 12, temperature=0, stop_id=0)
    mask = torch.ones_like(prompt)[None]
    got = theirs.generate(
        prompt[None], attention_mask=mask, max_new_tokens=12, do_sample=False, use_cache=True, pad_token_id=0
    )
    assert got[0].tolist() == want.tolist()


def test_an_exported_bias_changes_the_logits():
    """A test model whose biases do nothing would not notice that they are lost."""
    ours = trained("oelm-bias", "rope")
    ids = torch.randint(61, (2, 24), generator=seeded(2))
    with torch.no_grad():
        want = ours.logits(ids)
        for block in ours.blocks:
            block.attn.q.extra_bias.zero_()
        assert (ours.logits(ids) - want).abs().max() > 1e-3


def test_loss_and_gradients_agree_with_transformers():
    ours = trained()
    theirs = to_hf(ours)
    ids = torch.randint(61, (3, 20), generator=seeded(3))
    ours.loss(ids[:, :-1], ids[:, 1:]).backward()
    theirs(ids, labels=ids).loss.backward()
    q, k, v = theirs.transformer.h[1].attn.c_attn.weight.grad.chunk(3, dim=1)
    for mine, want in [
        (ours.tokens.weight, theirs.transformer.wte.weight.grad),
        (ours.blocks[1].attn.q.weight, q.T),
        (ours.blocks[1].attn.k.weight, k.T),
        (ours.blocks[1].attn.v.weight, v.T),
        (ours.blocks[0].mlp.down.bias, theirs.transformer.h[0].mlp.c_proj.bias.grad),
        (ours.norm.weight, theirs.transformer.ln_f.weight.grad),
    ]:
        assert torch.allclose(mine.grad, want, atol=1e-4)


def test_exporting_a_model_that_no_plain_architecture_represents_is_an_error(tmp_path):
    with pytest.raises(OelmError, match="classification"):
        export_hf(GPT(gpt_config("smoke", vocab_size=9, classes=2)), tmp_path)
    for method, part in (("oelm-relative", "relative_bias"), ("oelm-conv", "conv")):
        with pytest.raises(
            OelmError, match=rf"cannot represent these parameters, which the method added.*{part}"
        ):
            export_hf(trained(method), tmp_path)
    model = GPT(gpt_config("smoke", vocab_size=9))
    model.blocks[0].attn.add_relative_bias(4)
    with pytest.raises(OelmError, match="relative_bias"):
        export_hf(model, tmp_path)
    assert not list(tmp_path.iterdir())


def test_importing_a_model_that_our_gpt_cannot_represent_is_an_error(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    shape = {"vocab_size": 9, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2}
    GPT2LMHeadModel(GPT2Config(**shape)).save_pretrained(tmp_path / "tanh")
    with pytest.raises(OelmError, match="gelu_new"):
        import_hf(tmp_path / "tanh")
    biased = GPT2LMHeadModel(GPT2Config(**shape, activation_function="gelu"))
    biased.transformer.h[0].attn.c_attn.bias.data.fill_(0.5)
    biased.save_pretrained(tmp_path / "biased")
    with pytest.raises(OelmError, match="no biases in attention"):
        import_hf(tmp_path / "biased")
    with pytest.raises(OelmError, match="not a Hugging Face model folder"):
        import_hf(tmp_path / "nothing")


@pytest.mark.parametrize(
    "setting",
    [
        {"tie_word_embeddings": False},
        {"layer_norm_epsilon": 1e-6},
        {"scale_attn_weights": False},
        {"scale_attn_by_inverse_layer_idx": True},
    ],
)
def test_importing_unsupported_gpt2_settings_is_an_error(tmp_path, setting):
    from transformers import GPT2Config, GPT2LMHeadModel

    shape = {"vocab_size": 9, "n_positions": 8, "n_embd": 8, "n_layer": 2, "n_head": 2}
    GPT2LMHeadModel(GPT2Config(**shape, activation_function="gelu", **setting)).save_pretrained(tmp_path)
    with pytest.raises(OelmError, match=f"does not support {next(iter(setting))}="):
        import_hf(tmp_path)


def test_importing_another_model_type_or_damaged_files_is_an_error(tmp_path):
    from transformers import BertConfig

    BertConfig().save_pretrained(tmp_path / "bert")
    with pytest.raises(OelmError, match="is a bert model; only GPT-2"):
        import_hf(tmp_path / "bert")
    for name, content in (("model.safetensors", b"nonsense"), ("config.json", b"{")):
        folder = tmp_path / name
        export_hf(trained(), folder)
        (folder / name).write_bytes(content)
        with pytest.raises(OelmError, match="cannot load"):
            import_hf(folder)
