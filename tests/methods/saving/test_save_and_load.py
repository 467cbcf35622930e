"""oelm.save and oelm.load: a loaded model is bit-equal and frozen as before, or loading is an error."""

import json
import os
import shutil
import socket
import subprocess
import sys

import pytest
import torch
from tiny_models import FAMILIES, applied_model, build, outputs
from transformers import PreTrainedModel

import oelm
from oelm.errors import OelmError
from oelm.methods.saving import save as save_module
from oelm.methods.saving.save import save_metadata


def half_trained(family, name):
    """Return a model in the middle of a run, with changed trainable tensors."""
    model = applied_model(family, name)
    oelm.Applied(model).step(5, 10)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(
                    0.01 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
                )
    return model


def loaded(folder, family):
    own = isinstance(build(family), PreTrainedModel) or family == "own-gpt"
    return oelm.load(folder).eval() if own else oelm.load(folder, model=build(family)).eval()


def same(a, b):
    pairs = zip(a.named_parameters(), b.named_parameters(), strict=True)
    return all(
        n == m and torch.equal(p, q) and p.requires_grad == q.requires_grad for (n, p), (m, q) in pairs
    )


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_loaded_bit_equal(family, compact, tmp_path):
    model = half_trained(family, "oelm-freeze")
    oelm.save(model, tmp_path, compact=compact)
    again = loaded(tmp_path, family)
    assert same(model, again)
    assert torch.equal(outputs(again), outputs(model))
    assert oelm.audit(again).ok


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("own-gpt", "oelm-plus"),
        ("llama", "oelm-plus"),
        ("qwen2", "oelm-plus"),
        ("own-gpt", "oelm-relative"),
        ("gpt2", "oelm-plus"),
        ("gpt2", "oelm-gradual"),
        ("llama", "oelm-core"),
        ("vit", "oelm-lowrank"),
        ("bert", "oelm-early"),
        ("bert", "oelm-pretrained"),
        ("bert", "oelm-freeze-matched"),
        ("modernbert", "oelm-qk-ffn"),
        ("t5", "oelm-partial"),
        ("gpt2", "orthogonal-init"),
    ],
)
def test_every_kind_of_method_is_loaded_bit_equal(family, name, compact, tmp_path):
    model = half_trained(family, name)
    oelm.save(model, tmp_path, compact=compact)
    again = loaded(tmp_path, family)
    assert same(model, again)
    assert torch.equal(outputs(again), outputs(model))
    assert oelm.audit(again).ok


@pytest.mark.parametrize(
    ("name", "compact"),
    [("oelm-freeze", False), ("oelm-freeze", True), ("oelm-plus", False), ("oelm-conv", False)],
)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_model_with_several_dtypes_is_loaded_bit_equal(family, name, compact, tmp_path):
    """Frozen weights may be stored in a smaller dtype than those that train."""
    model = half_trained(family, name)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.double() / 3
    oelm.save(model, tmp_path, compact=compact)
    again = loaded(tmp_path, family)
    assert same(model, again)
    assert [p.dtype for p in again.parameters()] == [p.dtype for p in model.parameters()]


def test_training_continues_bit_equal_after_loading(tmp_path):
    def train(model, start, stop):
        applied = oelm.Applied(model)
        for step in range(start, stop):
            applied.step(step, 10)
            model.zero_grad()
            outputs(model).square().mean().backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.requires_grad:
                        parameter.sub_(parameter.grad)

    uninterrupted, first_half = (applied_model("gpt2", "oelm-gradual") for _ in range(2))
    train(uninterrupted, 0, 10)
    train(first_half, 0, 5)
    oelm.save(first_half, tmp_path)
    again = loaded(tmp_path, "gpt2")
    assert oelm.Applied(again).progress == 0.4  # of the last call of step
    train(again, 5, 10)
    assert same(uninterrupted, again)


def test_a_compact_save_is_smaller_by_the_rebuilt_tensors(tmp_path):
    model = half_trained("gpt2", "oelm-freeze")
    frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    sizes = {}
    for compact in (False, True):
        oelm.save(model, tmp_path / str(compact), compact=compact)
        sizes[compact] = sum(f.stat().st_size for f in (tmp_path / str(compact)).glob("*.safetensors"))
    assert sizes[False] - sizes[True] == pytest.approx(4 * frozen, rel=0.2)


def test_saving_removes_the_files_of_an_older_save(tmp_path):
    oelm.save(half_trained("own-gpt", "oelm-plus"), tmp_path, compact=True)
    later = half_trained("own-gpt", "oelm-freeze")
    oelm.save(later, tmp_path)
    assert same(later, oelm.load(tmp_path))
    assert not list(tmp_path.glob("oelm_*"))


@pytest.mark.parametrize("family", ["own-gpt", "llama", "torch-encoder"])
@pytest.mark.parametrize("compact", [False, True])
def test_a_save_that_fails_leaves_the_earlier_one(family, compact, tmp_path, monkeypatch):
    earlier = half_trained(family, "oelm-freeze")
    oelm.save(earlier, tmp_path)
    files = sorted(path.name for path in tmp_path.iterdir())

    def full_disk(*args, **kwargs):
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(save_module, "write_checksums", full_disk)
        with pytest.raises(OSError, match="No space"):
            oelm.save(half_trained(family, "oelm-random"), tmp_path, compact=compact)
    assert sorted(path.name for path in tmp_path.iterdir()) == files
    assert same(earlier, loaded(tmp_path, family))


def test_saving_keeps_files_of_the_user(tmp_path):
    ours = ["model.safetensors.index.json", "model-00001-of-00002.safetensors"]
    users = ["model_ema.safetensors", "model.safetensors.bak"]
    for name in [*ours, *users]:
        (tmp_path / name).write_text("{}")
    oelm.save(half_trained("own-gpt", "oelm-freeze"), tmp_path)
    left = {path.name for path in tmp_path.iterdir()}
    assert left.issuperset(users)
    assert left.isdisjoint(ours)


def test_saving_deletes_the_folders_of_killed_saves_only(tmp_path):
    killed = subprocess.Popen([sys.executable, "-c", ""])
    killed.wait()
    host = socket.gethostname()
    names = {pid: f".oelm-save-{host}-{pid}-x" for pid in (killed.pid, os.getppid())}
    names["other host"] = ".oelm-save-elsewhere-1-x"
    for name in names.values():
        (tmp_path / name).mkdir()
    oelm.save(half_trained("own-gpt", "oelm-freeze"), tmp_path)
    assert {path.name for path in tmp_path.glob(".oelm*")} == {names[os.getppid()], names["other host"]}


class Counter(torch.nn.Module):
    def __init__(self, state):
        super().__init__()
        self.state = state

    def get_extra_state(self):
        return self.state

    def set_extra_state(self, state):
        self.state = state


@pytest.mark.parametrize("compact", [False, True])
def test_an_extra_state_is_saved_or_refused(compact, tmp_path):
    def build_with(state):
        model = build("torch-encoder")
        model.counter = Counter(state)
        return model

    model = build_with(torch.tensor(7))
    oelm.apply(model, "oelm-freeze")
    if compact:
        with pytest.raises(OelmError, match=r"'counter' has an extra state .* save without compact=True"):
            oelm.save(model, tmp_path, compact=True)
    else:
        oelm.save(model, tmp_path)
        assert oelm.load(tmp_path, model=build_with(torch.tensor(0))).counter.state == 7
    model.counter.state = {"seen": 7}
    with pytest.raises(OelmError, match=r"'counter' has an extra state .* keep it in a buffer"):
        oelm.save(model, tmp_path / "other", compact=compact)


def test_buffers_that_overlap_in_memory_are_saved(tmp_path):
    def build_with(start):
        model, values = build("torch-encoder"), torch.arange(start, start + 9.0)
        model.register_buffer("head", values[:6])
        model.register_buffer("tail", values[3:])
        return model

    model = build_with(0)
    oelm.apply(model, "oelm-freeze")
    for compact in (False, True):
        oelm.save(model, tmp_path, compact=compact)
        back = oelm.load(tmp_path, model=build_with(1))
        assert torch.equal(back.tail, model.tail)


def test_the_error_names_what_is_wrong_with_a_folder(tmp_path):
    (tmp_path / "file").touch()
    for call in (oelm.load, lambda path: oelm.save(applied_model("own-gpt"), path)):
        with pytest.raises(OelmError, match="file is not a folder"):
            call(tmp_path / "file")
    oelm.save(applied_model("own-gpt"), tmp_path / "single")
    with pytest.raises(OelmError, match=r"saved in float32, but .* is torch\.float64; pass"):
        oelm.load(tmp_path / "single", build("own-gpt").double())
    with pytest.raises(OelmError, match="is not a folder"):
        oelm.load(tmp_path / "nowhere")
    build("bert").save_pretrained(tmp_path / "plain")
    with pytest.raises(OelmError, match=r"contains no oelm\.json"):
        oelm.load(tmp_path / "plain")

    good = tmp_path / "good"
    oelm.save(half_trained("own-gpt", "oelm-plus"), good)

    config = json.loads((good / "config.json").read_text(encoding="utf-8"))

    def reshape(**fields):
        return lambda folder: (folder / "config.json").write_text(
            json.dumps({**config, **fields}), encoding="utf-8"
        )

    def damaged(name, change):
        folder = tmp_path / name
        shutil.copytree(good, folder)
        change(folder)
        return folder

    def edit(**fields):
        def change(folder):
            about = json.loads((folder / "oelm.json").read_text(encoding="utf-8"))
            (folder / "oelm.json").write_text(json.dumps({**about, **fields}), encoding="utf-8")

        return change

    cases = [
        ("cut", lambda f: (f / "oelm.json").write_text("{", encoding="utf-8"), "oelm.json: not JSON"),
        ("list", lambda f: (f / "oelm.json").write_text("[]", encoding="utf-8"), "oelm.json"),
        ("future", edit(format=99), "format 99"),
        ("code", edit(model_class="os:system"), "custom class"),
        ("gone", edit(model_class="oelm.models.gpt:GPT9"), "has no such class"),
        ("noclass", edit(model_class="oelm.models.gpt:gpt_config"), "not a model class"),
        ("other", edit(tensors=[]), "a different architecture"),
        ("weights", lambda f: (f / "model.safetensors").unlink(), "missing"),
        ("dtype", edit(dtype="load"), "field dtype has an invalid value"),
        ("position", edit(progress=7), "field progress has an invalid value"),
        ("text", edit(progress="0.5"), "field progress has an invalid value"),
        ("seed", edit(seed=None), "field seed has an invalid value"),
        ("kind", edit(kind="anything"), "field kind has an invalid value"),
        ("names", edit(tensors=[{"name": [], "sha256": ""}]), "damaged"),
        ("frozen", edit(frozen_before=["no.such.tensor"]), "has no no.such.tensor"),
        ("method", edit(method={"init": "keep"}), "damaged: a method must be a mapping"),
        ("typo", edit(method={"name": "x", "init": "headwize"}), "damaged: unknown init"),
        ("block", edit(model_class="oelm.models.gpt:Block"), "not a model class"),
        ("swap", edit(kind="transformers"), "not a model class"),
        ("heads", reshape(heads=config["heads"] // 2), "was saved with"),
        ("shape", reshape(width="32"), "config.json"),
        ("field", reshape(new=1), "config.json"),
        ("nojson", lambda f: (f / "config.json").write_text("{", encoding="utf-8"), "config.json"),
        ("width", reshape(ff=config["ff"] * 2), "a different shape"),
        ("extras", lambda f: (f / "oelm_extras.safetensors").write_bytes(b"nonsense"), "damaged"),
    ]
    for name, change, word in cases:
        with pytest.raises(OelmError, match=word):
            oelm.load(damaged(name, change))


def test_loading_a_changed_frozen_tensor_is_an_error(tmp_path):
    model = half_trained("own-gpt", "oelm-freeze")
    oelm.save(model, tmp_path)
    with torch.no_grad():
        model.blocks[0].attn.q.weight[0, 0] += 1e-6
    model.save(tmp_path)
    (tmp_path / "checksums.json").unlink()  # as in a folder that `oelm.save` did not write
    with pytest.raises(OelmError, match=r"blocks\.0\.attn\.q\.weight.*hash differs"):
        oelm.load(tmp_path)


@pytest.mark.parametrize(("family", "compact"), [("own-gpt", False), ("bert", False), ("bert", True)])
def test_a_flipped_bit_in_a_trained_tensor_is_an_error(family, compact, tmp_path):
    oelm.save(half_trained(family, "oelm-plus"), tmp_path, compact=compact)
    assert oelm.audit(oelm.load(tmp_path)).ok
    file = next(tmp_path.glob("oelm_compact.safetensors" if compact else "model.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(OelmError, match=r"damaged.*has changed since it was written"):
        oelm.load(tmp_path)


@pytest.mark.parametrize("compact", [False, True])
def test_saving_a_cast_model_is_an_error(compact, tmp_path):
    model = half_trained("bert", "oelm-freeze")
    with pytest.raises(OelmError, match="something wrote to it or cast it"):
        oelm.save(model.half(), tmp_path / "half", compact=compact)
    assert not (tmp_path / "half").exists()


@pytest.mark.parametrize("compact", [False, True])
def test_loading_a_damaged_transformers_folder_is_an_error(compact, tmp_path):
    oelm.save(half_trained("bert", "oelm-freeze"), tmp_path / "good", compact=compact)

    def damaged(name, content):
        folder = tmp_path / f"{name}-{content}"
        shutil.copytree(tmp_path / "good", folder)
        (folder / name).unlink()
        if content is not None:
            (folder / name).write_bytes(content)
        return folder

    weights = "oelm_compact.safetensors" if compact else "model.safetensors"
    for name in (weights, "config.json"):
        for content in (None, b"", b"[1]"):
            with pytest.raises(OelmError, match=r"cannot load the model|is missing|is damaged|do not match"):
                oelm.load(damaged(name, content))


@pytest.mark.parametrize("name", ["oelm-freeze", "oelm-plus"])
def test_a_part_that_the_class_does_not_build_is_not_random_after_loading(name, tmp_path):
    def changed():
        model = build("bert")
        width = model.classifier.in_features
        model.classifier = torch.nn.Sequential(torch.nn.Linear(width, 3), torch.nn.Linear(3, 2))
        return model

    model = changed().eval()
    oelm.apply(model, name)
    oelm.save(model, tmp_path)
    with pytest.raises(OelmError, match=r"^[^:]*: the saved weights do not match.*'classifier.bias'.*model="):
        oelm.load(tmp_path)
    assert torch.equal(outputs(oelm.load(tmp_path, model=changed()).eval()), outputs(model))


def test_a_compiled_layer_is_not_random_after_loading(tmp_path):
    model = half_trained("llama", "oelm-freeze")
    model.model.layers[0].mlp = torch.compile(model.model.layers[0].mlp)
    oelm.save(model, tmp_path)
    with pytest.raises(OelmError, match=r"do not match the model.*_orig_mod"):
        oelm.load(tmp_path)


def test_another_number_of_heads_in_a_config_is_an_error(tmp_path):
    oelm.save(half_trained("bert", "oelm-freeze"), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_attention_heads": 2}), encoding="utf-8")
    with pytest.raises(
        OelmError, match="was saved with 4 heads of size 8, but this model has 2 heads of size 16"
    ):
        oelm.load(tmp_path)


def test_weights_in_shards(tmp_path):
    model = half_trained("gpt2", "oelm-freeze")
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    save_metadata(model, tmp_path)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    assert same(model, oelm.load(tmp_path))
    assert same(model, oelm.load(tmp_path, model=build("gpt2")))
    oelm.save(model, tmp_path, compact=True)  # this must remove the shards
    assert not list(tmp_path.glob("model*"))
    assert same(model, oelm.load(tmp_path))


def test_a_save_in_shards_replaces_a_single_file_and_the_reverse(tmp_path):
    model = half_trained("gpt2", "oelm-freeze")
    for size in ("1GB", "20KB", "1GB"):
        with torch.no_grad():
            model.transformer.ln_f.bias.add_(1)
        model.save_pretrained(tmp_path, max_shard_size=size)
        assert same(model, oelm.load(tmp_path))
        assert (tmp_path / "model.safetensors").exists() != (
            tmp_path / "model.safetensors.index.json"
        ).exists()


def test_a_wrong_seed_in_a_compact_save_is_an_error(tmp_path):
    oelm.save(half_trained("gpt2", "oelm-freeze"), tmp_path, compact=True)
    about = json.loads((tmp_path / "oelm.json").read_text(encoding="utf-8"))
    (tmp_path / "oelm.json").write_text(json.dumps({**about, "seed": 2}), encoding="utf-8")
    with pytest.raises(OelmError, match="rebuilt from the seed"):
        oelm.load(tmp_path)


def test_another_dtype_of_the_model_for_a_compact_save_is_named(tmp_path):
    model = build("torch-encoder").double()
    oelm.apply(model, "oelm-freeze", verify=False)
    oelm.save(model, tmp_path, compact=True)
    with pytest.raises(OelmError, match=r"was saved in float64, but .* of the given model is torch.float32"):
        oelm.load(tmp_path, model=build("torch-encoder"))


def test_save_needs_a_method_and_load_needs_a_plain_model(tmp_path):
    with pytest.raises(OelmError, match="no method was applied"):
        oelm.save(build("bert"), tmp_path)
    model = half_trained("torch-encoder", "oelm-freeze")
    oelm.save(model, tmp_path)
    with pytest.raises(OelmError, match="custom class"):
        oelm.load(tmp_path)
    with pytest.raises(OelmError, match="a method was already applied"):
        oelm.load(tmp_path, model=model)


def test_remove_after_loading_turns_the_cache_on_again(tmp_path):
    oelm.save(applied_model("llama", "oelm-conv"), tmp_path)
    model = oelm.load(tmp_path)
    assert not model.config.use_cache
    oelm.remove(model, fold=False)
    assert model.config.use_cache
    about = json.loads((tmp_path / "oelm.json").read_text(encoding="utf-8"))
    del about["use_cache"]  # as in a folder of an earlier version
    (tmp_path / "oelm.json").write_text(json.dumps(about), encoding="utf-8")
    assert not oelm.load(tmp_path).config.use_cache


def test_transformers_refuses_a_compact_folder(tmp_path):
    model = half_trained("bert", "oelm-freeze")
    oelm.save(model, tmp_path, compact=True)
    with pytest.raises(OSError, match=r"safetensors"):
        type(model).from_pretrained(tmp_path)
