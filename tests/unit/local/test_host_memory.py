"""Memory of freed tensors is used again, without page faults."""

import os
import subprocess
import sys

import pytest

FAULTS = """
import resource, sys
import torch
from engine_core.local.host_memory import keep_freed_memory

keep_freed_memory()

def allocate():
    for tensors in range(4):
        held = [torch.zeros(2 << 20) for _ in range(4)]  # 8 MiB each, all freed at once
        del held

allocate()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
allocate()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(**variables):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MALLOC_")} | variables
    done = subprocess.run(
        [sys.executable, "-c", FAULTS], env=environment, capture_output=True, text=True, check=True
    )
    return int(done.stdout)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="mallopt is glibc's")
def test_tensors_of_a_size_that_was_freed_cost_no_page_faults_unless_the_environment_sets_a_threshold():
    assert faults() < 500
    assert faults(MALLOC_TRIM_THRESHOLD_="131072") > 10_000
