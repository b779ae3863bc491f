"""The endpoint of a weight transport names both sides of its link in errors."""

import pytest
import torch

from engine_core.contracts.weight_transport import TransportEndpoint, WeightTransport, WeightUpdate
from engine_core.errors import TrainingFailed
from engine_core.specs import Options

UPDATE = WeightUpdate(number=3, version=7)


def endpoint(index, transport="tcp"):
    return TransportEndpoint(
        transport=transport,
        index=index,
        names=("actor[0] on a", "rollout[1] on b", "rollout[2] on c"),
        device=torch.device("cpu"),
        host="127.0.0.1",
        token="secret",
        rendezvous={"file": None, "tcp": ("127.0.0.1", 1, "weights")},
        link_id="run-1",
    )


@pytest.mark.parametrize(
    ("index", "route"),
    [
        (0, "from actor[0] on a to rollout[1] on b, rollout[2] on c"),
        (1, "from actor[0] on a to rollout[1] on b"),
        (2, "from actor[0] on a to rollout[2] on c"),
    ],
)
def test_the_sender_names_all_receivers_and_a_receiver_itself(index, route):
    error = endpoint(index).failure(UPDATE, "the disk is full.")
    assert isinstance(error, TrainingFailed)
    assert str(error) == f"Weights {route} (rollout.transport = 'tcp', policy version 7): the disk is full."


@pytest.mark.parametrize("transport", ["tcp", "my-plugin:tcp"])
def test_a_timeout_names_the_key_of_the_option(transport):
    error = endpoint(1, transport).timeout(UPDATE, "no bucket arrived", 2.5)
    assert str(error).endswith("no bucket arrived within 2.5 s (rollout.tcp.timeout_seconds).")
    assert f"rollout.transport = '{transport}'" in str(error)


def test_only_send_and_receive_must_be_written():
    class Least(WeightTransport):
        def send(self, stream, update):
            return 0

        def receive(self, update):
            yield from ()

    assert WeightTransport.__abstractmethods__ == {"send", "receive"}
    link = Least(Options(), endpoint(0))
    Least.check(link.options, one_machine=False)
    link.join([link.open(), None, None])
    link.close()
    link.close()
