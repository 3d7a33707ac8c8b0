"""The cache of compiled kernels: damaged, missing, read-only and full."""

import errno
import gc
import importlib.util
import io
import pickle
import shutil
import sys
import warnings

import numpy as np
import pytest
from numba.core import config
from numba.core.errors import TypingError
from numba.extending import overload

from firstlayer.kernels.runtime import cache, compile

SOURCE = """
from firstlayer.kernels.runtime.compile import kernel

@kernel()
def double(x):
    for i in range(x.size):
        x[i] *= 2
"""
NAME = "kernels_of_the_cache_tests"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A module with one kernel and an empty cache folder."""
    (tmp_path / "kernels.py").write_text(SOURCE)
    monkeypatch.setattr(config, "CACHE_DIR", str(tmp_path / "cache"))
    # Numba imports the module of a kernel that it reads from the cache; see use().
    monkeypatch.setitem(sys.modules, NAME, None)
    return tmp_path


def use(folder, dtype="float64"):
    """Use the kernel as a new process would; return warnings and whether it compiled."""
    spec = importlib.util.spec_from_file_location(NAME, folder / "kernels.py")
    assert spec is not None and spec.loader is not None
    sys.modules[NAME] = module = importlib.util.module_from_spec(spec)
    cache._warnings.has_warned = False
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        spec.loader.exec_module(module)
        x = np.arange(3).astype(dtype)
        module.double(x)
    assert x.tolist() == [0, 2, 4]
    compiled = not module.double.stats.cache_hits
    return [str(warning.message) for warning in caught], compiled


def files(folder, suffix):
    return sorted((folder / "cache").rglob(f"*.{suffix}"))


def test_the_second_process_does_not_compile(folder):
    assert use(folder) == ([], True)
    assert use(folder) == ([], False)
    assert use(folder, "float32") == ([], True)
    assert use(folder) == ([], False)


DAMAGES = {
    "empty": lambda content: b"",
    "cut short": lambda content: content[: len(content) // 2],
    "one bit": lambda content: content[:-50] + bytes([content[-50] ^ 1]) + content[-49:],
    "other text": lambda content: b"not a cache" * 100,
    "zeros": lambda content: bytes(len(content)),
}


@pytest.mark.parametrize("suffix", ["nbi", "nbc"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_replaced_with_one_warning(suffix, damage, folder):
    use(folder)
    (path,) = files(folder, suffix)
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    messages, compiled = use(folder)
    assert compiled and len(messages) == 1
    assert f"compiled in this process: {path} is damaged" in messages[0]
    assert use(folder) == ([], False)


@pytest.mark.parametrize("suffix", ["nbi", "nbc"])
def test_a_missing_file_is_written_again(suffix, folder):
    use(folder)
    (path,) = files(folder, suffix)
    path.unlink()
    assert use(folder) == ([], True)
    assert use(folder) == ([], False)


@pytest.mark.parametrize("suffix", ["nbi", "nbc"])
def test_a_file_that_cannot_be_read_gives_one_warning(suffix, folder):
    use(folder)
    (path,) = files(folder, suffix)
    path.unlink()
    path.mkdir()
    messages, compiled = use(folder)
    assert compiled and len(messages) == 1
    assert "IsADirectoryError" in messages[0]


def test_code_of_another_signature_is_not_used(folder):
    use(folder)
    use(folder, "float32")
    one, other = files(folder, "nbc")
    shutil.copy(one, other)
    assert use(folder) == ([], False)
    assert use(folder, "float32") == ([], True)
    assert use(folder, "float32") == ([], False)


def test_a_full_disk_gives_one_warning(folder, monkeypatch):
    def full(self, path):
        raise OSError(errno.ENOSPC, "no space left on device", path)

    monkeypatch.setattr(cache._CheckedFiles, "_open_for_write", full)
    messages, compiled = use(folder)
    assert compiled and len(messages) == 1
    assert "cannot be written (OSError: [Errno 28] no space left" in messages[0]
    monkeypatch.undo()
    assert not files(folder, "nbi")


def test_without_a_writable_folder_kernels_are_compiled_with_one_warning(
    folder, monkeypatch
):
    from numba.core.caching import CacheImpl

    monkeypatch.setattr(CacheImpl, "_locator_classes", [])
    messages, compiled = use(folder)
    assert compiled and len(messages) == 1
    assert "no folder can hold the cache" in messages[0]


def test_code_of_another_version_of_numba_is_replaced_without_a_warning(folder):
    assert use(folder) == ([], True)
    (index,) = files(folder, "nbi")
    _, stamp, _ = cache._read(str(index))
    # The name of a class that this version of Numba does not have.
    data = pickle.dumps(("0.1", stamp, b"cnumba.core.types\nNoSuchType\n."))
    index.write_bytes(cache._digest(data) + data)
    assert use(folder) == ([], True)
    assert use(folder) == ([], False)


def test_a_changed_source_is_compiled_again(folder):
    use(folder)
    path = folder / "kernels.py"
    path.write_text(SOURCE.replace("*= 2", "+= x[i]"))
    assert use(folder) == ([], True)


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("terminal", [Terminal, io.StringIO])
def test_a_process_that_compiles_for_long_says_so_once(terminal, folder, monkeypatch):
    stderr = terminal()
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setattr(cache._compiling, "seconds", 0.0)
    monkeypatch.setattr(cache._compiling, "has_said", False)
    monkeypatch.setattr(cache, "NOTICE_SECONDS", 1e9)
    assert use(folder) == ([], True)
    assert stderr.getvalue() == ""
    monkeypatch.setattr(cache, "NOTICE_SECONDS", 1e-9)
    assert use(folder) == ([], False)
    assert stderr.getvalue() == ""
    with cache.counted_compilations() as compilations:
        assert use(folder, "int64") == ([], True)
    assert compilations.count == 1 and stderr.getvalue() == ""
    for dtype in ("float32", "int32"):
        assert use(folder, dtype) == ([], True)
    (path,) = (folder / "cache").iterdir()
    line = (
        "firstlayer: compiling kernels for their first calls; later processes use the "
        f"cache in {path} (see firstlayer warmup)\n"
    )
    assert stderr.getvalue() == (line if terminal is Terminal else "")


@pytest.mark.parametrize("collects", [True, False])
def test_the_garbage_collector_rests_while_a_kernel_compiles(collects):
    def fails_to_compile():
        raise NotImplementedError

    seen = []

    @overload(fails_to_compile)
    def _():
        seen.append(gc.isenabled())
        raise TypingError("as the test wants")

    @compile.kernel()
    def calls():
        fails_to_compile()

    before = gc.isenabled()
    (gc.enable if collects else gc.disable)()
    try:
        with pytest.raises(TypingError, match="as the test wants"):
            calls()
        assert gc.isenabled() == collects
    finally:
        (gc.enable if before else gc.disable)()
    assert seen and not any(seen)
