import json
import re
from pathlib import Path

import pytest
import torch

import engine_core
from engine_core.metrics import Max, Sum, declared, merge, over_tokens, over_updates, with_prefix

SOURCES = Path(engine_core.__file__).parent


def test_tokens_are_averaged_by_their_share_and_of_a_maximum_the_largest_learned_token_is_kept():
    values = torch.tensor([5.0, 1.0, 3.0], requires_grad=True)
    found = over_tokens({"a": values, "max/a": -values}, torch.tensor([0.0, 0.25, 0.75]))
    assert (found["a"].item(), found["max/a"].item()) == (2.5, -1.0)
    assert not found["a"].requires_grad


def test_a_maximum_stays_one_below_a_prefix():
    values = with_prefix("actor/", {"a": torch.tensor([1.0, 3.0]), "max/b": torch.tensor([1.0, 3.0])})
    found = over_tokens(values, torch.tensor([0.5, 0.5]))
    assert declared({name: value.item() for name, value in found.items()}) == {"actor/a": 2.0, "actor/b": 3.0}


def test_a_token_without_a_share_is_not_read():
    found = over_tokens({"a": torch.tensor([float("nan"), 2.0])}, torch.tensor([0.0, 1.0]))
    assert found["a"].item() == 2.0


def test_no_token_gives_zeros():
    found = over_tokens({"a": torch.zeros(0), "max/a": torch.zeros(0)}, torch.zeros(0))
    assert declared({name: value.item() for name, value in found.items()}) == {"a": 0.0}
    ignored = over_tokens({"max/a": torch.tensor([-2.0])}, torch.zeros(1))
    assert declared({"max/a": ignored["max/a"].item()}) == {"a": 0.0}


@pytest.mark.parametrize(("made", "largest"), [(float, max), (torch.tensor, torch.maximum)])
def test_parts_are_summed_and_of_maxima_the_largest_is_kept(made, largest):
    total = {}
    for part in ({"a": 0.5, "max/b": -3.0}, {"a": 0.25, "max/b": -2.0, "c": 1.0}):
        merge(total, {name: made(value) for name, value in part.items()}, largest)
    assert {name: float(value) for name, value in total.items()} == {"a": 0.75, "max/b": -2.0, "c": 1.0}


def test_a_maximum_of_an_objective_has_its_plain_name_and_stays_a_maximum():
    """Also one that a plugin made up: no table of names decides."""
    found = declared({"max/mine/most": 2.0, "mine/mean": 1.0})
    assert found == {"mine/most": 2.0, "mine/mean": 1.0}
    assert over_updates([found, {"mine/most": Max(1.0), "mine/mean": 3.0}]) == {
        "mine/most": 2.0,
        "mine/mean": 2.0,
    }


def test_a_metric_of_the_actor_gets_the_name_of_the_role_that_learned():
    found = declared({"actor/nll": 2.0, "max/actor/ratio": 3.0, "critic/value_mean": 1.0}, "student")
    assert found == {"student/nll": 2.0, "student/ratio": 3.0, "critic/value_mean": 1.0}
    assert isinstance(found["student/ratio"], Max)


def test_optimizer_steps_are_reduced_as_declared():
    steps = [{"a": 1.0, "lr": Max(0.5), "skipped": Sum(1)}, {"a": 2.0, "lr": Max(0.25), "skipped": Sum(True)}]
    found = over_updates([*steps, {"empty": Sum(1.0)}])
    assert found == {"a": 1.5, "lr": 0.5, "skipped": 2.0, "empty": 1.0}


def test_a_declared_metric_is_written_like_any_number():
    assert json.dumps({"a": Sum(3), "b": Max(0.5)}) == '{"a": 3.0, "b": 0.5}'


def test_one_module_knows_how_a_reduction_is_declared():
    """Others declare (a name in quotes) or call; none looks at names to find out."""
    knows = re.compile(r"""(startswith|removeprefix)\(["']max/""")
    roots = [SOURCES, *SOURCES.parent.glob("plugins/*/src")]
    files = [path for root in roots for path in root.rglob("*.py")]
    assert len(files) > 300
    assert [str(path) for path in files if knows.search(path.read_text("utf-8"))] == []
