"""How every run of the tests is set up: nothing skipped, nothing random, nothing stale."""

import os
import tempfile

import hypothesis
import pytest

hypothesis.settings.register_profile("inlay", deadline=None, derandomize=True)
hypothesis.settings.load_profile("inlay")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(NothingIsSkipped())
    # Numba does not notice every edit of a cached function, so each run compiles afresh.
    # Subprocesses inherit the folder, and what was compiled for it.
    if "NUMBA_CACHE_DIR" not in os.environ:
        folder = tempfile.TemporaryDirectory(prefix="inlay-numba-")
        os.environ["NUMBA_CACHE_DIR"] = folder.name
        config.add_cleanup(folder.cleanup)


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
