"""Contracts of a trainer: its runs train, resume exactly, and refuse options that it does not have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine_plugin_testing.contracts import contract, refused

if TYPE_CHECKING:
    from engine_plugin_testing.trainer_bench import TrainerBench


def compare(expected: list[dict[str, float]], found: list[dict[str, float]], what: str) -> None:
    """Assert that two runs have the same metrics in each step."""
    assert len(found) == len(expected), f"{what} wrote {len(found)} steps, expected {len(expected)}."
    for right, line in zip(expected, found, strict=True):
        names = sorted(right.keys() | line.keys())
        other = {
            name: (right.get(name), line.get(name)) for name in names if right.get(name) != line.get(name)
        }
        assert not other, (
            f"{what}: step {line['step']} differs (expected, found): {dict(list(other.items())[:5])}."
        )


@contract(catches=("a step without an update",))
def a_run_trains(bench: TrainerBench) -> None:
    """A run of three steps writes three lines of metrics, with no value missing.

    In at least one step the gradient is not 0.
    """
    lines = bench.train("run", 3)
    assert [line["step"] for line in lines] == [1, 2, 3], (
        f"The steps {[line['step'] for line in lines]} were written."
    )
    for line in lines:
        missing = [name for name, value in line.items() if value is None]
        assert not missing, f"Metrics of step {line['step']} are not finite: {missing}."
    norms = [line.get("actor/grad_norm", 0.0) for line in lines]
    assert max(norms) > 0, f"The gradient's norm is {norms}: nothing was learned."


@contract(catches=("state that is not in checkpoints",))
def a_resumed_run_ends_like_one_that_was_not_stopped(bench: TrainerBench) -> None:
    """After a resume, steps 3 and 4 have the same metrics to the last bit as in a run of four steps."""
    whole = bench.train("whole", 4)
    bench.train("half", 2)
    compare(whole, bench.train("half", 4, resume=True), "The resumed run")


@contract(catches=("an optimizer step that a stop interrupts",))
def a_stop_within_an_optimizer_step_loses_nothing(bench: TrainerBench) -> None:
    """A signal in the middle of an optimizer step ends the run with exit code 75 once the step is finished.

    The resumed run has the same metrics as a run that was not stopped.
    """
    late: dict[str, Any] = {"checkpoint__every_steps": 9}  # the stop alone saves
    whole = bench.train("untouched", 3, **late)
    code = bench.stopped("stopped", 3, at=2, **late)
    assert code == 75, (
        f"A run that SIGTERM stopped within an optimizer step ended with exit code {code}; expected 75."
    )
    compare(whole, bench.train("stopped", 3, resume=True, **late), "The run that was stopped")


@contract(catches=("unknown options accepted",))
def unknown_options_are_refused(bench: TrainerBench) -> None:
    """A key that is not in the trainer's table is refused when the run file is read."""
    with refused("A table with the unknown key 'no_such_option'", "no_such_option"):
        bench.config("options", 1, {**bench.settings["options"], "no_such_option": 1})
