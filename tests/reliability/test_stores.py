"""Kills and power losses while a table is trained on disk."""

import pytest

from tests.support import store_kills


def test_a_killed_training_leaves_a_commit(tmp_path):
    counts = store_kills.kill_training(tmp_path, 50)
    # Most kills are in the middle of steps, whose changes are undone.
    assert counts["kills"] == 50 and counts["commits"] > 3 and counts["undone"] > 3


def test_a_power_loss_leaves_a_commit(tmp_path):
    counts = store_kills.lose_power(tmp_path, 300)
    assert counts["moments"] > 100 and counts["commits"] == 4


def test_the_check_finds_a_store_that_is_not_synced(tmp_path):
    with pytest.raises((AssertionError, ValueError)):
        store_kills.lose_power(tmp_path, 300, sync="off")
