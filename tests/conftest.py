"""How every run of the tests is set up: nothing skipped, nothing random, nothing stale."""

import hashlib
import os
import shutil
import signal
import tempfile
import time
from pathlib import Path

import hypothesis
import pytest

A_DAY = 24 * 60 * 60
KERNELS = Path(__file__).parent.parent / "src" / "firstlayer" / "kernels"

hypothesis.settings.register_profile("firstlayer", deadline=None, derandomize=True)
hypothesis.settings.load_profile("firstlayer")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(NothingIsSkipped())
    # What a shell starts in the background ignores Ctrl-C, and so would all that it starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Processes of one run share what is compiled, and the next run finds it again.
    # Numba does not notice every edit of a cached function: a folder serves one source.
    os.environ.setdefault("NUMBA_CACHE_DIR", _kept(config, f"numba-{_source()}"))
    # JAX looks programs up by what they are, so its folder serves any source.
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", _kept(config, "jax"))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")


def _kept(config: pytest.Config, name: str) -> str:
    """Return a folder in pytest's cache, which ``pytest --cache-clear`` empties."""
    if config.pluginmanager.has_plugin("cacheprovider"):
        folder = config.cache.mkdir(name)  # pyright: ignore[reportOptionalMemberAccess]
        os.utime(folder)
        for other in folder.parent.glob("numba-*"):
            if time.time() - other.stat().st_mtime > A_DAY:
                shutil.rmtree(other, ignore_errors=True)
        return str(folder)
    folder = tempfile.TemporaryDirectory(prefix=f"firstlayer-{name}-")
    config.add_cleanup(folder.cleanup)
    return folder.name


def _source() -> str:
    """Return a name for the kernels as they are written now."""
    text = b"".join(path.read_bytes() for path in sorted(KERNELS.rglob("*.py")))
    return hashlib.sha256(text).hexdigest()[:16]


class NothingIsSkipped:
    """Turns a test that is skipped, or expected to fail, into one that fails.

    A plugin and not hooks of this file, which would be deaf to the doctests in ``src``.
    """

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item, call):
        return _failed_if_skipped((yield))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_make_collect_report(self, collector):
        return _failed_if_skipped((yield))


def _failed_if_skipped(report):
    if report.skipped or hasattr(report, "wasxfail"):
        why = report.longrepr[-1] if isinstance(report.longrepr, tuple) else "xfail"
        report.outcome = "failed"
        report.longrepr = f"no test may be skipped or expected to fail: {why}"
        vars(report).pop("wasxfail", None)
    return report
