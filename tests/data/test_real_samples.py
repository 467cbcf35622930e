"""The nine datasets of the original study, read from a folder of real samples."""

from pathlib import Path

import pytest

from oelm.data.batches.classification import encode_split
from oelm.data.batches.language_model import LMBatches
from oelm.data.checks import check_corpus
from oelm.data.sources.open import open_corpus
from oelm.data.tokenize.tokenizers import load_tokenizer
from oelm.data.tokenize.tokens import prepare_tokens

NAMES = ("tinystories", "openwebtext", "wikitext103", "wikitext2", "imdb", "agnews", "xnli", "mnli", "sst2")
CHOICES = [(name, "") for name in NAMES if name != "wikitext103"]  # its sample has no train split


@pytest.mark.parametrize(("name", "variant"), [*CHOICES, ("xnli", "es"), ("mnli", "mismatched")])
def test_a_real_sample_has_no_errors(shared_data: Path, name: str, variant: str) -> None:
    corpus = open_corpus(name, variant=variant, data_dir=shared_data)
    report = check_corpus(corpus, batch_size=32)
    assert report.ok, str(report)
    assert "local folder" in report.origin
    if corpus.task == "classification":
        assert all(len(check.labels) == len(corpus.label_names) for check in report.splits.values())


@pytest.mark.parametrize("name", NAMES)
def test_tokens_of_a_real_sample_decode_to_its_text(shared_data: Path, name: str) -> None:
    corpus = open_corpus(name, data_dir=shared_data).limit(test=25)
    gpt2 = load_tokenizer("gpt2", data_dir=shared_data)
    rows = list(corpus.rows("test"))
    if corpus.task == "lm":
        tokens = prepare_tokens(corpus, "test", gpt2)
        offsets = tokens.offsets
        for number, row in enumerate(rows):  # the decoded documents equal the original texts
            assert gpt2.decode(tokens.ids[offsets[number] : offsets[number + 1] - 1]) == row["text"]
        assert LMBatches(tokens, 128, 4, 0).batch(3).shape == (4, 129)
    else:
        encoded = encode_split(corpus, "test", gpt2, 128)
        assert encoded.labels.tolist() == [row["label"] for row in rows]
        assert encoded.collate(range(25))[0].shape[0] == 25
