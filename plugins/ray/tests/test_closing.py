"""A run that fails leaves its cluster nevertheless."""

import pytest

from engine_plugin_ray import runtime as module
from engine_plugin_ray.runtime import RayRuntime


class BrokenCrew:
    def close(self):
        raise RuntimeError("Ray does not answer")


class Joined:
    own, closed = False, False

    def close(self):
        self.closed = True


def test_workers_that_cannot_be_ended_keep_neither_room_nor_connection(monkeypatch):
    made = RayRuntime.__new__(RayRuntime)
    made.crew, made.cluster = BrokenCrew(), Joined()
    made.replacements = None
    made._groups, made._seats, made._meeting = ["the pool's"], {}, None
    released = []
    monkeypatch.setattr(module, "release", released.extend)
    with pytest.raises(RuntimeError, match="Ray does not answer"):
        made.close()
    assert released == ["the pool's"]
    assert made.cluster.closed
