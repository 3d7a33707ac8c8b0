"""Compilation of kernels, and their scratch memory."""

import os

import numpy as np
import pytest

from firstlayer.kernels.runtime import compiler
from firstlayer.kernels.runtime.compile import internal, kernel, njit
from firstlayer.kernels.runtime.scratch import free_row, is_allocated, scratch_row
from tests.support.run_alone import start_python


def square_sum(x, out):
    total = 0.0
    for i in range(x.size):
        total += _squared(x[i])
    out[0] = total


@internal
def _squared(x):
    return x * x


def run(function, x):
    out = np.zeros(1)
    function(x, out)
    return out[0]


class TestCompiler:
    x = np.array([1.5, -2.0, 3.25])

    def test_same_result_as_numba(self):
        assert run(kernel()(square_sum), self.x) == 16.8125
        assert run(njit(square_sum), self.x) == 16.8125

    def test_functions_of_kernels_have_no_machine_code(self):
        compiled = kernel()(square_sum)
        run(compiled, self.x)
        library = _squared.overloads[_squared.signatures[0]].library
        (name,) = (function.name for function in library.get_defined_functions())
        assert not library._codegen._engine.is_symbol_defined(name)

    def test_unknown_version_uses_numbas_compiler(self, monkeypatch):
        monkeypatch.setattr(compiler, "has_known_compiler", lambda: False)

        def doubled(x, out):
            out[0] = 2 * x[0]

        compiled = kernel()(doubled)
        assert run(compiled, self.x) == 3.0
        library = compiled.overloads[compiled.signatures[0]].library
        assert not isinstance(library, compiler._KernelLibrary)


IMPORTS = """
import sys
import numba
import numpy as np
from firstlayer.numpy import Embedding

rows = Embedding(5, 3, rng=0)([1, 4])
print(rows.shape, "scipy.linalg" in sys.modules, "numba.np.arrayobj" in sys.modules)
x = np.array([[1.0, 2.0, 4.0], [3.0, 3.0, 1.0]])
covariance = numba.njit(lambda x: x @ x.T + np.cov(x))
print(covariance(x).tolist() == covariance.py_func(x).tolist())
"""


def test_imports_what_is_needed(tmp_path):
    def printed():
        environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
        return start_python(IMPORTS, env=environment).stdout.splitlines()

    # The second line: other functions of the process can use SciPy and the whole of Numba.
    assert printed() == ["(2, 3) False True", "True"]
    assert printed() == ["(2, 3) False False", "True"]


@njit
def _reversed(x, out):
    row = scratch_row(x.size, x.dtype.type(0))
    if not is_allocated(row):
        raise MemoryError
    for i in range(x.size):
        row[x.size - 1 - i] = x[i]
    for i in range(x.size):
        out[i] = row[i]
    free_row(row)


@njit
def _written(width, i, j):
    row = scratch_row(width, np.float32(0))
    if not is_allocated(row):
        raise MemoryError
    row[i] = 2
    row[j] = 3
    found = row[i]
    free_row(row)
    return found


class TestScratchRow:
    @pytest.mark.parametrize("dtype", [np.float32, np.float64])
    @pytest.mark.parametrize("width", [0, 1, 5])
    def test_holds_a_row(self, dtype, width):
        x = np.arange(width, dtype=dtype)
        out = np.empty_like(x)
        _reversed(x, out)
        assert out.tolist() == x[::-1].tolist()

    def test_missing_memory(self):
        assert _written(2, 0, 1) == 2
        with pytest.raises(MemoryError):
            _written(1 << 60, 0, 1)
