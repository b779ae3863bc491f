"""Each attack fails from the tier on that promises it, and no process outlives a box."""

import contextlib
import ctypes
import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from engine_core.errors import EnvironmentProblem
from engine_plugin_rewards.sandbox import box as boxes
from engine_plugin_rewards.sandbox import probes, tiers
from engine_plugin_rewards.sandbox.box import Box, BoxProblem

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "sandbox.md"
HEADERS = {
    0: ["/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "/usr/include/asm/unistd_64.h"],
    1: ["/usr/include/asm-generic/unistd.h"],
}
HELLO = {"kind": "stdin", "source": "print('hello', input())"}


def index(tier):
    return tiers.TIERS.index(tier)


@pytest.fixture(scope="module")
def box_of():
    """Return ``box_of(tier)``: one box for all tests; skips the test where this machine cannot make it."""
    made = {}

    def get(tier):
        if tier not in made:
            try:
                made[tier] = Box(tier)
            except BoxProblem as exc:
                made[tier] = str(exc)
        if isinstance(made[tier], str):
            pytest.skip(f"{tier}: {made[tier]}")
        return made[tier]

    yield get
    for made_box in made.values():
        if isinstance(made_box, Box):
            made_box.close()


ATTACKS = [
    pytest.param(probe, tier, id=f"{tier}-{probe.name}")
    for tier in tiers.TIERS
    for probe in probes.PROBES
    if index(probe.tier) <= index(tier)
]


@pytest.mark.parametrize(("probe", "tier"), ATTACKS)
def test_an_attack_fails_and_the_next_program_runs(box_of, probe, tier):
    box = box_of(tier)
    with probes.bait() as laid:
        got, ended = probes.run(probe, box, laid)

    assert got == ""
    if probe.name.startswith("continue"):
        assert ended.late
    if probe.name.startswith("print"):
        assert ended.flooded
    assert inhabitants(box) <= 1
    assert box.run(HELLO, b"you").output == b"hello you\n"


def inhabitants(box):
    """Return the number of processes in a box, without those that wait for programs."""
    waiting = {"limits": 0, "landlock": 0, "namespaces": 1}[box.tier]
    children = psutil.Process(box.popen.pid).children(recursive=True)
    return len([child for child in children if child.status() != psutil.STATUS_ZOMBIE]) - waiting


@pytest.mark.parametrize("name", ["read files", "write, change", "reach a socket", "signal other", "start a"])
def test_the_attacks_succeed_where_nothing_stops_them(name, tmp_path):
    (probe,) = [probe for probe in probes.PROBES if probe.name.startswith(name)]
    with (
        probes.bait() as laid,
        (tmp_path / "printed").open("w+b") as printed,
    ):  # a process it starts would hold a pipe
        attack = subprocess.Popen(
            [sys.executable, "-I", "-c", probes.PROLOGUE + probe.source],
            stdin=subprocess.PIPE,
            stdout=printed,
            stderr=subprocess.DEVNULL,
            cwd=laid.folder,
            start_new_session=True,
        )
        attack.communicate(laid.described())
        with contextlib.suppress(ProcessLookupError):
            os.killpg(attack.pid, signal.SIGKILL)
        printed.seek(0)
        assert probes.BREACH in printed.read()


# -- limits -------------------------------------------------------------------


@pytest.mark.parametrize("tier", tiers.TIERS)
def test_a_program_reads_prints_fails_and_crashes(box_of, tier):
    box = box_of(tier)

    def run(source, stdin=b""):
        return box.run({"kind": "stdin", "source": source}, stdin)

    assert (
        run("import sys; sys.stdout.write(sys.stdin.read()[::-1])", b"abc" * 50_000).output == b"cba" * 50_000
    )
    assert run("print('a'); 1 / 0").code == 1
    assert b"ZeroDivisionError" in run("1 / 0").errors
    assert run("import sys; sys.exit(3)").code == 3
    assert run("raise SystemExit").code == 0
    assert run("def f(): pass\n  x").code == 1
    assert run("import ctypes; ctypes.string_at(0)").code == -signal.SIGSEGV
    assert run("import asyncio\nasync def f(): print(4)\nasyncio.run(f())").output == b"4\n"
    assert (
        run("import threading\nt = threading.Thread(target=print, args=(5,)); t.start(); t.join()").output
        == b"5\n"
    )
    assert run("if __name__ == '__main__': print(6)").output == b"6\n"


@pytest.mark.parametrize("tier", tiers.TIERS)
def test_a_program_knows_nothing_of_the_one_before(box_of, tier):
    box = box_of(tier)
    box.run(
        {
            "kind": "stdin",
            "source": "import math, builtins; math.pi = 3; builtins.print = None; math.left = 1",
        }
    )
    ended = box.run({"kind": "stdin", "source": "import math; print(math.pi > 3, hasattr(math, 'left'))"})

    assert ended.output == b"True False\n"


def test_a_program_has_a_disk_of_its_own_in_namespaces(box_of):
    box = box_of("namespaces")
    source = "open('a', 'w').write('x'); import os; print(os.listdir('.'), open('a').read())"

    for _ in range(2):
        assert box.run({"kind": "stdin", "source": source}).output == b"['a'] x\n"


def test_the_disk_has_the_size_and_the_number_of_files_that_were_given(box_of):
    source = """
import os
written = files = 0
try:
    with open("big", "wb", buffering=0) as file:
        while True:
            written += file.write(b"x" * 2**20)
except OSError as exc:
    print(written // 2**20, exc.errno)
os.remove("big")
try:
    while True:
        os.mkdir(str(files))
        files += 1
except OSError as exc:
    print(900 < files < 1100, exc.errno)
"""
    box = box_of("namespaces")
    assert box.run({"kind": "stdin", "source": source}).output in (
        b"16 28\nTrue 28\n",
        b"16 27\nTrue 28\n",
        b"15 28\nTrue 28\n",
    )


@pytest.mark.parametrize("tier", tiers.TIERS)
def test_files_and_folders_that_are_shown_can_be_read_and_not_written(box_of, tier, tmp_path):
    """Below /tmp, too, over which a new root is mounted."""
    box_of(tier)
    folder = tmp_path / "package"
    folder.mkdir()
    (folder / "data").write_text("inside")
    (tmp_path / "single").write_text("alone")
    (tmp_path / "other").write_text("unseen")
    for path in (tmp_path, folder):
        path.chmod(0o755)
    source = f"""
import os
for name in ("package/data", "single"):
    print(open("{tmp_path}/" + name).read())
for mode, name in (("w", "package/data"), ("w", "package/new"), ("a", "single"), ("r", "other")):
    try:
        open("{tmp_path}/" + name, mode).close()
        print("opened", name)
    except OSError:
        pass
"""
    with Box(tier, [str(folder), str(tmp_path / "single")]) as box:
        output = box.run({"kind": "stdin", "source": source}).output
    assert output.startswith(b"inside\nalone\n")
    assert tier == "limits" or output == b"inside\nalone\n"


def test_time_is_wall_clock_and_kept(box_of):
    box = box_of("limits")
    start = time.monotonic()
    ended = box.run({"kind": "stdin", "source": "import time; time.sleep(30)"}, seconds=0.2)

    assert ended.late
    assert ended.code == -signal.SIGKILL
    assert time.monotonic() - start < 10


def test_values_that_are_too_long_end_a_program(box_of):
    ended = box_of("limits").run(
        {"kind": "call", "source": "def f(): return 'x' * 10 ** 7", "function": "f", "arguments": []}
    )

    assert ended.flooded
    assert len(ended.values) <= 256 * 1024


def test_a_program_cannot_answer_for_the_box(box_of):
    """Bytes that it writes to any descriptor are output, never an answer about how it ended."""
    source = """
import os
for number in range(3, 64):
    try:
        os.write(number, b'{"id": 1, "code": 0, "late": false, "cpu": 0}\\n')
    except OSError:
        pass
os._exit(9)
"""
    for tier in tiers.TIERS[:2]:
        assert box_of(tier).run({"kind": "stdin", "source": source}).code == 9


@pytest.mark.parametrize("stops", [1, 3])
def test_a_stop_that_comes_too_late_stops_nothing_else(box_of, stops):
    box = box_of("limits")
    for _ in range(stops):
        box.channel.sendall(b"stop")

    assert box.run(HELLO, b"you").output == b"hello you\n"


def test_descriptors_do_not_leak(monkeypatch):
    def refuse(*arguments):
        raise OSError("no memory for files")

    with Box("limits") as box:
        box.run(HELLO, b"x")
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(20):
            box.run(HELLO, b"x")
        assert len(os.listdir("/proc/self/fd")) == before
        with monkeypatch.context() as patch:
            patch.setattr(os, "memfd_create", refuse)
            with pytest.raises(OSError, match="no memory"):
                box.run(HELLO, b"x")
        assert len(os.listdir("/proc/self/fd")) == before
        assert box.run(HELLO, b"x").output == b"hello x\n"


def test_a_box_that_breaks_says_so_and_is_there_again():
    with Box("limits") as box:
        os.kill(box.popen.pid, signal.SIGKILL)
        box.popen.wait()
        with pytest.raises(BoxProblem, match="started again"):
            box.run(HELLO, b"x")
        assert box.run(HELLO, b"x").output == b"hello x\n"


# -- the end ------------------------------------------------------------------

ENGINE = """
import sys
from engine_plugin_rewards.sandbox.box import Box
box = Box(sys.argv[1])
print(box.popen.pid, flush=True)
box.run({"kind": "stdin", "source": "import time; time.sleep(600)"}, seconds=600)
"""


def alive(processes):
    return [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def wait_for(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


@pytest.mark.parametrize("tier", tiers.TIERS)
def test_nothing_survives_an_engine_that_is_killed(box_of, tier):
    box_of(tier)
    mounts = Path("/proc/self/mountinfo").read_text()
    engine = subprocess.Popen([sys.executable, "-c", ENGINE, tier], stdout=subprocess.PIPE, text=True)
    box = psutil.Process(int(engine.stdout.readline()))
    least = {"limits": 1, "landlock": 1, "namespaces": 2}[tier]
    assert wait_for(lambda: len(box.children(recursive=True)) >= least)
    family = [box, *box.children(recursive=True)]

    os.kill(engine.pid, signal.SIGKILL)
    engine.wait()
    engine.stdout.close()

    assert wait_for(lambda: alive(family) == [])
    assert Path("/proc/self/mountinfo").read_text() == mounts


@pytest.mark.parametrize("tier", tiers.TIERS)
def test_a_closed_box_leaves_nothing(box_of, tier, tmp_path, monkeypatch):
    box_of(tier)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    box = Box(tier)
    box.run(HELLO, b"x")
    family = [psutil.Process(box.popen.pid), *psutil.Process(box.popen.pid).children(recursive=True)]
    box.close()

    assert wait_for(lambda: alive(family) == [])
    assert list(tmp_path.iterdir()) == []


# -- tiers --------------------------------------------------------------------


@pytest.fixture
def broken(monkeypatch):
    """Return ``broken(tier)``, which makes boxes of this tier fail to close."""
    names = set()
    real = Box._start

    def start(self):
        if self.tier in names:
            raise BoxProblem("not on this machine")
        real(self)

    tiers.problem.cache_clear()
    monkeypatch.setattr(Box, "_start", start)
    yield names.add
    tiers.problem.cache_clear()


def test_a_weaker_machine_is_refused_before_anything_runs(broken):
    for tier in ("landlock", "namespaces"):
        broken(tier)

    assert tiers.demand("limits") == "limits"
    with pytest.raises(
        EnvironmentProblem, match=r"min_isolation = 'landlock'.*only 'limits': not on this machine"
    ) as exc:
        tiers.demand("landlock")
    assert "Linux 5.13" in str(exc.value)
    assert exc.value.exit_code == 5
    broken("limits")
    tiers.problem.cache_clear()
    with pytest.raises(EnvironmentProblem, match="No program can be run"):
        tiers.demand("limits")


def test_a_tier_that_does_not_stop_an_attack_is_not_in_force(broken, monkeypatch):
    broken("namespaces")
    sieve = probes.Probe("get through", "landlock", "nothing", "breach()")
    monkeypatch.setattr(probes, "PROBES", (sieve,))

    assert tiers.problem("landlock").startswith("it does not stop an attempt to get through: BREACH")
    assert tiers.strongest()[0] == "limits"


def test_the_strongest_is_taken_and_looked_at_once(broken, monkeypatch):
    started = []
    monkeypatch.setattr(probes, "run", lambda probe, box, laid: (started.append(box.tier) or "", None))
    first = tiers.demand("limits")
    count = len(started)

    assert tiers.demand("limits") == first
    assert len(started) == count
    assert first in tiers.health()


# -- the list of system calls ---------------------------------------------------


def numbers_in(path):
    text = Path(path).read_text()
    found = re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)\s*$", text, re.MULTILINE)
    return {{"fstatat": "newfstatat"}.get(name, name): int(number) for name, number in found}


@pytest.mark.parametrize("column", [0, 1], ids=["x86_64", "aarch64"])
def test_numbers_of_system_calls_are_those_of_the_kernel(column, monkeypatch):
    header = next((path for path in HEADERS[column] if os.path.exists(path)), None)
    if header is None:
        pytest.skip("the kernel's headers are not installed")
    monkeypatch.syspath_prepend(boxes.INSIDE)
    import seccomp

    kernel = numbers_in(header)
    tables = (
        seccomp.PLAIN,
        seccomp.WRITING,
        seccomp.RULED,
        seccomp.ABSENT,
    )
    for table in tables:
        for name, number in seccomp.numbers(table, column).items():
            assert kernel[name] == number, name


def test_limits_hold_in_the_program(box_of):
    source = """
import json, resource
names = ("AS", "CORE", "FSIZE", "NOFILE", "MEMLOCK", "CPU")
print(json.dumps({n: resource.getrlimit(getattr(resource, f"RLIMIT_{n}")) for n in names}))
"""
    output = box_of("limits").run({"kind": "stdin", "source": source}, seconds=3).output
    assert b'"AS": [536870912, 536870912]' in output
    assert b'"FSIZE": [0, 0]' in output
    assert b'"CPU": [5, 5]' in output
    assert resource.getrlimit(resource.RLIMIT_AS)[0] != 536870912
    assert ctypes.sizeof(ctypes.c_void_p) == 8
