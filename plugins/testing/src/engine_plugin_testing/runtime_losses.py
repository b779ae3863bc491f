"""Contracts of a runtime: errors, lost workers, leftover processes and pools.

Starting a runtime is what takes time. Contracts that leave it whole come first, and the last ones use up what was
started.
"""

from __future__ import annotations

import errno
import os
import time
import traceback
from typing import TYPE_CHECKING

from engine_core.errors import DataError, PluginError, WorkerLost
from engine_plugin_testing.contracts import contract
from engine_plugin_testing.runtime_calls import LENGTHS, raised
from engine_plugin_testing.runtime_probe import WEIGHTS

if TYPE_CHECKING:
    from typing import Any

    from engine_plugin_testing.runtime_bench import RuntimeBench


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


@contract(capability="processes")
def who_stops_waiting_for_samples_stops_the_samplers(bench: RuntimeBench) -> None:
    """If a caller closes a sampler's stream, the sampler drops its requests and answers the next call.

    So it does if ``give_up`` abandons what this thread has called.
    """
    runtime, groups, _ = bench.shared
    requests = [*bench.requests(2), *bench.requests(4, do="sleep:60")[2:]]
    stream = groups["rollout"].stream(requests)
    next(stream)
    began = time.monotonic()
    stream.close()
    groups["ref"].call("infer", bench.batch(LENGTHS), outputs=("double",)).result()
    assert time.monotonic() - began < 30
    began = time.monotonic()
    given_up = groups["rollout"].call("generate", requests=bench.requests(4, do="sleep:60"))
    runtime.give_up()
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


@contract(capability="processes")
def a_worker_that_is_killed_is_told_within_seconds(bench: RuntimeBench) -> None:
    """If a worker is killed, the current call and every later one raise ``WorkerLost`` within half a minute.

    The error names role, rank and cause.
    """
    from engine_plugin_testing.runtime_bench import PATIENCE

    with bench.started() as (_, groups, journal):
        groups["actor"].call("infer", bench.batch(LENGTHS), outputs=("double",)).result()
        pids = bench.processes(journal)
        last = bench.world_size - 1
        began = time.monotonic()
        waiting = groups["actor"].call("infer", bench.batch(LENGTHS), outputs=(f"kill@{last}", "sleep:1"))
        error = raised(waiting.result, WorkerLost)
        assert time.monotonic() - began < PATIENCE
        assert isinstance(error, WorkerLost)
        assert (error.role, error.rank) == ("actor", last), error
        assert error.cause
        again = groups["rollout"].call("generate", requests=bench.requests(1))
        assert raised(again.result, WorkerLost)
    assert bench.gone(pids), "processes are left"


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
    result = runtime.push_weights("actor", "rollout", 3)
    size = 4 * sum(WEIGHTS.values())
    assert result.bytes == 2 * size, f"The bytes of an update to two samplers: {result}; expected {2 * size}."
    for rank, lines in enumerate(bench.written(journal, "rollout", "update_weights")):
        found = [(line["version"], line["bytes"], line["checksum"]) for line in lines]
        assert found == [(3, size, result.checksum)], (
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


@contract(capability="processes")
def nothing_is_left_once_it_is_closed(bench: RuntimeBench) -> None:
    """After ``close``, no process of a rank is left."""
    runtime, groups, journal = bench.last
    groups["actor"].call("infer", bench.batch(LENGTHS), outputs=("double",)).result()
    pids = bench.processes(journal)
    assert os.getpid() not in pids
    runtime.close()
    assert bench.gone(pids), "processes are left"


@contract(catches=("engines left open by close", "engines closed again by a second close"))
def closing_twice_is_closing_once(bench: RuntimeBench) -> None:
    """``close`` may be called twice, even after a start that failed; every engine is closed once."""
    runtime, _, journal = bench.last
    runtime.close()
    runtime.close()
    bench.end_shared()
    bench.check_closed(journal)
