"""Two rates of learning are the same two over two ranks as in one process."""

from pathlib import Path

import pytest

from engine_plugin_testing import TrainEngineSuite
from engine_plugin_testing.launcher import Workers


class Rates(TrainEngineSuite):
    plugins = ["conv_lm"]
    write_model = "conv_lm_files.py:write"
    reference = "conv_lm_files.py:load"


def two_rates(bench):
    """One step of both engines: the first Adam step moves each weight by its rate, where the gradient is not tiny."""
    engine = bench.engine(optim={"lr": 1e-2, "eps": 1e-12})
    before = bench.weights(engine)
    rates = [group["lr"] for group in engine.optimizer.param_groups]
    assert rates == pytest.approx([1e-2, 2.5e-3]), rates
    bench.step(engine, bench.batch())
    for name, after in bench.weights(engine).items():
        moved = (after - before[name]).abs().max()
        expected = 1e-2 if before[name].ndim >= 2 else 2.5e-3
        assert float(moved) == pytest.approx(expected, rel=1e-2), (name, float(moved))
    engine.set_lr(2e-2)
    assert [group["lr"] for group in engine.optimizer.param_groups] == pytest.approx([2e-2, 5e-3])


@pytest.mark.parametrize(("backend", "size"), [("two_rates", 1), ("two_rates_fsdp", 2)])
def test_norms_and_biases_have_a_rate_of_their_own(backend, size):
    settings = {**Rates.settings(), "backend": backend, "options": {"vector_rate": 0.25}}
    workers = Workers(size, root=Path(__file__).parent)
    try:
        workers.run(Rates.bench, "test_two_rates.py:two_rates", settings)
    finally:
        workers.close()
