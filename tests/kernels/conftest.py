import pytest

from firstlayer import kernels


@pytest.fixture(params=[1, 2, 5])
def threads(request):
    """Number of threads the kernels use during the test."""
    before = kernels.get_num_threads()
    kernels.set_num_threads(request.param)
    yield request.param
    kernels.set_num_threads(before)
