"""What is mutated, and which suites of the conformance kit and which unit tests should catch it."""

from __future__ import annotations

import os
from pathlib import PurePath

TORCH = "plugins/torch/src/engine_plugin_torch"
HF = "plugins/hf_rollout/src/engine_plugin_hf_rollout"
PROCESSES = "plugins/processes/src/engine_plugin_processes"
REWARDS = "plugins/rewards/src/engine_plugin_rewards"

CONFORMANCE, ON_GPU = "tests/conformance", "tests/gpu/test_transports_gpu.py"
EVERY = "not heavy_imports"  # that contract starts an interpreter and concerns no fault below
SUITES = {  # name -> test, and which of its contracts
    "torch": (f"{CONFORMANCE}/test_torch.py::TestTorch", EVERY),
    "losses": (f"{CONFORMANCE}/test_algorithms.py", f"{EVERY}"),
    "trainers": (f"{CONFORMANCE}/test_trainers.py::TestRL", EVERY),
    "hf": ("plugins/hf_rollout/tests/test_conformance.py::TestHF", EVERY),
    "processes": ("plugins/hf_rollout/tests/test_conformance.py::TestHFInTwoProcesses", EVERY),
    "tcp": (f"{CONFORMANCE}/test_transports.py::TestTCP", EVERY),
    "broadcast": (f"{CONFORMANCE}/test_transports.py::TestBroadcast", EVERY),
    "ipc": (f"{CONFORMANCE}/test_transports.py::TestIPC", EVERY),
    "runtime": (
        f"{CONFORMANCE}/test_runtimes.py::TestTorchrun",
        "cross or error or shared_out or sequences or order_of or whole",
    ),
    "rewards": ("plugins/rewards/tests/test_conformance.py::TestExactMatch", EVERY),
    "length": ("plugins/rewards/tests/test_conformance.py::TestLength", EVERY),
    **{
        name: (f"plugins/rewards/tests/test_conformance.py::{suite}", EVERY)
        for name, suite in (
            ("async", "TestAsync"),
            ("groups", "TestAsyncGroups"),
            ("object", "TestAsyncObject"),
        )
    },
    "python": ("plugins/rewards/tests/test_conformance.py::TestPython", EVERY),
}
if os.environ.get("ENGINE_TEST_DEVICE"):  # two processes on one device
    SUITES |= dict.fromkeys(("tcp", "ipc"), (f"{ON_GPU}::TestIPCOnOne", EVERY))
    SUITES["broadcast"] = (f"{ON_GPU}::TestBroadcastOnOne", EVERY)

TARGETS: dict[str, dict[str, tuple[str, ...]]] = {  # target -> file -> its suites, the quickest first
    "torch": {
        f"{TORCH}/{name}.py": ("torch",)
        for name in (
            "engine", "packed_forward", "log_probs", "optimizers", "checkpoint", "state", "weights",
            "transfer", "value_models", "adapter", "lora", "export",
        )
    },
    "hf": {f"{HF}/{name}.py": ("hf",) for name in ("engine", "decoding", "distribution", "cache", "adapter")},
    "transports": {
        f"{PROCESSES}/transports/bucketing.py": ("tcp", "broadcast"),
        f"{PROCESSES}/transports/tcp.py": ("tcp",),
        f"{PROCESSES}/transports/broadcast.py": ("broadcast",),
        f"{PROCESSES}/transports/ipc.py": ("ipc",),
        "engine_core/contracts/weight_sync.py": ("tcp", "hf"),
        "engine_core/contracts/checksum.py": ("hf", "tcp"),
    },
    "wire": {
        f"{PROCESSES}/{name}.py": ("tcp", "runtime")
        for name in ("codec", "channel", "generation", "remote_errors")
    },
    "rewards": {
        "engine_core/rewards/runner.py": ("rewards", "python"),
        "engine_core/rewards/signatures.py": ("rewards", "length", "python", "async", "groups", "object"),
        f"{REWARDS}/worker_pool/pool.py": ("rewards", "python"),
        f"{REWARDS}/worker_pool/worker.py": ("rewards", "python"),
    },
    "batch": {
        "engine_core/packing.py": ("torch", "runtime"),
        "engine_core/types.py": ("torch", "losses", "trainers", "hf"),
        "engine_core/algorithms/objectives.py": ("torch", "losses", "trainers"),
        "engine_core/algorithms/losses.py": ("losses", "torch"),
    },
    "split": {f"{PROCESSES}/{name}.py": ("runtime", "processes") for name in ("split", "balance")},
}  # fmt: skip


def unit_tests(file: str) -> str:
    """Return the pattern of the unit tests of a source file, relative to the repository."""
    path = PurePath(file)
    if path.parts[0] == "engine_core":
        return f"tests/unit/**/test_{path.stem}*.py"
    name = "weight_transports" if path.parts[-2] == "transports" else path.stem
    return f"{'/'.join(path.parts[:2])}/tests/**/test_{name}*.py"
