"""Contracts of a runtime: errors, lost workers, leftover processes and pools.

Starting a runtime is what takes time. Contracts that leave it whole come first, and the last ones use up what was
started.
"""

from __future__ import annotations

import errno
import os
import threading
import time
import traceback
from concurrent.futures import wait
from typing import TYPE_CHECKING, Any

from engine_core.errors import DataError, PluginError, WorkerLost
from engine_core.sampler_session import SamplerSession
from engine_plugin_testing.contracts import contract
from engine_plugin_testing.runtime_calls import LENGTHS, raised
from engine_plugin_testing.runtime_probe import WEIGHTS

if TYPE_CHECKING:
    from engine_plugin_testing.runtime_bench import RuntimeBench

DEADLINE = 3.0  # seconds of a call
PATIENCE = 30.0  # seconds within which a loss is noticed


@contract(catches=("the notes of an error lost", "the traceback of a worker lost"))
def an_error_comes_back_as_itself_and_the_workers_go_on(bench: RuntimeBench) -> None:
    """An engine's error reaches the caller with its class, text, notes and the worker's traceback.

    If it is none of the core's errors, it comes in a ``PluginError`` that names both. The next call is answered.
    """
    _, groups, _ = bench.shared
    for kind in (DataError, KeyError):

        def ask(name: str = kind.__name__) -> Any:
            """Call ``infer`` on engines that raise this error."""
            outputs = (f"raise:{name}",)
            return groups["actor"].call("infer", bench.batch(LENGTHS), outputs=outputs).result()

        error = raised(ask, (kind, PluginError))
        named = kind is KeyError and type(error) is PluginError and "KeyError" in str(error)
        assert type(error) is kind or named, f"{type(error)}: {error}"
        assert "requested failure" in str(error), error
        if type(error) is DataError:
            assert getattr(error, "__notes__", []) == ["requested note"], "The notes of the error differ."
            shown = "".join(traceback.format_exception(error))
            assert "in happens" in shown, f"The traceback does not reach the line that raised:\n{shown}"
    found = groups["actor"].call("infer", bench.batch([2]), split="all", outputs=("double",)).result()
    assert found["double"].tolist() == [0.0, 2.0]


@contract(catches=("the error of one rank swallowed",))
def an_error_on_one_rank_alone_comes_back(bench: RuntimeBench) -> None:
    """If one rank raises and the others return, the call raises the error of that rank.

    Every rank answers the next call, in order.
    """
    _, groups, journal = bench.shared
    for rank in range(bench.world_size):

        def ask(outputs: tuple[str, str] = ("double", f"raise:DataError@{rank}")) -> Any:
            """Call ``infer`` on engines of which one raises."""
            return groups["actor"].call("infer", bench.batch(LENGTHS), outputs=outputs).result()

        assert "requested failure" in str(raised(ask, DataError))
        found = groups["actor"].call("infer", bench.batch([2, 3]), split="all", outputs=("double",)).result()
        assert found["double"].tolist() == [0.0, 2.0, 4.0, 6.0, 8.0], found
        assert [lines[-1]["lengths"] for lines in bench.written(journal, "actor", "infer")] == [
            [2, 3]
        ] * bench.world_size


@contract(catches=("a save that failed later counted as done",))
def a_save_that_fails_later_raises_its_error(bench: RuntimeBench) -> None:
    """``save`` returns a future. If it fails later on one rank, the caller's future raises the error.

    An ``OSError`` keeps its ``errno``: a full disk is a failed save that may be tried again. The next save succeeds.
    """
    _, groups, _ = bench.shared
    for rank in range(bench.world_size):

        def save(name: str = f"full@{rank}") -> Any:
            """Save the actor and wait for its files."""
            return groups["actor"].call("save", folder=bench.folder / name).result().result()

        error = raised(save, OSError)
        assert isinstance(error, OSError)
        assert error.errno == errno.ENOSPC, f"errno is {error.errno} of {error!r}; expected {errno.ENOSPC}."
        assert "requested failure" in str(error), error
        save("state")


@contract(capability="processes", catches=("the calls of other threads given up",))
def who_stops_waiting_for_samples_stops_the_samplers(bench: RuntimeBench) -> None:
    """If a caller closes a sampler's stream, the sampler drops its requests and answers the next call.

    So it does if ``give_up`` abandons what this thread has called. What another thread has called is answered.
    """
    runtime, groups, _ = bench.shared
    requests = [*bench.requests(2), *bench.requests(4, do="sleep:60")[2:]]
    stream = groups["rollout"].stream(requests)
    next(stream)
    began = time.monotonic()
    stream.close()
    groups["ref"].call("infer", bench.batch(LENGTHS), outputs=("double",)).result()
    assert time.monotonic() - began < 30
    for busy in (0, 2):  # requests of another thread, which the samplers have first
        began, others = time.monotonic(), list[Any]()
        asked = bench.requests(busy, do="sleep:0.2")
        thread = threading.Thread(
            target=lambda asked=asked, others=others: others.append(
                groups["rollout"].call("generate", requests=asked)
            )
        )
        thread.start()
        thread.join()
        given_up = groups["rollout"].call("generate", requests=bench.requests(4, do="sleep:60"))
        runtime.give_up()
        assert others[0].exception(PATIENCE) is None, (
            f"give_up has ended a call of another thread: {others[0]}."
        )
        found = [rollout.request_id for rollout in others[0].result()]
        assert found == [request.id for request in asked], f"Another thread's call came to {found}."
        found = groups["rollout"].call("generate", requests=bench.requests(3)).result()
        assert [rollout.request_id for rollout in found] == ["r0", "r1", "r2"], found
        took = time.monotonic() - began
        assert took < 30, f"After give_up, samplers went on for {took:.0f} s with what they had."
        assert given_up.done(), "A call that was given up is not done."


@contract(capability="processes")
def a_rank_that_fails_while_others_wait_for_it_ends_the_call(bench: RuntimeBench) -> None:
    """If one rank raises while the others wait for it in a collective, the call raises its error.

    No rank waits for ever.
    """
    if bench.world_size == 1:
        return
    _, groups, _ = bench.last
    batch = bench.batch(LENGTHS)
    waiting = groups["actor"].call("infer", batch, outputs=("raise:DataError@0", "meet@"))
    assert "requested failure" in str(raised(waiting.result, DataError))
    bench.end_shared()


@contract(
    capability="processes",
    option="max_replacements",
    catches=("requests answered before a loss sampled again", "requests of a lost sampler never sent again"),
)
def a_request_of_a_lost_sampler_is_answered_once(bench: RuntimeBench) -> None:
    """If one of two samplers is killed and may be replaced, ``stream`` gives every rollout once.

    The other sampler takes the requests that the lost one had not answered. Rollouts that came before the loss do not come
    again. ``loss_metrics`` reports the loss once.
    """
    changes = {**_pools(bench), f"runtime.{bench.backend}.max_replacements": 1}
    runtime, groups, journal = bench.start_last(changes)
    requests = bench.requests(8)
    requests[-1].prompt.columns["do"] = f"die:{journal / 'lost'}"
    came = [rollout.request_id for part in groups["rollout"].stream(requests) for rollout in part]
    assert (journal / "lost").exists(), "No sampler was lost."
    assert sorted(came) == sorted(request.id for request in requests), (
        f"Rollouts came of the requests {sorted(came)}; expected each once."
    )
    losses = [runtime.loss_metrics().get("sampling/lost") for _ in range(2)]
    assert losses == [1.0, 0.0], (
        f"loss_metrics reports {losses} lost samplers in two calls; expected 1, then 0."
    )
    asked = [line["ids"] for lines in bench.written(journal, "rollout", "add") for line in lines]
    assert max(len(ids) for ids in asked if "r7" in ids) > 1, (
        f"The lost sampler had one request alone: {asked}."
    )


def _pools(bench: RuntimeBench) -> dict[str, Any]:
    """Return the keys of a run whose sampler has a pool of two processes."""
    return {
        "placement.pools": {"train": bench.world_size, "serve": 2},
        "placement.actor": "train",
        "placement.rollout": "serve",
    }


@contract(capability="processes")
def a_worker_that_is_killed_is_told_within_seconds(bench: RuntimeBench) -> None:
    """If a worker is killed, the current call and every later one raise ``WorkerLost`` within half a minute.

    The error names role, rank and cause.
    """
    runtime, groups, journal = bench.last
    groups["actor"].call("infer", bench.batch(LENGTHS), outputs=("double",)).result()
    pids = bench.processes(journal)
    last = bench.world_size - 1
    began = time.monotonic()
    waiting = groups["actor"].call("infer", bench.batch(LENGTHS), outputs=(f"kill@{last}", "sleep:1"))
    error = raised(lambda: waiting.result(PATIENCE), WorkerLost)
    assert time.monotonic() - began < PATIENCE
    assert isinstance(error, WorkerLost)
    assert (error.role, error.rank) == ("actor", last), error
    assert error.cause
    again = groups["rollout"].call("generate", requests=bench.requests(1))
    assert raised(lambda: again.result(PATIENCE), WorkerLost)
    runtime.close()
    bench.end_shared()
    assert bench.gone(pids), "processes are left"


@contract(
    capability="processes",
    option="command_timeout_minutes",
    catches=("a sampler that rests before its requests are answered", "no deadline for a call with a batch"),
)
def a_rank_that_misses_the_deadline_is_lost(bench: RuntimeBench) -> None:
    """If a rank takes longer for a call than ``command_timeout_minutes``, the call raises ``WorkerLost``.

    The error names role, rank and key. Calls that are no longer than that are answered, however many follow each other.
    """
    key = f"runtime.{bench.backend}.command_timeout_minutes"
    with bench.started({key: DEADLINE / 60}) as (_, groups, _):
        session = SamplerSession(groups["rollout"])
        session.submit(bench.requests(6 * bench.world_size, do=f"sleep:{DEADLINE / 15}"))
        began, answered = time.monotonic(), 0
        while answered < 6 * bench.world_size and time.monotonic() < began + 5 * DEADLINE:
            answered += len(session.results(timeout=0.1))
        assert answered == 6 * bench.world_size, f"Only {answered} requests were answered in 5 deadlines."
        last = bench.world_size - 1
        waiting = groups["actor"].call("infer", bench.batch(LENGTHS), outputs=("double", f"sleep:90@{last}"))
        assert wait([waiting], 5 * DEADLINE).done, (
            "A rank does not answer, and the call has not ended after 5 deadlines."
        )
        error = raised(waiting.result, WorkerLost)
        assert isinstance(error, WorkerLost)
        assert (error.role, error.rank) == ("actor", last), error
        assert key in str(error), f"The error does not name {key}: {error}"


@contract(capability="processes", catches=("the bytes of one receiver reported for all",))
def pools_lie_in_processes_of_their_own(bench: RuntimeBench) -> None:
    """Roles of different pools share no process.

    Each pool is a separate world, and weights travel from one to the other. The bytes of an update are those of all
    receivers together.
    """
    runtime, groups, journal = bench.start_last(_pools(bench))
    batch = bench.batch(LENGTHS)
    worlds = {
        role: groups[role].call("infer", batch, outputs=("world",)).result()["world"].unique().tolist()
        for role in ("actor", "ref")
    }
    assert worlds == {"actor": [bench.world_size], "ref": [bench.world_size]}, worlds
    assert groups["rollout"].world_size == 2
    size = 4 * sum(WEIGHTS.values())
    for version in (3, 4):
        groups["actor"].call("optimizer_step")
        result = runtime.push_weights("actor", "rollout", version)
        assert result.bytes == 2 * size, (
            f"The bytes of an update to two samplers: {result}; expected {2 * size}."
        )
        for rank, lines in enumerate(bench.written(journal, "rollout", "update_weights")):
            found = [lines[-1][name] for name in ("version", "bytes", "checksum")]
            assert found == [version, size, result.checksum], (
                f"rollout[{rank}] received {found}; the push says {result}."
            )
    groups["rollout"].call("generate", requests=bench.requests(3)).result()
    pids = {
        role: {line["pid"] for lines in bench.written(journal, role) for line in lines}
        for role in ("actor", "ref", "rollout")
    }
    assert pids["actor"] == pids["ref"]
    assert len(pids["actor"]) == bench.world_size
    assert not pids["actor"] & pids["rollout"], pids


@contract(
    capability="processes",
    catches=(
        "a call in flight that never ends after close",
        "a thread left by every run",
        "environment variables of workers left in the controller",
    ),
)
def nothing_is_left_once_it_is_closed(bench: RuntimeBench) -> None:
    """After ``close``, no process of a rank is left, and no thread, open file or environment variable in the controller.

    A rank is busy when the runtime is closed: its call, and a later one, raise ``WorkerLost``.
    """
    from engine_plugin_testing.runtime_bench import ENDING

    runtime, groups, journal = bench.last
    groups["actor"].call("infer", bench.batch(LENGTHS), outputs=("double",)).result()
    pids = bench.processes(journal)
    assert os.getpid() not in pids
    busy = groups["actor"].call("infer", bench.batch(LENGTHS), outputs=("double", "sleep:60@0"))
    runtime.close()
    for call in (busy, groups["rollout"].call("generate", requests=bench.requests(1))):
        assert wait([call], ENDING).done, f"A call has not ended {ENDING} s after close."
        assert raised(call.result, WorkerLost)
    assert bench.gone(pids), "processes are left"
    deadline = time.monotonic() + ENDING
    while any(now > then for now, then in zip(bench.held()[:2], bench.before[:2], strict=True)):
        assert time.monotonic() < deadline, (
            f"After close, this process has {bench.held()[:2]} open files and threads; before the start it had {bench.before[:2]}."
        )
        time.sleep(0.05)
    changed = {name for name, _ in bench.held()[2].items() ^ bench.before[2].items()}
    assert not changed, f"The environment variables {sorted(changed)} of the controller have changed."


@contract(catches=("engines left open by close", "engines closed again by a second close"))
def closing_twice_is_closing_once(bench: RuntimeBench) -> None:
    """``close`` may be called twice, even after a start that failed; every engine is closed once."""
    runtime, _, journal = bench.last
    runtime.close()
    runtime.close()
    bench.end_shared()
    bench.check_closed(journal)
