"""The default number of threads: environment variables, affinity and container quotas."""

import pytest

from firstlayer.kernels.runtime import threads
from firstlayer.kernels.runtime.cpus import available_cpus, cpu_quota
from tests.support.run_alone import run_alone

# Group of the process, files below the mount, and the expected quota.
QUOTAS = {
    "v2": ("0::/app\n", {"app/cpu.max": "250000 100000\n"}, 2.5),
    "v2, parent": (
        "0::/pod/app\n",
        {"pod/app/cpu.max": "max 100000", "pod/cpu.max": "300000 100000"},
        3.0,
    ),
    "v2, smallest": (
        "0::/pod/app\n",
        {"pod/app/cpu.max": "400000 100000", "pod/cpu.max": "100000 100000"},
        1.0,
    ),
    "v2, container namespace": ("0::/\n", {"cpu.max": "50000 100000\n"}, 0.5),
    "v2, no limit": ("0::/app\n", {"app/cpu.max": "max 100000\n"}, None),
    "v2, default period": ("0::/app\n", {"app/cpu.max": "max\n"}, None),
    "v1": (
        "12:memory:/app\n4:cpu,cpuacct:/app\n1:name=systemd:/\n",
        {
            "cpu,cpuacct/app/cpu.cfs_quota_us": "150000",
            "cpu,cpuacct/app/cpu.cfs_period_us": "50000\n",
        },
        3.0,
    ),
    "v1, path of the host": (
        "4:cpu,cpuacct:/docker/0123\n0::/\n",
        {"cpu/cpu.cfs_quota_us": "200000\n", "cpu/cpu.cfs_period_us": "100000\n"},
        2.0,
    ),
    "v1, no limit": (
        "4:cpu:/\n",
        {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"},
        None,
    ),
    "unreadable": ("0::/app\n", {"app/cpu.max": "many few\n"}, None),
    "no files": ("0::/app\n4:cpu:/x\n", {}, None),
}


@pytest.mark.parametrize("name", QUOTAS)
def test_quota_of_control_groups(name, tmp_path):
    membership, files, expected = QUOTAS[name]
    (tmp_path / "membership").write_text(membership)
    for path, text in files.items():
        file = tmp_path / "cgroup" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert cpu_quota(tmp_path / "cgroup", tmp_path / "membership") == expected


def test_systems_without_control_groups_have_no_quota(tmp_path):
    assert cpu_quota(tmp_path, tmp_path / "missing") is None


@pytest.mark.parametrize(("quota", "expected"), [(None, 6), (9.0, 6), (2.9, 2), (0.3, 1)])
def test_cpus_are_limited_by_affinity_and_quota(quota, expected, monkeypatch):
    cpus = "firstlayer.kernels.runtime.cpus"
    monkeypatch.setattr(f"{cpus}.os.sched_getaffinity", lambda pid: range(6))
    monkeypatch.setattr(f"{cpus}.cpu_quota", lambda: quota)
    assert available_cpus() == expected


@pytest.mark.parametrize(
    ("own", "openmp", "expected"),
    [
        ("3", "5", 3),
        (" 4 ", None, 4),
        (None, "5", 5),
        (None, "7,2", 7),
        ("", "5", 5),
        (None, None, 6),
        (None, "", 6),
    ],
)
def test_environment_variables_set_the_default(own, openmp, expected, monkeypatch):
    set_variables(monkeypatch, own, openmp)
    assert threads.default_num_threads() == expected


@pytest.mark.parametrize("text", ["0", "-2", "many", "2.5", "3,2", "1e3", "²"])
def test_bad_values_warn_and_are_ignored(text, monkeypatch):
    set_variables(monkeypatch, text, "5")
    message = f"FIRSTLAYER_NUM_THREADS must be a positive integer, got {text!r}; it is"
    with pytest.warns(RuntimeWarning, match=message) as caught:
        assert threads.default_num_threads() == 5
    assert len(caught) == 1
    set_variables(monkeypatch, None, "none")
    with pytest.warns(RuntimeWarning, match="OMP_NUM_THREADS must be a positive integer"):
        assert threads.default_num_threads() == 6


def set_variables(monkeypatch, own, openmp):
    monkeypatch.setattr(threads, "available_cpus", lambda: 6)
    for name, value in zip(threads.VARIABLES, (own, openmp), strict=True):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)


def test_the_default_is_read_once_and_may_be_changed(monkeypatch):
    monkeypatch.setenv("FIRSTLAYER_NUM_THREADS", "3")
    out = run_alone("""
        import os
        import firstlayer
        from firstlayer.kernels.runtime.threads import current_num_threads

        print(current_num_threads(), firstlayer.get_num_threads())
        os.environ["FIRSTLAYER_NUM_THREADS"] = "4"
        print(firstlayer.get_num_threads())
        firstlayer.set_num_threads(2)
        print(current_num_threads(), firstlayer.get_num_threads())
    """)
    assert out.split() == ["3", "3", "3", "2", "2"]
