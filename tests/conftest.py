"""Fixtures of several test files."""

import pytest


@pytest.fixture(scope="module")
def one_thread():
    """Run kernels of few servers on one thread: waking a second takes longer than the work."""
    import numba

    before = numba.get_num_threads()
    numba.set_num_threads(1)
    yield
    numba.set_num_threads(before)
