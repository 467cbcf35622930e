"""`oelm.model_card` describes a model with a method; `oelm.push_to_hub` uploads it to Hugging Face."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from oelm.errors import OelmError, first_line, missing_library
from oelm.methods.apply import Applied
from oelm.methods.audit import audit
from oelm.methods.reading.wrappers import unwrap
from oelm.methods.record import require_record
from oelm.methods.saving.metadata import kind_of
from oelm.methods.saving.plain import plain_model
from oelm.methods.saving.save import save

_AUTO_CLASSES = {
    "ForCausalLM": "AutoModelForCausalLM",
    "LMHeadModel": "AutoModelForCausalLM",
    "ForSequenceClassification": "AutoModelForSequenceClassification",
    "ForImageClassification": "AutoModelForImageClassification",
}


def model_card(
    model: nn.Module,
    *,
    name: str = "",
    data: str = "",
    results: Mapping[str, float] | None = None,
    usage: str = "",
) -> str:
    """Return the text of a model card (README.md): method, parameter counts, audit, data and results.

    Args:
        name: Title of the card; by default the class of the model.
        data: What the model was trained on, for example a dataset's name.
        results: Measured values by name, for example `{"test accuracy": 0.91}`.
        usage: Python code that loads the model; by default, code for a folder written by `oelm.save()`.

    Examples:
        >>> import torch, oelm
        >>> encoder = torch.nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
        >>> applied = oelm.apply(encoder, "oelm-freeze", seed=42)
        >>> print(model_card(encoder, name="Tiny", results={"test accuracy": 0.5}).splitlines()[6])
        # Tiny
    """
    record = require_record(model, "model_card")
    plain, counts, report = unwrap(model), Applied(model), audit(model)
    facts = {
        "method": f"`{record.method.name}`: {record.method.purpose}",
        "seed of the method": str(record.seed),
        "parameters": f"{counts.total:,} ({counts.trainable:,} trained, {counts.frozen:,} frozen)",
        "parameters of Q/K": f"{counts.qk_total:,} ({counts.qk_trainable:,} trained)",
        "audit": f"{'ok' if report.ok else 'NOT ok'}, {len(report.rows)} tensors checked",
        "trained on": data or "not stated",
        **{key: f"{value:.6g}" for key, value in (results or {}).items()},
    }
    library = "library_name: transformers\n" if kind_of(plain) == "transformers" else ""
    rows = "\n".join(f"| {key} | {value} |" for key, value in facts.items())
    return (
        f"---\n{library}tags:\n- oelm\n- frozen-attention\n---\n\n# {name or type(plain).__name__}\n\n"
        f"The library oelm prepared the query and key projections (Q/K) of this model.\n\n"
        f"| | |\n|---|---|\n{rows}\n\n## Load\n\n```python\n{usage or _usage(plain)}\n```\n"
    )


def _usage(model: nn.Module, repo: str = "") -> str:
    """Return Python code that loads the model from the repository `repo`, or from a local folder."""
    lines, kind, name = ["import oelm"], kind_of(model), type(model).__name__
    folder = f'snapshot_download("{repo}")' if repo else '"FOLDER"'
    if repo:
        lines.append("from huggingface_hub import snapshot_download")
    auto = next((auto for end, auto in _AUTO_CLASSES.items() if name.endswith(end)), "")
    if kind == "transformers" and auto:
        what = "the plain model" if plain_model(model) is not None else "through oelm"
        lines.append(f"from transformers import {auto}\n")
        lines.append(f'model = {auto}.from_pretrained("{repo or "FOLDER"}")  # {what}')
    else:
        lines.append("")
    lines.append(
        f"model = oelm.load({folder}{', model=MyModel()' if kind == 'module' else ''})  # with the method"
    )
    return "\n".join(lines)


def push_to_hub(
    model: nn.Module,
    repo: str,
    *,
    data: str = "",
    results: Mapping[str, float] | None = None,
    compact: bool = False,
    private: bool = True,
    api: Any = None,
) -> str:
    """Upload a model with its method and a model card to the Hugging Face Hub; return the URL.

    Log in first with `hf auth login`.

    Args:
        repo: Name of the repository, such as "me/frozen-bert". It is created if it does not exist.
        data: For the model card; see `oelm.model_card()`.
        results: For the model card; see `oelm.model_card()`.
        compact: As in `oelm.save()`.
        private: Whether a new repository is private.
        api: A `huggingface_hub.HfApi`, for example with a different endpoint.
    """
    with tempfile.TemporaryDirectory() as folder:
        save(model, folder, compact=compact)
        title, usage = repo.rpartition("/")[2], _usage(unwrap(model), repo)
        card = model_card(model, name=title, data=data, results=results, usage=usage)
        (Path(folder) / "README.md").write_text(card, encoding="utf-8")
        return upload_folder(folder, repo, private=private, api=api)


def upload_folder(folder: Path | str, repo: str, *, private: bool = True, api: Any = None) -> str:
    """Upload a folder to the repository `repo`, which is created if it does not exist; return its URL."""
    try:
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError
    except ModuleNotFoundError as error:
        raise missing_library(error, "oelm.push_to_hub") or error from None
    api = api or HfApi()
    try:
        repo = api.create_repo(repo, private=private, exist_ok=True).repo_id
        api.upload_folder(repo_id=repo, folder_path=str(folder), commit_message="Upload a model of oelm")
    except (HfHubHTTPError, HFValidationError, LocalTokenNotFoundError, OSError) as error:
        raise OelmError(
            f"cannot upload to {repo}: {first_line(error)}.",
            remedy="check the network and the name, and log in with `hf auth login`",
        ) from None
    return f"https://huggingface.co/{repo}"
