"""Number of CPUs that this process may use: affinity and the quota of its container.

A container with a quota of two CPUs sees every CPU of its host. More threads than its quota
are stopped for most of each period, while others wait for them.
"""

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

CGROUPS, MEMBERSHIP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def available_cpus() -> int:
    """Return the number of CPUs that this process may use, at least 1.

    Example:
        >>> available_cpus() >= 1
        True
    """
    if hasattr(os, "sched_getaffinity"):
        count = len(os.sched_getaffinity(0))
    else:
        count = os.cpu_count() or 1
    quota = cpu_quota()
    return count if quota is None else max(1, min(count, int(quota)))


def cpu_quota(cgroups: Path = CGROUPS, membership: Path = MEMBERSHIP) -> float | None:
    """Return the smallest CPU quota of this process's control groups, or None.

    Args:
        cgroups: Folder that control groups are mounted in, version 1 or 2.
        membership: File with the groups of this process.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return None
    quotas = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            quotas += [_quota_v2(folder) for folder in _ancestors(cgroups, path)]
        elif "cpu" in controllers.split(","):
            for mount in {"cpu", controllers}:
                quotas += [
                    _quota_v1(folder) for folder in _ancestors(cgroups / mount, path)
                ]
    return min((quota for quota in quotas if quota is not None), default=None)


def _ancestors(mount: Path, path: str) -> Iterator[Path]:
    """Yield the folder of a group and those of the groups that contain it."""
    # The path may be that of the host: the mount itself is then the container's group.
    for group in (PurePosixPath(path), *PurePosixPath(path).parents):
        yield mount / str(group).lstrip("/")


def _quota_v2(folder: Path) -> float | None:
    """Return the quota in ``cpu.max``, such as ``150000 100000`` or ``max 100000``."""
    return _ratio(*_words(folder / "cpu.max"))


def _quota_v1(folder: Path) -> float | None:
    """Return the quota of version 1, in which -1 is no limit."""
    quota, period = folder / "cpu.cfs_quota_us", folder / "cpu.cfs_period_us"
    return _ratio(*_words(quota), *_words(period))


def _words(file: Path) -> list[str]:
    try:
        return file.read_text().split()
    except OSError:
        return []


def _ratio(quota: str = "max", period: str = "", *rest: str) -> float | None:
    if not quota.isdigit() or not period.isdigit() or not int(period):
        return None
    return int(quota) / int(period)
