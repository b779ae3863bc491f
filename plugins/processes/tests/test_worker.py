"""What a worker sends to a sampler of another pool, and what it gives the controller with its responses."""

import contextlib
import queue
from types import SimpleNamespace

import pytest
import torch

from engine_core.contracts.weight_sync import ADAPTER_CONFIG
from engine_core.errors import TrainingFailed
from engine_core.types import Prompt, Request, Rollout, Sampling
from engine_plugin_processes.worker import Worker


class Unmapped:
    """The plugins of a run, none of which maps weights."""

    def step(self, role, *backends):
        assert (role, backends) == ("rollout", (("rollout_engines", "mine"), ("train_engines", "torch")))
        return SimpleNamespace(engine_map_weights=lambda **given: None)


class Actor:
    config, model_config = SimpleNamespace(backend="torch"), None
    context = SimpleNamespace(plugins=Unmapped())

    def adapter_config(self):
        return b"{}"

    def named_weights(self, to="all", adapter=False):
        assert to == "leader"
        yield ("lora_A" if adapter else "weight"), torch.ones(2)


class Link:
    def send(self, stream, update):
        self.sent = [name for name, _ in stream]
        return len(self.sent)


@pytest.mark.parametrize(
    ("adapter", "mix", "names"),
    [(True, None, [ADAPTER_CONFIG, "lora_A"]), (True, 0.5, ["weight"]), (False, None, ["weight"])],
)
def test_an_adapter_alone_goes_to_a_sampler_that_asks_for_it_and_whole_weights_to_others(adapter, mix, names):
    config = SimpleNamespace(
        actor=SimpleNamespace(lora=object()),
        rollout=SimpleNamespace(backend="mine", options=SimpleNamespace(adapter=adapter)),
    )
    worker = Worker.__new__(Worker)
    worker.host = SimpleNamespace(engines={"actor": Actor()}, config=config)
    worker.links, worker.weight_dtypes = {1: Link()}, {1: ""}
    message = {"role": "actor", "link": 1, "update": 1, "version": 2, "mix": mix}
    assert worker._do_send(message) == len(names)
    assert worker.links[1].sent == names
    assert worker._do_send(message | {"link": None}) == 0


@pytest.mark.parametrize(
    ("receiver", "mix", "sent"),
    [("bfloat16", None, torch.bfloat16), ("bfloat16", 0.5, torch.float32), ("", None, torch.float32)],
)
def test_weights_are_sent_in_the_type_of_the_samplers_weights_and_mixed_in_their_own(receiver, mix, sent):
    class Typed(Link):
        def send(self, stream, update):
            self.sent = [(name, tensor.dtype) for name, tensor in stream]
            return len(self.sent)

    worker = Worker.__new__(Worker)
    rollout = SimpleNamespace(backend="mine", options=SimpleNamespace(adapter=False))
    worker.host = SimpleNamespace(
        engines={"actor": Actor()},
        config=SimpleNamespace(actor=SimpleNamespace(lora=None), rollout=rollout),
    )
    worker.links, worker.weight_dtypes = {1: Typed()}, {1: receiver}
    worker._do_send({"role": "actor", "link": 1, "update": 1, "version": 2, "mix": mix})
    assert worker.links[1].sent == [("weight", sent)]


def test_a_stream_of_weights_is_read_to_its_end_although_a_receiver_is_lost():
    class Sharded(Actor):
        def named_weights(self, to="all", adapter=False):  # each rank of the actor takes part in each tensor
            for number in range(3):
                read.append(number)
                yield f"weight_{number}", torch.ones(2)

    class Lost(Link):
        def send(self, stream, update):
            next(stream)
            raise TrainingFailed("the connection was closed")

    read = []
    worker = Worker.__new__(Worker)
    rollout = SimpleNamespace(backend="mine", options=SimpleNamespace(adapter=False))
    worker.host = SimpleNamespace(
        engines={"actor": Sharded()},
        config=SimpleNamespace(actor=SimpleNamespace(lora=None), rollout=rollout),
    )
    worker.links, worker.weight_dtypes = {1: Lost()}, {1: ""}
    with pytest.raises(TrainingFailed, match="the connection was closed"):
        worker._do_send({"role": "actor", "link": 1, "update": 1, "version": 2, "mix": None})
    assert read == [0, 1, 2]


class Stepping:
    """An engine that finishes its two newest requests in each step, and notes what it was given."""

    def __init__(self):
        self.running, self.given = {}, []

    def advance(self, requests=(), dropped=()):
        self.given.append(([request.id for request in requests], list(dropped)))
        self.running = {id: each for id, each in self.running.items() if id not in dropped}
        self.running |= {request.id: request for request in requests}
        return [self.running.pop(id).unsampled() for id in [*self.running][:-3:-1]]


def asked(*numbers):
    return [Request(f"r{n}", Prompt(f"p{n}", [1], ""), Sampling(), n) for n in numbers]


def test_a_flow_sends_what_each_step_finishes_until_it_is_left_and_continues_in_the_next():
    worker, parts = Worker.__new__(Worker), []
    worker.host = SimpleNamespace(engines={"rollout": Stepping()}, live={})
    worker.mailbox = queue.Queue()
    worker.outbox = SimpleNamespace(put=lambda message: parts.append([r.request_id for r in message["part"]]))
    message = {"role": "rollout", "id": 1, "seconds": 600.0, "requests": asked(0, 1, 2, 3, 4), "dropped": []}
    worker._do_flow(message)
    assert parts == [["r4", "r3"], ["r2", "r1"], ["r0"]]
    worker.mailbox.put({"kind": "push"})  # another command waits
    worker._do_flow(message)
    worker._do_flow(message | {"requests": asked(5), "dropped": ["r1"]})
    assert parts[3:] == [["r4", "r3"], ["r5", "r2"]]
    worker.mailbox.get()
    worker._do_flow(message | {"requests": [], "seconds": 0.0})
    assert parts[5:] == [["r0"]]
    assert worker.host.engines["rollout"].given[-2:] == [(["r5"], ["r1"]), ([], [])]


class Words:
    def decode(self, ids, skip_special_tokens):
        assert skip_special_tokens
        return " ".join(f"w{id}" for id in ids)


def rollout(reason, text=""):
    ids = torch.tensor([5, 9, 7, 1])
    column = torch.zeros(4)
    return Rollout(
        "1:0:0", Prompt("train:1", [5, 9], ""), ids, column.bool(), column, column.int(), reason, text=text
    )


def test_responses_that_have_ended_come_with_their_text_and_others_as_the_engine_gave_them():
    worker = Worker.__new__(Worker)
    worker.host = SimpleNamespace(live={"tokenizer": Words()})
    given = [rollout("stop"), rollout("length"), rollout("abort"), rollout("stop", "its own")]
    assert [each.text for each in worker._with_texts("rollout", given)] == ["w7 w1", "w7 w1", "", "its own"]
    assert worker._with_texts("judge", [rollout("stop")])[0].text == ""  # its tokens are another model's
    assert worker._with_texts("rollout", None) is None
    assert worker._with_texts("rollout", ["1:0:0"]) == ["1:0:0"]


class Closing:
    """A part of a worker that notes when it is closed, and may fail then."""

    def __init__(self, order, name, error=None):
        self.order, self.name, self.error = order, name, error

    def close(self):
        self.order.append(self.name)
        if self.error:
            raise self.error


@pytest.mark.parametrize("host_error", [None, RuntimeError("no engine")])
def test_a_profile_that_cannot_be_written_leaves_nothing_open_and_comes_after_the_engines(caplog, host_error):
    worker, order = Worker.__new__(Worker), []
    worker.host = Closing(order, "host", host_error)
    worker.links, worker.outbox = {}, Closing(order, "outbox")
    worker.profile = contextlib.ExitStack()
    worker.profile.callback(Closing(order, "profile", OSError("No space left")).close)
    with pytest.raises(RuntimeError, match="no engine") if host_error else contextlib.nullcontext():
        worker._leave()
    assert order == ["host", "profile", "outbox"]
    assert "The profile of this process is not written: No space left" in caplog.text
