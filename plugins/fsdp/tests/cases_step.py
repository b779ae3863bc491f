"""Cases of the optimizer's step over sharded weights; see ``test_ranks.py``."""

from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine_plugin_testing.contracts import identical


class Operators(TorchDispatchMode):
    """Names of the operators on ``DTensor`` that run inside of it."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if any(isinstance(leaf, DTensor) for leaf in tree_leaves((args, kwargs or {}))):
            self.names.append(str(operator))
        return operator(*args, **(kwargs or {}))


def a_step_is_that_of_whole_lists(bench):
    """Weights and state are bit for bit those of torch's own step over sharded tensors, without an operator on them."""
    batch, ends = bench.batch(), []
    for own in (True, False):
        engine = bench.engine(optim={"lr": 1e-2, "max_grad_norm": 0.5, "weight_decay": 0.1})
        if not own:
            del engine.optimizer._init_group
        for step in range(3):
            bench.forward_backward(engine, batch)
            with Operators() as seen:
                taken = engine.optimizer_step()
            if step:  # the first makes the state
                assert bool(seen.names) != own, seen.names
        assert taken.grad_norm > 0.5  # it was clipped
        state = engine.optimizer.state
        assert {
            type(value) for values in state.values() for name, value in values.items() if name != "step"
        } == {DTensor}
        moments = {
            f"{name}.{key}": state[p][key].full_tensor()
            for name, p in engine.module.named_parameters()
            for key in ("exp_avg", "exp_avg_sq")
        }
        ends.append({**bench.weights(engine), **moments})
    identical(ends[0], ends[1], "weights and moments")


def parts_are_freed_with_their_owner(bench):
    """What the engine adds to its optimizer keeps nobody alive."""
    import gc
    import weakref

    engine = bench.engine(optim={"lr": 1e-2})
    bench.forward_backward(engine, bench.batch())
    engine.optimizer_step()
    gc.collect()
    gc.disable()
    try:
        held = weakref.ref(engine.optimizer)
        engine.lr_scheduler = None  # which knows it
        engine.optimizer = None
        assert held() is None
    finally:
        gc.enable()


def forward_passes_leave_no_record(bench):
    """FSDP holds nothing of the forward passes of ``infer``, with a frozen role and with one that is trained."""
    import gc

    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    for trainable in (False, True):
        engine = bench.engine(trainable=trainable)
        bench.infer(engine, bench.batch())
        context = engine._sharded[0]._get_fsdp_state()._comm_ctx
        groups = [one for one in gc.get_objects() if isinstance(one, FSDPParamGroup)]
        own = [group for group in groups if group.comm_ctx is context]
        assert len(own) == 1 + len(engine.module.model.layers)
        assert not any(group._post_forward_indices for group in own)
        assert not context.post_forward_order


def gathered_once_or_twice(bench):
    """Messages of one step that gather weights: of each unit and the rest in the forward pass, of all units but the last anew."""
    from torch.distributed.tensor.debug import CommDebugMode

    engine = bench.engine()
    bench.forward_backward(engine, bench.batch())
    with CommDebugMode() as seen:
        bench.forward_backward(engine, bench.batch())
    gathers = sum(n for name, n in seen.get_comm_counts().items() if "_allgather_base_" in str(name))
    units = len(engine.module.model.layers)
    freed = engine.options.sharding == "full" and engine.options.reshard_after_forward is not False
    assert gathers == units + 1 + (units - 1 if freed else 0), seen.get_comm_counts()
