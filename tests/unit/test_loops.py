"""Whoever starts a thread says what it consumes, waits for, is unblocked by and produces."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SAYS = ("consumes:", "waits for:", "unblocked by:", "produces:")
STARTS = re.compile(r"Thread\(|clock\.thread\(|LoopThread\(|SamplerThread\(|ScoringThread\(")
NO_LOOPS = {
    "engine_core/timeline.py": "makes threads for others",
    "plugins/agents/src/engine_plugin_agents/runner.py": "starts the loop of environments/loop.py",
    "plugins/rewards/src/engine_plugin_rewards/sandbox/probes.py": "programs that try to do harm",
}


def sources():
    files = [*(ROOT / "engine_core").rglob("*.py"), *ROOT.glob("plugins/*/src/**/*.py")]
    return {
        str(file.relative_to(ROOT)): file.read_text("utf-8") for file in files if "testing" not in file.parts
    }


LOOPS = sorted(name for name, text in sources().items() if STARTS.search(text) and name not in NO_LOOPS)


@pytest.mark.parametrize("name", [*LOOPS, "plugins/trainers/src/engine_plugin_trainers/async_trainer.py"])
def test_a_loop_says_what_it_waits_for(name):
    text = " ".join(sources()[name].split())
    assert [word for word in SAYS if word not in text] == []


def test_the_loops_are_found_and_what_is_left_out_is_there():
    assert {
        "plugins/trainers/src/engine_plugin_trainers/sampler_thread.py",
        "plugins/processes/src/engine_plugin_processes/worker_pool.py",
    } <= set(LOOPS)
    assert set(NO_LOOPS) <= set(sources())
