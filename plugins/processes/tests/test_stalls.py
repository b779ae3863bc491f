"""Who waits for whom."""

from types import SimpleNamespace

from engine_plugin_processes.stalls import diagnose

COLLECTIVE = [("/x/engine.py", 5, "step"), ("/lib/torch/distributed/distributed_c10d.py", 99, "all_reduce")]
ASLEEP = [("/x/engine.py", 5, "step"), ("/x/plugin.py", 3, "forward")]


def command(seconds, waiting, ranks):
    deadline = seconds, "runtime.torchrun.command_timeout_minutes"
    return SimpleNamespace(what=("actor", "infer"), deadline=deadline, waiting=waiting, ranks=ranks)


def test_the_rank_that_is_in_no_collective_is_the_one_waited_for():
    blamed, cause, text = diagnose(command(90.0, [0, 1], [0, 1, 2]), {0: COLLECTIVE, 1: ASLEEP, 2: ASLEEP})
    assert blamed == 1
    assert cause == (
        "no answer to 'infer' within 1.5 minutes (runtime.torchrun.command_timeout_minutes); it is in forward (/x/plugin.py:3); "
        "rank 0 waits for rank 1 in all_reduce (/lib/torch/distributed/distributed_c10d.py:99); answered: rank 2"
    )
    assert "rank 0:\n  /x/engine.py:5 in step\n" in text


def test_a_rank_that_does_not_even_say_where_it_is_is_blamed():
    blamed, cause, text = diagnose(command(60.0, [0, 1], [0, 1]), {0: COLLECTIVE})
    assert blamed == 1
    assert "it is in code that holds the interpreter" in cause
    assert text.endswith("rank 1: no answer; it holds the interpreter.")


def test_ranks_that_all_wait_in_collectives_wait_for_each_other():
    blamed, cause, _ = diagnose(command(60.0, [0, 1], [0, 1]), {0: COLLECTIVE, 1: COLLECTIVE})
    assert blamed == 0
    assert "rank 1 waits in all_reduce" in cause
