import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oelm.data.batches.classification import BatchPlan, EncodedSplit, encode_split, eval_batches
from oelm.data.sources.open import open_corpus
from oelm.data.tokenize.tokenizers import Tokenizer, load_tokenizer
from oelm.errors import UsageError

lengths = st.lists(st.integers(1, 64), min_size=1, max_size=200)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    corpus = open_corpus("stories-pairs").limit(train=200)
    return load_tokenizer("bpe-400", corpus=corpus, cache_dir=tmp_path_factory.mktemp("bpe"))


@pytest.fixture
def pairs(tokenizer: Tokenizer) -> EncodedSplit:
    return encode_split(open_corpus("stories-pairs").limit(test=60), "test", tokenizer, 48)


@settings(deadline=None)
@given(lengths, st.integers(1, 20), st.integers(0, 2**32), st.integers(0, 3))
def test_every_row_exactly_once_per_epoch(rows: list[int], size: int, seed: int, epoch: int) -> None:
    plan = BatchPlan(rows, size, seed)
    count = plan.batches_per_epoch
    batches = [plan.batch(index) for index in range(epoch * count, (epoch + 1) * count)]
    assert sorted(np.concatenate(batches).tolist()) == list(range(len(rows)))
    assert sorted(map(len, batches), reverse=True)[: count - 1] == [size] * (count - 1)


@settings(deadline=None)
@given(
    lengths, st.integers(1, 9), st.integers(0, 1000), st.lists(st.integers(0, 500), min_size=1, max_size=5)
)
def test_a_batch_does_not_depend_on_the_batches_read_before(
    rows: list[int], size: int, seed: int, order: list[int]
) -> None:
    plan = BatchPlan(rows, size, seed)
    asked = {index: plan.batch(index).tolist() for index in order}
    for index, batch in asked.items():  # a new plan that starts at this batch, as in a resumed run
        assert BatchPlan(rows, size, seed).batch(index).tolist() == batch


def test_epochs_and_seeds_differ_and_batches_are_not_sorted_by_length() -> None:
    rows = np.random.default_rng(0).integers(5, 100, 1000)
    plan = BatchPlan(rows, 10, 0)
    epochs = [[plan.batch(i + e * 100).tolist() for i in range(100)] for e in range(2)]
    assert epochs[0] != epochs[1]
    assert plan.batch(0).tolist() != BatchPlan(rows, 10, 1).batch(0).tolist()
    longest = [rows[batch].max() for batch in epochs[0]]
    assert abs(np.corrcoef(longest, np.arange(100))[0, 1]) < 0.5


def test_padding_share_is_small_and_correct() -> None:
    rows = np.random.default_rng(0).integers(5, 100, 4000)
    plan = BatchPlan(rows, 16, 0)
    padded = sum(len(b) * rows[b].max() for b in (plan.batch(i) for i in range(plan.batches_per_epoch)))
    assert plan.padding_share() == pytest.approx(1 - rows.sum() / padded)
    assert plan.padding_share() < 0.05
    assert plan.padding_share(pad_to=512) == pytest.approx(1 - rows.sum() / (4000 * 512))


def test_invalid_batch_plans_are_errors() -> None:
    for lengths, batch_size in (([], 4), ([3], 0)):
        with pytest.raises(UsageError):
            BatchPlan(lengths, batch_size, 0)


def test_encoded_rows_are_the_output_of_the_tokenizer(pairs: EncodedSplit, tokenizer: Tokenizer) -> None:
    source = list(open_corpus("stories-pairs").limit(test=60).rows("test"))
    rows, second_starts = tokenizer.encode_pairs([(row["premise"], row["hypothesis"]) for row in source], 48)
    assert pairs.labels.tolist() == [row["label"] for row in source]
    assert pairs.lengths.tolist() == [len(row) for row in rows]
    assert max(pairs.lengths) == 48  # truncated
    ids, lengths, labels = pairs.collate([7, 3])
    assert ids.shape == (2, max(pairs.lengths[7], pairs.lengths[3]))
    for place, number in enumerate((7, 3)):
        assert ids[place, : lengths[place]].tolist() == rows[number].tolist()
        assert (ids[place, lengths[place] :] == tokenizer.pad_id).all()
    assert labels.tolist() == [source[7]["label"], source[3]["label"]]
    assert ids.dtype == lengths.dtype == labels.dtype == torch.int64
    types = pairs.token_types([7, 3], ids.shape[1])
    for place, number in enumerate((7, 3)):
        expected = [int(second_starts[number] <= i < lengths[place]) for i in range(ids.shape[1])]
        assert types[place].tolist() == expected


def test_rows_can_be_padded_to_a_fixed_width(pairs: EncodedSplit) -> None:
    assert pairs.collate([0, 1], pad_to=64)[0].shape == (2, 64)


def test_single_texts_have_no_second_segment(tokenizer: Tokenizer) -> None:
    rows = encode_split(open_corpus("stories-2way").limit(test=5), "test", tokenizer, 64)
    assert rows.token_types([0, 1], 64).sum() == 0


def test_the_cache_depends_on_length_and_content(
    pairs: EncodedSplit, tokenizer: Tokenizer, monkeypatch
) -> None:
    corpus = open_corpus("stories-pairs").limit(test=60)
    shorter = encode_split(corpus, "test", tokenizer, 32)
    assert max(shorter.lengths) == 32
    monkeypatch.setattr(type(corpus), "rows", lambda *_: pytest.fail("encoded again"))
    assert np.array_equal(encode_split(corpus, "test", tokenizer, 48).ids, pairs.ids)


def test_a_corpus_without_labels_is_an_error(tokenizer: Tokenizer) -> None:
    with pytest.raises(UsageError, match="no labels"):
        encode_split(open_corpus("stories"), "test", tokenizer, 32)


@settings(deadline=None)
@given(lengths, st.integers(1, 20))
def test_evaluation_batches_have_every_row_once(rows: list[int], size: int) -> None:
    batches = list(eval_batches(rows, size))
    assert sorted(np.concatenate(batches).tolist()) == list(range(len(rows)))
