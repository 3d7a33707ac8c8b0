"""Equinox layers on meshes of 8 devices, in a process of their own."""

import json
from functools import cache
from pathlib import Path

import pytest

from tests.support.run_alone import run_alone
from tests.support.sharded_layers import checks


@cache
def errors():
    """Return the errors of all checks by name; the devices must be set up before JAX."""
    root = Path(__file__).parents[2]
    out = run_alone(
        """
        import os

        os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
        from tests.support.sharded_layers import main

        main()
        """,
        folder=root,
    )
    report = json.loads(out)
    assert report["names"] == list(checks())
    return report["errors"]


@pytest.mark.parametrize("name", checks())
def test_layer_on_a_mesh_equals_the_layer_on_one_device(name):
    assert errors().get(name) is None, errors()[name]
