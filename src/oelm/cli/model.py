"""`oelm generate` and `oelm export`: sample text from a trained model, or save it for transformers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from oelm.cli.options import OUTPUT, Json, Runs
from oelm.cli.output import print, print_json
from oelm.cli.values import Count, Integer
from oelm.config.run_config import Scale
from oelm.data.sources.readers import is_utf8
from oelm.errors import OelmError, UsageError
from oelm.files.atomic import write_text
from oelm.runs.folder import RunFolder
from oelm.runs.scan import find_run


@Parameter(name="*")
@dataclass(frozen=True)
class OneRun:
    """Options that select one run of an experiment that has several runs."""

    scale: Scale | None = None
    """Scale of the run."""
    seed: Integer | None = None
    """Seed of the run."""
    runs: Runs = "runs"

    def folder(self, run: str) -> RunFolder:
        """Return the folder of a run; raise OelmError if it has no best model yet.

        run: path of a run folder, or an experiment ID
        """
        folder = RunFolder(find_run(self.runs, run, scale=self.scale or "", seed=self.seed))
        if not folder.best.is_dir():
            raise OelmError(
                f"{folder.path} has no best model: a run has one after its first validation, and a tuning "
                "trial only until it ends"
            )
        return folder


def generate_text(
    run: str,
    /,
    *,
    prompt: str,
    tokens: Count = 100,
    temperature: float = 0.8,
    top_k: Count = 0,
    top_p: float = 1.0,
    sample_seed: Integer = 0,
    which: OneRun = OneRun(),
    json: Json = False,
) -> None:
    """Print the prompt and the text with which the best model of a run continues it.

    Parameters
    ----------
    run
        Run folder, or the ID of an experiment.
    prompt
        Text to continue.
    tokens
        Maximum number of new tokens.
    temperature
        Sampling temperature; 0 = always the most likely token.
    top_k
        Sample from the K most likely tokens; 0 = all.
    top_p
        Sample from the most likely tokens whose probabilities sum to P; 1 = all.
    sample_seed
        Seed of the sampling (not of the run).
    """
    if not 0 <= sample_seed < 2**63:
        raise UsageError(f"--sample-seed must be a whole number from 0 to 2^63 - 1, not {sample_seed}")
    folder = which.folder(run)
    if folder.config().task != "lm":
        raise OelmError(
            f"{folder.path} cannot generate text: its task is {folder.config().task}, "
            "and only language models (task lm) generate text"
        )
    if not is_utf8(prompt):
        raise UsageError("the prompt is not valid UTF-8: give it in UTF-8")
    import torch

    from oelm.data.tokenize.tokenizers import Tokenizer
    from oelm.methods.saving.load import load
    from oelm.models.generate import generate
    from oelm.models.gpt import GPT

    model, tokenizer = load(folder.best), Tokenizer.load(folder.best)
    assert isinstance(model, GPT)
    start = tokenizer.encode(prompt)
    if not start:
        raise UsageError("the prompt is empty: give at least one word")
    ids = generate(
        model,
        torch.tensor(start),
        tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        generator=torch.Generator().manual_seed(sample_seed),
        stop_id=tokenizer.eos_id,
    )
    new = ids[len(start) :].tolist()
    text = tokenizer.decode([token for token in new if token != tokenizer.eos_id])
    if json:
        print_json({"run": str(folder.path), "prompt": prompt, "text": text, "tokens": len(new)})
    else:
        print(prompt + text)


def export(
    run: str,
    /,
    *,
    output: Annotated[str, OUTPUT] = "",
    push_to_hub: str = "",
    public: Annotated[bool, Parameter(negative=())] = False,
    which: OneRun = OneRun(),
    json: Json = False,
) -> None:
    """Write the best model of a run, its tokenizer and a model card to a folder; upload the folder if asked.

    Parameters
    ----------
    run
        Run folder, or the ID of an experiment.
    output
        Folder to write to (default: exports/<ID>).
    push_to_hub
        Repository on the Hugging Face hub, such as me/my-model, to which the folder is uploaded.
    public
        Make a new repository visible to everybody; by default it is private.
    """
    if public and not push_to_hub:
        raise UsageError("--public has no effect without --push-to-hub REPO: add that, or leave --public out")
    folder = which.folder(run)
    results, config = folder.results(), folder.config()  # read before anything is written: it may be damaged
    target = Path(output or Path("exports") / config.id)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UsageError(f"{target} already exists and is not an empty folder; give another with -o")
    from oelm.data.tokenize.tokenizers import Tokenizer
    from oelm.methods.saving.hub import model_card, upload_folder
    from oelm.methods.saving.load import load
    from oelm.methods.saving.save import save
    from oelm.models.gpt import GPT
    from oelm.models.huggingface import export_hf

    model, tokenizer = load(folder.best), Tokenizer.load(folder.best)
    if isinstance(model, GPT):
        export_hf(model, target, eos_id=tokenizer.eos_id)
        usage = (
            "from transformers import AutoModelForCausalLM\n\n"
            f'model = AutoModelForCausalLM.from_pretrained("{push_to_hub or "FOLDER"}")'
        )
    else:
        save(model, target)
        usage = ""
    tokenizer.save(target)
    scores = results.test if results is not None else None
    measured = {} if scores is None else {"test perplexity": scores.ppl, "test accuracy": scores.accuracy}
    card = model_card(
        model,
        name=f"{config.id}, scale {config.scale}, seed {config.seed}",
        data=_data_of(folder),
        results={name: value for name, value in measured.items() if value is not None},
        usage=usage,
    )
    write_text(target / "README.md", card)
    address = upload_folder(target, push_to_hub, private=not public) if push_to_hub else ""
    if json:
        print_json({"run": str(folder.path), "folder": str(target), "address": address})
    else:
        print(f"{target}: load it with transformers' from_pretrained")
        if address:
            print(address)


def _data_of(folder: RunFolder) -> str:
    """Return what a run was trained on, for the model card; the user's folders are not named."""
    config, manifest = folder.config(), folder.manifest()
    if manifest is None:
        return config.data.dataset
    name = manifest.data.origin if config.data.source == "builtin" else config.data.dataset
    rows = manifest.data.rows.get("train")
    return f"{name} ({rows:,} rows)" if rows else name
