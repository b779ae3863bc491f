"""The suite of runtimes catches what it says that it catches: each fault by the contract that names it."""

import dataclasses
import os
import threading
import time

import pytest

from engine_core.contracts.weight_sync import SyncResult
from engine_core.errors import DataError, PluginError
from engine_core.sampler_session import SamplerSession
from engine_plugin_processes import flow, generation, links, split, torchrun, worker_group, worker_pool
from engine_plugin_testing import RuntimeSuite
from engine_plugin_testing.runtime_bench import RuntimeBench


class Runtime(RuntimeSuite):
    plugins = ["broken_runtimes.py"]
    processes = False


FAULTS = [
    ("LosesTogether", "keep_together lost", "every_column_of_a_batch_crosses"),
    ("RoundsColumns", "columns rounded to float32", "every_column_of_a_batch_crosses"),
    ("LosesTemperature", "the temperature of a batch lost", "every_column_of_a_batch_crosses"),
    ("CutsColumns", "columns with K values cut", "every_column_of_a_batch_crosses"),
    ("RoundsMetrics", "metrics rounded to float32", "values_cross_exactly"),
    ("OneMicroBatch", "the number of micro-batches lost", "values_cross_exactly"),
    ("LosesOption", "a sampling option lost", "every_field_of_requests_and_rollouts_crosses"),
    ("LosesBegun", "the tokens of begun lost", "every_field_of_requests_and_rollouts_crosses"),
    (
        "PromptOfId",
        "the prompt of another request with the same id",
        "every_field_of_requests_and_rollouts_crosses",
    ),
    ("LosesExtras", "extras of rollouts lost", "every_field_of_requests_and_rollouts_crosses"),
    ("LosesFailure", "the failure of a rollout lost", "every_field_of_requests_and_rollouts_crosses"),
    ("LosesNotes", "the notes of an error lost", "an_error_comes_back_as_itself_and_the_workers_go_on"),
    (
        "LosesTraceback",
        "the traceback of a worker lost",
        "an_error_comes_back_as_itself_and_the_workers_go_on",
    ),
    ("Swallows", "the error of one rank swallowed", "an_error_on_one_rank_alone_comes_back"),
    ("CountsIdle", "steps in which a role is idle counted", "every_role_has_a_group_of_its_ranks"),
    ("Unseeded", "torch not seeded where engines are built", "every_role_has_a_group_of_its_ranks"),
    ("TrainsAll", "a reference built to be trained", "every_role_has_a_group_of_its_ranks"),
    (
        "LeavesFailed",
        "requests of a call that failed sampled later",
        "random_calls_of_a_sampler_answer_each_request_once",
    ),
    ("OneRound", "the number of rounds lost", "random_calls_of_a_sampler_answer_each_request_once"),
    ("PushesFirst", "the weights of the first push sent again", "pushed_weights_reach_every_sampler_whole"),
    ("LeavesEngines", "engines left open by a start that fails", "a_start_that_fails_tells_why"),
    (
        "LeavesStreams",
        "requests of a closed stream that stay in the sampler",
        "a_stream_that_is_closed_leaves_no_request",
    ),
    ("NeverCloses", "engines left open by close", "closing_twice_is_closing_once"),
    ("ClosesAgain", "engines closed again by a second close", "closing_twice_is_closing_once"),
    ("ForgetsDrops", "a dropped request answered", "random_calls_of_a_sampler_answer_each_request_once"),
    ("DropsLate", "a dropped request sampled", "random_calls_of_a_sampler_answer_each_request_once"),
    (
        "EarlierPrompt",
        "the prompt of an earlier request with the same id",
        "random_calls_of_a_sampler_answer_each_request_once",
    ),
    (
        "HidesStopped",
        "a stopped request without an answer",
        "random_calls_of_a_sampler_answer_each_request_once",
    ),
    ("AnswersOfEarlierCalls", "an answer given to another call", "random_batches_come_back_in_their_order"),
    ("LosesColumnsOfOne", "columns of one sequence lost", "random_batches_come_back_in_their_order"),
    ("CallsTwice", "a call carried out twice", "random_calls_reach_every_engine_as_sent"),
    ("LosesAdapter", "an argument lost on its way", "random_calls_reach_every_engine_as_sent"),
    ("ErrorStays", "an error raised again by the next call", "random_calls_reach_every_engine_as_sent"),
    ("MixesHalf", "the share of a mix lost", "random_calls_reach_every_engine_as_sent"),
    ("SleepsInTraining", "trainers asleep while they train", "a_phase_wakes_what_it_needs"),
    ("SleepsWhole", "the weights of idle samplers not kept", "a_phase_wakes_what_it_needs"),
    ("OwnMemory", "the memory of this process reported", "memory_is_reported_for_every_role"),
    ("SaveIsDone", "a save that failed later counted as done", "a_save_that_fails_later_raises_its_error"),
]


@pytest.mark.parametrize(("name", "fault", "contract"), FAULTS, ids=[fault[0] for fault in FAULTS])
def test_a_planted_fault_is_caught_by_its_contract(name, fault, contract):
    made = Runtime.contracts[f"test_{contract}"]
    bench = RuntimeBench(**{**Runtime.settings(), "backend": name})
    try:
        with pytest.raises(
            (AssertionError, PluginError, DataError)
        ):  # of the core, before the contract compares
            made.function(bench)
    finally:
        bench.close()
    assert fault in made.catches


@pytest.mark.slow  # two ranks
def test_faults_of_the_split_over_ranks_are_caught(monkeypatch):
    settings = {**Runtime.settings(), "backend": "torchrun", "plugins": [], "world_size": 2}
    contract = Runtime.contracts["test_every_column_of_a_batch_crosses"].function
    partition, put_back = split.partition, split._put_back
    bench = RuntimeBench(**settings)
    try:
        contract(bench)
        with monkeypatch.context() as patched:
            patched.setattr(split, "partition", lambda costs, slices, together=None: partition(costs, slices))
            with pytest.raises(AssertionError, match="belong together were separated"):
                contract(bench)
        monkeypatch.setattr(
            split,
            "_put_back",
            lambda name, values, parts, batch: put_back(name, values, [part[::-1] for part in parts], batch),
        )
        with pytest.raises(AssertionError, match="came back as"):
            contract(bench)
    finally:
        bench.close()


send, go, share = generation.Generation._send, flow.Flow.go, worker_group.RemoteWorkerGroup.share
interrupt, cancel = SamplerSession.interrupt, SamplerSession.cancel
command, close_pool = worker_pool.WorkerPool.send, worker_pool.WorkerPool.close
environment, launch = torchrun.TorchrunRuntime._environment, torchrun.TorchrunRuntime._launch


def restarts_deadlines(session):
    session._since.clear()
    return interrupt(session)


def begins_again(session):
    parts = interrupt(session)
    session._new = [dataclasses.replace(request, begun=None) for request in session._new]
    return parts


def loses_drops(session, ids):
    session._dropped = []
    return cancel(session, ids)


def gives_all_up(pool):
    time.sleep(0.1)  # until the commands have been sent
    for one in list(pool.open.values()):
        one.reply.give_up()


def without_deadline(pool, messages, what, **options):
    options |= {"deadline": (1e9, "")} if what[1] == "infer" else {}
    return command(pool, messages, what, **options)


def forgets_open(pool):
    pool.open.clear()
    close_pool(pool)


def leaves_thread(runtime):
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    return launch(runtime)


def sets_variables(runtime):
    os.environ["ENGINE_PLANTED"] = "1"
    return environment(runtime)


SESSION = "random_orders_of_a_session_answer_each_request_once"
CLOSED = "nothing_is_left_once_it_is_closed"
CONTROLLER_FAULTS = [
    (
        generation.Generation,
        "_take",
        lambda call, part: call._on_part(part),
        "requests answered before a loss sampled again",
        "a_request_of_a_lost_sampler_is_answered_once",
    ),
    (
        generation.Generation,
        "_send",
        lambda call: send(call) if len(call._left) == len(call._requests) else call._finish(),
        "requests of a lost sampler never sent again",
        "a_request_of_a_lost_sampler_is_answered_once",
    ),
    (
        flow.Flow,
        "go",
        lambda call, requests=(), dropped=(): go(call, requests),
        "a drop that a flow sends to no sampler",
        "random_orders_of_a_session_answer_each_request_once",
    ),
    (
        worker_group.RemoteWorkerGroup,
        "share",
        lambda group, requests, but=(): share(group, requests[: max(1, len(requests) - 1)], but),
        "requests lost where they are shared out",
        "random_orders_of_a_session_answer_each_request_once",
    ),
    (
        links,
        "SyncResult",
        lambda version, moved, *rest: SyncResult(version, moved // 2, *rest),
        "the bytes of one receiver reported for all",
        "pools_lie_in_processes_of_their_own",
    ),
    (
        generation,
        "split_requests",
        lambda requests, slices: [list(requests), *[[]] * (slices - 1)],
        "all requests of a call given to one sampler",
        "rollouts_come_in_the_order_of_their_requests",
    ),
    (
        split.Running,
        "share",
        lambda running, requests, among, share=split.Running.share: share(running, requests, among[:1]),
        "all requests given to one sampler",
        SESSION,
    ),
    (
        SamplerSession,
        "interrupt",
        restarts_deadlines,
        "the whole timeout again at each continuation",
        SESSION,
    ),
    (SamplerSession, "interrupt", begins_again, "an interrupted request that begins again", SESSION),
    (SamplerSession, "drained", SamplerSession.held, "a drain that does not wait", SESSION),
    (SamplerSession, "cancel", loses_drops, "a drop lost if a cancel follows it", SESSION),
    (flow.Flow, "_failed", lambda call, error: None, "an error of a sampler that no caller gets", SESSION),
    (
        worker_pool.WorkerPool,
        "give_up",
        gives_all_up,
        "the calls of other threads given up",
        "who_stops_waiting_for_samples_stops_the_samplers",
    ),
    (
        flow.Flow,
        "resting",
        False,
        "a sampler that rests before its requests are answered",
        "a_rank_that_misses_the_deadline_is_lost",
    ),
    (
        worker_pool.WorkerPool,
        "send",
        without_deadline,
        "no deadline for a call with a batch",
        "a_rank_that_misses_the_deadline_is_lost",
    ),
    (worker_pool.WorkerPool, "close", forgets_open, "a call in flight that never ends after close", CLOSED),
    (torchrun.TorchrunRuntime, "_launch", leaves_thread, "a thread left by every run", CLOSED),
    (
        torchrun.TorchrunRuntime,
        "_environment",
        sets_variables,
        "environment variables of workers left in the controller",
        CLOSED,
    ),
]


@pytest.mark.slow  # three processes each
@pytest.mark.parametrize(
    ("where", "name", "broken", "fault", "contract"),
    CONTROLLER_FAULTS,
    ids=[fault[3] for fault in CONTROLLER_FAULTS],
)
def test_a_planted_fault_of_the_controller_is_caught(monkeypatch, where, name, broken, fault, contract):
    made = Runtime.contracts[f"test_{contract}"]
    size = 2 if "one sampler" in fault else 1
    bench = RuntimeBench(**{**Runtime.settings(), "backend": "torchrun", "plugins": [], "world_size": size})
    monkeypatch.setattr(where, name, broken)
    monkeypatch.setenv("ENGINE_PLANTED", "0")
    try:
        with pytest.raises(AssertionError):
            made.function(bench)
    finally:
        bench.close()
    assert fault in made.catches


def test_every_fault_that_a_contract_claims_to_catch_is_planted():
    claimed = {(made.name, fault) for made in Runtime.contracts.values() for fault in made.catches}
    planted = [(fault, contract) for *_, fault, contract in (*FAULTS, *CONTROLLER_FAULTS)]
    assert claimed == {(f"test_{contract}", fault) for fault, contract in planted}
