import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from oelm.data.batches.permutation import mix, shuffled


@settings(deadline=None)
@given(st.integers(1, 3000), st.integers(0, 2**70))
def test_a_permutation_has_every_element_once(size: int, key: int) -> None:
    assert np.array_equal(np.sort(shuffled(np.arange(size), size, key)), np.arange(size))


@settings(deadline=None)
@given(st.integers(1, 10**12), st.integers(0, 2**63), st.data())
def test_single_elements_equal_those_of_the_full_permutation(
    size: int, key: int, data: st.DataObject
) -> None:
    places = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=5))
    together = shuffled(places, size, key)
    assert [int(shuffled([place], size, key)[0]) for place in places] == together.tolist()
    assert ((together >= 0) & (together < size)).all()


def test_different_keys_give_uncorrelated_permutations() -> None:
    first, second = (shuffled(np.arange(10_000), 10_000, key) for key in (1, 2))
    assert (first == second).mean() < 0.01
    assert abs(np.corrcoef(first, np.arange(10_000))[0, 1]) < 0.05
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.05


def test_the_permutation_never_changes() -> None:
    """A run that is resumed with a newer version must see the same batches."""
    assert mix(42, 7) == 14669438080895892853
    assert shuffled(range(8), 8, 42, 0).tolist() == [2, 6, 1, 0, 3, 4, 7, 5]
    assert shuffled([0, 1, 10**9 - 1], 10**9, 42, 3).tolist() == [309527225, 435546412, 779152461]
