"""Sessions: state between pieces of code, the attacks of the probes, and the end."""

import os
import selectors
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from engine_plugin_rewards.sandbox import probes, tiers
from engine_plugin_rewards.sandbox import session as sessions
from engine_plugin_rewards.sandbox.box import BoxProblem
from engine_plugin_rewards.sandbox.session import OUTPUT_BYTES, Session

KINDS = [("python", tier) for tier in tiers.TIERS] + [("bash", "namespaces")]


@pytest.fixture
def session():
    """session(kind, tier): a session, closed at the end; a tier that this machine lacks skips the test."""
    made = []

    def make(kind, tier="namespaces", **options):
        if why := tiers.problem(tier):
            pytest.skip(why)
        made.append(Session(kind, tier, 600, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


def said(session, source):
    reply = session.run(source)
    assert not reply.ended, reply
    return reply.output.decode()


def alive(processes):
    return [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]


def wait_for(condition):
    for _ in range(3000):
        if condition():
            return True
        threading.Event().wait(0.02)
    return False


@pytest.mark.parametrize("tier", tiers.TIERS)
def test_variables_and_functions_of_python_last(session, tier):
    python = session("python", tier)
    assert said(python, "import math\nx = [1]\ndef f(y):\n    return x + [y]") == ""
    assert said(python, "x.append(2)\nf(3)") == "[1, 2, 3]\n"
    assert said(python, "print(len(x)); None") == "2\n"
    assert "ZeroDivisionError" in said(python, "x = 5\n1 / 0")
    assert said(python, "x, math.floor(2.5)") == "(5, 2)\n"
    assert "SyntaxError" in said(python, "x = (")
    assert "SystemExit" in said(python, "import sys; sys.exit(1)")
    assert "EOFError" in said(python, "input()")
    assert said(python, "# nothing") == ""
    assert said(python, "'\0'.join(['a', 'b'])") == "'ab'\n"


def test_an_error_shows_the_lines_of_its_calls_and_no_others(session):
    python = session("python", "limits")
    said(python, "def f():\n    return 1 / 0")
    text = said(python, "f()")
    assert "return 1 / 0" in text
    assert "sessions.py" not in text


def test_files_folder_and_variables_of_bash_last(session):
    bash = session("bash")
    assert said(bash, "mkdir d; cd d; x=5; echo hi > f; ls -l | wc -l; pwd") == "2\n/box/d\n"
    assert (
        said(bash, "echo $x; pwd; cat f | tr i o; python3 -c 'print(2 + 2)' 2>/dev/null")
        == "5\n/box/d\nho\n4\n"
    )
    assert "syntax error" in said(bash, "for (")
    assert said(bash, 'read line; echo "[$line]"; sed -i s/hi/ha/ f; cat f; sort f >&2') == "[]\nha\nha\n"


def test_files_of_python_last_in_namespaces(session):
    python = session("python")
    said(python, "with open('f', 'w') as file: file.write('kept')")
    assert said(python, "print(open('f').read())") == "kept\n"


@pytest.mark.parametrize(("kind", "tier"), KINDS)
@pytest.mark.parametrize("probe", probes.PROBES, ids=lambda probe: probe.name)
def test_what_is_refused_in_a_box_is_refused_in_a_session(session, kind, tier, probe):
    if tiers.TIERS.index(probe.tier) > tiers.TIERS.index(tier):
        pytest.skip("this tier does not promise it")
    if kind == "bash" and probe.source in (probes.START, probes.SIGNAL):
        pytest.skip("a shell starts and signals processes of its box; see the tests of that")
    each = session(kind, tier)
    with probes.bait() as laid:
        bait = repr(laid.described().decode())
        source = (probes.PROLOGUE + probe.source).replace("json.loads(input())", f"json.loads({bait})")
        source = source.replace("range(4, ", "range(5, ")  # a session has one more, for its code
        if kind == "bash":  # Python sets one variable itself
            source = source.replace("if os.environ:", "if {*os.environ} - {'LC_CTYPE'}:")
            source = f"env -i $(command -v python3) - <<'END'\n{source}\nEND"
        endless = probe.source in (probes.TIME, probes.OUTPUT)
        if endless:
            each.run("")  # it has started
            threading.Timer(0.3, each.kill).start()
        output = each.run(source).output
        assert b"BREACH" not in output
        assert b"refused" in output or endless
        assert laid.touched() == ""


BOMB = """
import os, time
try:
    while True:
        if os.fork() == 0:
            time.sleep(600)
except OSError as error:
    print(error)
"""


def test_a_shell_reaches_no_process_outside_and_cannot_flood_the_machine(session):
    bash = session("bash")
    here = os.getpid()
    text = said(
        bash, f"kill -0 {here}; kill -9 1 $PPID; ls /proc; cat /etc/passwd; exec 2>&1; echo still here"
    )
    assert text.count("No such process") == 1
    assert "still here" in text
    text = said(bash, f"python3 - <<'END'\n{BOMB}\nEND")
    assert "Resource temporarily unavailable" in text
    box = psutil.Process(bash._box.popen.pid)
    assert 20 < len(box.children(recursive=True)) < 40


def test_processes_of_a_shell_need_a_separate_process_tree():
    with pytest.raises(BoxProblem, match="several processes need the tier namespaces"):
        Session("bash", "landlock", 60).run("true")


@pytest.mark.parametrize(("kind", "tier"), KINDS)
def test_the_middle_of_a_large_output_is_left_out_and_the_session_continues(session, kind, tier):
    each = session(kind, tier)
    source = (
        "print('a' * 50_000_000)" if kind == "python" else "head -c 50000000 /dev/zero | tr '\\0' a; echo"
    )
    reply = each.run(
        f"print('begin')\n{source}\nprint('end')" if kind == "python" else f"echo begin; {source}; echo end"
    )
    assert reply.output.startswith(b"begin\n")
    assert reply.output.endswith(b"end\n")
    assert len(reply.output) == OUTPUT_BYTES
    assert reply.left_out == 50_000_011 - OUTPUT_BYTES
    assert said(each, "print(3)" if kind == "python" else "echo 3") == "3\n"


@pytest.mark.parametrize(("kind", "tier"), KINDS)
def test_an_output_without_end_ends_the_session(session, kind, tier, monkeypatch):
    monkeypatch.setattr(sessions, "FLOOD_BYTES", 1 << 20)
    each = session(kind, tier)
    reply = each.run(
        "while True: print('a' * 1000)" if kind == "python" else "while true; do echo aaaa; done"
    )
    assert reply.ended == "was stopped: it printed too much"
    assert reply.left_out < 3 << 20
    assert each.run("1").ended == reply.ended


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("python", "import os, time; os.close(1); os.close(2); time.sleep(1)"),
        ("bash", "exec >&- 2>&-; sleep 1"),
    ],
)
def test_a_piece_that_closed_its_output_is_waited_for_without_a_busy_loop(session, kind, source, monkeypatch):
    waits = []

    class Counted(selectors.DefaultSelector):
        def select(self, timeout=None):
            waits.append(timeout)
            return super().select(timeout)

    monkeypatch.setattr(selectors, "DefaultSelector", Counted)
    session(kind).run(source)
    assert 0 < len(waits) < 10


def test_programs_of_a_shell_are_those_of_its_folders_though_one_does_not_exist(session, monkeypatch):
    monkeypatch.setattr(sessions, "PROGRAMS", ("/usr/bin", "/no/such", "/bin", "/etc/alternatives"))
    assert said(session("bash"), "echo $PATH") == "/usr/bin:/no/such:/bin\n"


def test_a_closed_session_signals_no_process(session, monkeypatch):
    each = session("python", "limits")
    each.run("1")
    each.close()
    monkeypatch.setattr(os, "killpg", lambda *_: pytest.fail("the id may belong to another process"))
    each.kill()
    each.close()


def test_a_program_that_ends_ends_its_session(session):
    python = session("python", "limits")
    assert python.run("import os; os._exit(3)").ended == "ended with status 3"
    assert (
        session("python", "limits").run("import ctypes; ctypes.string_at(0)").ended == "was killed by SIGSEGV"
    )
    assert session("bash").run("exit 4").ended == "ended with status 4"
    assert python.run("1").ended == "ended with status 3"


@pytest.mark.parametrize(("kind", "tier"), KINDS)
def test_a_kill_ends_a_piece_that_runs_and_all_its_processes(session, kind, tier):
    each = session(kind, tier)
    said(each, "1" if kind == "python" else "true")
    box, family = psutil.Process(each._box.popen.pid), []

    def kill():
        family.extend([box, *box.children(recursive=True)])
        each.kill()

    threading.Timer(0.2, kill).start()
    reply = each.run("while True: pass" if kind == "python" else "sleep 600 & while true; do :; done")
    assert reply.ended == "was stopped"
    assert len(family) >= 2 + (tier == "namespaces") + (kind == "bash")
    each.close()
    assert wait_for(lambda: alive(family) == [])


def test_descriptors_do_not_leak():
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        each = Session("python", "limits", 60)
        each.run("1")
        each.close()
    assert len(os.listdir("/proc/self/fd")) == before


ENGINE = """
import sys
from engine_plugin_rewards.sandbox.session import Session
session = Session(sys.argv[1], sys.argv[2], 600)
session.run("1" if sys.argv[1] == "python" else "sleep 600 & true")
print(session._box.popen.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(("kind", "tier"), KINDS)
def test_nothing_survives_an_engine_that_is_killed(kind, tier):
    if why := tiers.problem(tier):
        pytest.skip(why)
    mounts = Path("/proc/self/mountinfo").read_text()
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    engine = subprocess.Popen([sys.executable, "-c", ENGINE, kind, tier], text=True, **pipes)
    box = psutil.Process(int(engine.stdout.readline()))
    family = [box, *box.children(recursive=True)]
    assert len(family) >= 2 + (tier == "namespaces") + (kind == "bash")

    os.kill(engine.pid, signal.SIGKILL)
    engine.communicate()

    assert wait_for(lambda: alive(family) == [])
    assert Path("/proc/self/mountinfo").read_text() == mounts
