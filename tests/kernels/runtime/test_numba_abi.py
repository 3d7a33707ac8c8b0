"""The assumptions about Numba's internals hold for the installed version.

If one of these fails after an upgrade, kernels run on one thread until ``numba_abi`` is
adapted. If all pass, add the version to ``KNOWN_VERSIONS``, and to ``COMPILER_VERSIONS`` if
all tests of the kernels pass with it there.
"""

import numba
import pytest
from numba.core.callconv import CPUCallConv

from firstlayer.kernels.runtime import numba_abi
from tests.support.run_alone import run_alone


def test_numba_layouts_match_the_assumptions():
    assert numba_abi.layout_problem() is None


def test_a_kernel_called_through_its_pointer_gets_its_arguments():
    assert numba_abi.call_problem() is None


def test_a_changed_calling_convention_is_reported(monkeypatch):
    monkeypatch.setattr(CPUCallConv, "get_arguments", lambda self, func: func.args[1:])
    assert numba_abi.layout_problem() == (
        "compiled functions do not have two hidden arguments"
    )
    reason = numba_abi.single_thread_reason()
    assert reason is not None and reason.startswith(f"Numba {numba.__version__} is not")


def test_a_changed_array_is_reported(monkeypatch):
    monkeypatch.setattr(numba_abi, "_ARRAY_FIELDS", ("data", "shape"))
    problem = (
        "arrays have the fields meminfo, parent, nitems, itemsize, data, shape, strides"
    )
    assert numba_abi.layout_problem() == problem


def test_a_missing_name_is_reported_and_not_raised(monkeypatch):
    monkeypatch.delattr(CPUCallConv, "get_arguments")
    monkeypatch.delattr("numba.core.callconv.BaseCallConv.get_arguments", raising=False)
    problem = numba_abi.layout_problem()
    assert problem is not None and problem.startswith("AttributeError")


@pytest.mark.parametrize("is_known", [True, False])
def test_only_unknown_versions_run_the_call_check(is_known, monkeypatch):
    version = numba.__version__.rpartition(".")[0]
    known = frozenset({version} if is_known else ())
    monkeypatch.setattr(numba_abi, "KNOWN_VERSIONS", known)
    calls = []
    monkeypatch.setattr(numba_abi, "call_problem", lambda: calls.append(1))
    assert numba_abi.single_thread_reason() is None
    assert len(calls) == (0 if is_known else 1)


@pytest.mark.parametrize(
    "version, is_known, has_compiler",
    [("0.61.2", True, False), ("0.66.0", True, True), ("0.99.1", False, False)],
)
def test_versions_of_numba(version, is_known, has_compiler, monkeypatch):
    monkeypatch.setattr(numba, "__version__", version)
    assert numba_abi.is_known_version() is is_known
    assert numba_abi.has_known_compiler() is has_compiler


# No cache folder, because cached kernels offer their work.
NO_CACHE = """
    import warnings
    import numba.core.caching as caching

    caching.CacheImpl._locator_classes = []
"""

CHANGED_CALLING_CONVENTION = """
    from numba.core.callconv import CPUCallConv

    original = CPUCallConv.get_arguments
    CPUCallConv.get_arguments = lambda self, function: function.args[1:]
    from firstlayer.kernels.runtime import pool

    CPUCallConv.get_arguments = original
"""

NO_POSIX_THREADS = """
    import os, sys

    name, platform = os.name, sys.platform
    os.name = sys.platform = "other"
    from firstlayer.kernels.runtime import pool

    os.name, sys.platform = name, platform
"""

LOOKUPS = """
    import numpy as np
    import firstlayer
    from firstlayer.numpy import Embedding, EmbeddingLayer

    short = EmbeddingLayer(9, 4, position=None, rng=0)
    for _ in range(2):
        assert np.array_equal(short(np.array([3])), short.token.weight[[3]])
    assert vars(short)["_plan"] is None
    layer = Embedding(1000, 512, rng=0)
    ids = np.random.default_rng(0).integers(0, 1000, 4000)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        firstlayer.set_num_threads(1)
        assert np.array_equal(layer(ids), layer.weight[ids]) and not caught
        firstlayer.set_num_threads(4)
        for _ in range(3):
            assert np.array_equal(layer(ids), layer.weight[ids])
    (warning,) = caught
    assert warning.category is RuntimeWarning
    assert str(warning.message).startswith(
        f"Firstlayer's kernels run on one thread: {reason}"
    ), warning
"""


@pytest.mark.parametrize(
    "setup, reason",
    [
        (CHANGED_CALLING_CONVENTION, "Numba"),
        (NO_POSIX_THREADS, "this system has no POSIX threads"),
    ],
    ids=["changed calling convention", "no POSIX threads"],
)
def test_kernels_run_on_one_thread_and_warn_once(setup, reason):
    run_alone(NO_CACHE, setup, f"reason = {reason!r}\n", LOOKUPS)
