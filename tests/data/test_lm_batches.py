import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oelm.data.batches.language_model import LMBatches, eval_windows
from oelm.errors import UsageError

streams = st.integers(20, 150)
contexts = st.integers(1, 20)
sizes = st.integers(1, 7)


@settings(deadline=None, max_examples=60)
@given(streams, contexts, sizes, st.integers(0, 2**32), st.integers(0, 3))
def test_each_epoch_has_every_window_once(
    length: int, context: int, batch: int, seed: int, epoch: int
) -> None:
    ids = np.arange(length, dtype=np.uint16)
    batches = LMBatches(ids, context, batch, seed)
    first, last = epoch * batches.windows, (epoch + 1) * batches.windows
    rows = [row for step in range(first // batch, -(-last // batch)) for row in batches.batch(step).tolist()]
    rows = rows[first % batch :][: batches.windows]  # the epoch's own windows; a batch may span two epochs
    assert len({row[0] for row in rows}) == batches.windows == length // context
    for row in rows:  # consecutive tokens of the ring
        assert row == [(row[0] + i) % length for i in range(context + 1)]
    targets = [token for row in rows for token in row[1:]]
    assert len(set(targets)) == len(targets) == batches.windows * context  # no target twice in an epoch


@settings(deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 2**40))
def test_a_batch_depends_only_on_seed_and_step(step: int, seed: int) -> None:
    ids = np.arange(500, dtype=np.uint16)
    first = LMBatches(ids, 8, 4, seed)
    first.batch(step + 1)  # reading another batch before changes nothing
    assert torch.equal(first.batch(step), LMBatches(ids, 8, 4, seed).batch(step))


def test_batches_have_shape_and_dtype_and_depend_on_the_seed() -> None:
    ids = np.arange(5000, dtype=np.uint16)
    batch = LMBatches(ids, 16, 4, 1).batch(0)
    assert batch.shape == (4, 17)
    assert batch.dtype == torch.int64
    assert not torch.equal(batch, LMBatches(ids, 16, 4, 2).batch(0))


def test_epochs_start_at_different_offsets() -> None:
    batches = LMBatches(np.arange(1000, dtype=np.uint16), 10, 100, 7)  # one batch is one epoch
    first, second = ({start % 10 for start in batches.window_starts(epoch)} for epoch in (0, 1))
    assert first != second


@settings(deadline=None)
@given(st.integers(2, 300), contexts, sizes)
def test_evaluation_has_every_target_exactly_once(length: int, context: int, batch: int) -> None:
    ids = np.arange(length, dtype=np.uint16)
    windows = list(eval_windows(ids, context, batch))
    targets = [token for window in windows for token in window[:, 1:].flatten().tolist()]
    assert targets == list(range(1, length))
    assert all(window.shape[1] <= context + 1 and window.shape[0] <= batch for window in windows)
    assert all(torch.equal(window[:, 1:], window[:, :-1] + 1) for window in windows)


def test_too_little_text_is_an_error() -> None:
    with pytest.raises(UsageError, match="one window needs"):
        LMBatches(np.arange(10, dtype=np.uint16), 16, 4, 0)
    with pytest.raises(UsageError):
        LMBatches(np.arange(10, dtype=np.uint16), 0, 4, 0)
