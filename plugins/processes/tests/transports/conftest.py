"""Links between threads of this process: every end with its own thread."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from engine_core.contracts.weight_transport import TransportEndpoint, WeightUpdate
from engine_plugin_processes import plugin as builtin
from engine_plugin_processes.channel import new_token

WEIGHTS = {
    "embed.weight": torch.rand(50, 7),
    "norm.weight": torch.rand(7).to(torch.bfloat16),
    "empty": torch.zeros(0, 3),
    "scalar": torch.tensor(3),
}


class Ends:
    """The ends of one link, and a thread for each.

    Args:
        name: of the transport.
        folder: that all see.
        receivers: how many.
        options: of its table.
    """

    def __init__(self, name, folder, receivers, **options):
        spec = builtin.engine_weight_transports()[name]
        names = ("actor[0] on here", *(f"rollout[{index}] on there" for index in range(1, receivers + 1)))
        same = {
            "transport": name,
            "names": names,
            "device": torch.device("cpu"),
            "host": "127.0.0.1",
            "token": new_token(),
            "rendezvous": {"file": str(folder / "meet"), "tcp": None},
            "link_id": "r-1",
        }
        self.pool = ThreadPoolExecutor(receivers + 1)
        self.ends = [
            spec.resolve()(spec.config(**options), TransportEndpoint(index=index, **same))
            for index in range(receivers + 1)
        ]
        peers = [end.open() for end in self.ends]
        for met in [self.pool.submit(end.join, peers) for end in self.ends]:
            met.result(30)

    def update(self, stream=None, number=1, version=7, take=None):
        """Futures of what ``send`` returns, and of what every receiver has received."""
        update = WeightUpdate(number, version)
        taken = [
            self.pool.submit(take or (lambda at, update: list(at.receive(update))), at, update)
            for at in self.ends[1:]
        ]
        sent = self.pool.submit(self.ends[0].send, WEIGHTS.items() if stream is None else stream, update)
        return sent, taken

    def close(self):
        for end in self.ends:
            end.close()
        self.pool.shutdown()


@pytest.fixture
def weights():
    return WEIGHTS


@pytest.fixture
def link(tmp_path):
    made = []

    def make(name, receivers=1, **options):
        made.append(Ends(name, tmp_path, receivers, **options))
        return made[-1]

    yield make
    for ends in made:
        ends.close()
