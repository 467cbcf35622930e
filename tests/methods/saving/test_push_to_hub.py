"""The model card, and the upload to the hub with a fake of its API."""

from types import SimpleNamespace

import pytest
import torch
from huggingface_hub.errors import HFValidationError
from tiny_models import applied_model, outputs, trained_model
from transformers import AutoModelForCausalLM

import oelm
from oelm.methods.saving.hub import upload_folder


class FakeApi:
    """Keeps what it is asked to upload."""

    def __init__(self, root):
        self.root, self.private = root, None

    def create_repo(self, repo, *, private, exist_ok):
        assert exist_ok
        if repo.count("/") > 1:
            raise HFValidationError("Repo id must be in the form 'namespace/repo_name'")
        self.private = private
        return SimpleNamespace(repo_id=repo)

    def upload_folder(self, *, repo_id, folder_path, commit_message):
        import shutil

        assert commit_message
        shutil.copytree(folder_path, self.root / repo_id)


@pytest.mark.parametrize("method", ["oelm-lowrank", "oelm-conv"])
def test_what_was_pushed_loads_and_its_card_says_how(method, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model, api = trained_model("llama", method), FakeApi(tmp_path)
    address = oelm.push_to_hub(model, "me/tiny", data="reviews", results={"test loss": 1.25}, api=api)
    assert address == "https://huggingface.co/me/tiny"
    assert api.private
    card = (tmp_path / "me" / "tiny" / "README.md").read_text(encoding="utf-8")
    applied = oelm.apply(applied_model_of(model), method)
    for fact in (
        "library_name: transformers",
        f"`{method}`",
        f"{applied.total:,} ({applied.trainable:,} trained",
        "| audit | ok",
        "| trained on | reviews |",
        "| test loss | 1.25 |",
        'AutoModelForCausalLM.from_pretrained("me/tiny")',
    ):
        assert fact in card
    assert torch.equal(outputs(oelm.load("me/tiny")), outputs(model))
    auto = AutoModelForCausalLM.from_pretrained("me/tiny").eval()
    assert torch.allclose(outputs(auto), outputs(model), atol=1e-4)


def applied_model_of(model):
    """Return a new plain model of the same config."""
    return type(model)(model.config)


def test_a_card_of_a_model_of_your_own_names_the_call_that_loads_it():
    encoder = torch.nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    oelm.apply(encoder, "oelm-freeze")
    card = oelm.model_card(encoder)
    assert "# TransformerEncoderLayer" in card
    assert "model=MyModel()" in card
    assert "library_name" not in card
    with pytest.raises(oelm.OelmError, match=r"call oelm\.apply first"):
        oelm.model_card(torch.nn.Linear(2, 2))


def test_a_wrong_name_says_what_to_do(tmp_path):
    with pytest.raises(oelm.OelmError, match=r"cannot upload to a/b/c: .*\n.*hf auth login"):
        upload_folder(tmp_path, "a/b/c", api=FakeApi(tmp_path))


def test_a_damaged_audit_shows_in_the_card():
    model = applied_model("llama")
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight.add_(1)
    assert "| audit | NOT ok" in oelm.model_card(model)


def test_saving_does_not_upload_a_folder_without_the_files_of_oelm(tmp_path):
    with pytest.raises(oelm.OelmError, match=r"use oelm\.push_to_hub"):
        applied_model("llama").save_pretrained(tmp_path, push_to_hub=True)
    assert list(tmp_path.iterdir()) == []
