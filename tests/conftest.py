"""Setup of every test run: no skipped tests, fixed random seeds, fresh kernels."""

import gc
import hashlib
import os
import shutil
import signal
import tempfile
import time
from pathlib import Path

import hypothesis
import pytest

SECONDS_PER_DAY = 24 * 60 * 60
KERNELS = Path(__file__).parent.parent / "src" / "firstlayer" / "kernels"

# The examples are the same in every run, so that more of them would find little.
hypothesis.settings.register_profile(
    "firstlayer", deadline=None, derandomize=True, max_examples=60
)
hypothesis.settings.load_profile("firstlayer")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(FailOnSkip())
    # A shell's background jobs ignore Ctrl-C, and their child processes inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Compiled code is shared by the processes of a run and by later runs. Numba does not
    # notice edits in functions that a cached kernel calls: each source has its own folder.
    numba_folder = _cache_folder(config, f"numba-{_hash_of_kernels()}")
    os.environ.setdefault("NUMBA_CACHE_DIR", numba_folder)
    # JAX's cache is keyed by program, so one folder serves any source.
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", _cache_folder(config, "jax"))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")


def pytest_collection_finish() -> None:
    # Every full collection of garbage would visit millions of objects of imported modules.
    gc.collect()
    gc.freeze()


def _cache_folder(config: pytest.Config, name: str) -> str:
    """Return a folder in pytest's cache, and delete those of kernels not used for a day."""
    if config.pluginmanager.has_plugin("cacheprovider"):
        folder = config.cache.mkdir(name)  # pyright: ignore[reportOptionalMemberAccess]
        os.utime(folder)
        for other in folder.parent.glob("numba-*"):
            if time.time() - other.stat().st_mtime > SECONDS_PER_DAY:
                shutil.rmtree(other, ignore_errors=True)
        return str(folder)
    folder = tempfile.TemporaryDirectory(prefix=f"firstlayer-{name}-")
    config.add_cleanup(folder.cleanup)
    return folder.name


def _hash_of_kernels() -> str:
    """Return a hash of the kernels' source."""
    text = b"".join(path.read_bytes() for path in sorted(KERNELS.rglob("*.py")))
    return hashlib.sha256(text).hexdigest()[:16]


class FailOnSkip:
    """Plugin that fails tests that are skipped or expected to fail.

    Hooks in this file would not see the doctests in ``src``.
    """

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item, call):
        return _failed_if_skipped((yield))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_make_collect_report(self, collector):
        return _failed_if_skipped((yield))


def _failed_if_skipped(report):
    if report.skipped or hasattr(report, "wasxfail"):
        reason = report.longrepr[-1] if isinstance(report.longrepr, tuple) else "xfail"
        report.outcome = "failed"
        report.longrepr = f"no test may be skipped or expected to fail: {reason}"
        vars(report).pop("wasxfail", None)
    return report
