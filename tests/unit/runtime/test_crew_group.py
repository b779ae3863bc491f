"""Groups of processes, as the controller sees them."""

from engine_core.runtime.crew_group import CrewGroup
from engine_core.runtime.placement import Slice


def test_a_group_has_as_many_processes_as_its_slices_have_ranks():
    slices = [Slice((0, 1), 0), Slice((2, 3), 2)]
    assert CrewGroup(None, "actor", slices, attention=0.0, independent=False).world_size == 4
