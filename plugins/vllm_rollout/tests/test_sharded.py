"""What the parts of a model that is cut over processes receive; that they are the whole is in ``test_engine.py``."""

import pytest
import torch

from engine_plugin_vllm_rollout.sharded import Receiver, Sharded


class Loader(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(4, 3))

    def load_weights(self, weights):
        for _, tensor in weights:
            self.weight.data.copy_(tensor)


class Rank(Receiver):
    def __init__(self):
        self.rank, self.device = 1, torch.device("cpu")
        self.model_runner = type("Runner", (), {"model": Loader()})()


class Executor:
    """Calls one worker, as vLLM's does; ``hurt`` changes what crosses."""

    def __init__(self, hurt=lambda args: args):
        self.worker, self.hurt = Rank(), hurt

    def collective_rpc(self, method, args):
        return [getattr(self.worker, method)(*self.hurt(args))]


def test_weights_cross_in_memory_and_every_bucket_is_checked():
    engine = Executor()
    sharded = Sharded(engine)
    for value in (1.0, 2.0):
        sharded.load([("weight", torch.full((4, 3), value))])
        assert engine.worker.model_runner.model.weight.unique().tolist() == [value]
    engine.hurt = lambda args: (*args[:3], "0" * 32, args[4])
    with pytest.raises(RuntimeError, match="reached rank 1 of the sampler damaged"):
        sharded.load([("weight", torch.full((4, 3), 3.0))])
    assert engine.worker.model_runner.model.weight.unique().tolist() == [2.0]
    sharded.close()
