"""A server that the plugin starts ends with the run, whatever ends the run."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from engine_core.errors import EnvironmentProblem
from engine_plugin_vllm_rollout.serve_process import ServerProcess, flag, free_port, vllm_serve
from engine_plugin_vllm_rollout.server_options import StartOptions

SERVES = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); print('up', flush=True); time.sleep(600)"
OWNER = f"""
import sys, time
from engine_plugin_vllm_rollout.serve_process import ServerProcess
made = ServerProcess([sys.executable, "-c", {SERVES!r}], {{}})
print(made.popen.pid, flush=True)
time.sleep(600)
"""


def members(group):
    """Processes of a session that live."""
    found = []
    for pid in psutil.pids():
        try:
            if os.getpgid(pid) == group and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append(pid)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found


def until(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("ending", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_is_left_when_its_owner_is_killed(ending):
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True) as owner:
        group = int(owner.stdout.readline())
        until(lambda: len(members(group)) >= 3)  # it, its keeper, what it has started
        owner.send_signal(ending)
    until(lambda: not members(group))


def test_close_ends_it_with_what_it_has_started():
    made = ServerProcess([sys.executable, "-c", SERVES], {})
    until(lambda: len(members(made.popen.pid)) >= 3 and "up" in made.tail())
    made.kill()
    made.kill()
    until(lambda: not members(made.popen.pid))


def test_one_that_ends_or_never_answers_is_told_with_what_it_printed():
    made = ServerProcess([sys.executable, "-c", "print('no room'); raise SystemExit(3)"], {})
    with pytest.raises(
        EnvironmentProblem, match=r"the server exited with status 3\. The last that it printed:\nno room"
    ):
        made.wait_until(lambda: False, 60, "the server")
    slow = ServerProcess([sys.executable, "-c", "import time; time.sleep(600)"], {})
    with pytest.raises(EnvironmentProblem, match=r"the server did not answer within 0 s"):
        slow.wait_until(lambda: False, 0.1, "the server")
    until(lambda: not members(slow.popen.pid))


def test_the_command_binds_loopback_and_holds_no_token():
    start = StartOptions(options={"dtype": "float32", "enforce_eager": True, "max_num_seqs": 4})
    command = vllm_serve("folder", start, free_port("127.0.0.1"), classifies=True)
    assert command[command.index("--host") + 1] == "127.0.0.1"
    assert command[command.index("--runner") + 1] == "pooling"
    assert command[-5:] == ["--dtype", "float32", "--enforce-eager", "--max-num-seqs", "4"]
    assert "--api-key" not in command
    assert flag("enable_prefix_caching", False) == ["--no-enable-prefix-caching"]
    assert flag("hf_overrides", {"a": 1}) == ["--hf-overrides", '{"a": 1}']
