import pytest

from engine_core.errors import ConfigError
from engine_plugin_megatron.layout import MeshLayout, layout_of
from engine_plugin_megatron.options import MegatronOptions


def test_what_is_left_of_the_ranks_has_data_of_its_own():
    made = layout_of(MegatronOptions(tp=2, pp=2, ep=2), 8, "actor")
    assert made == MeshLayout(tp=2, pp=2, ep=2, dp=2)
    assert made.size == 8
    assert str(made) == "tp 2, pp 2, ep 2, dp 2"


def test_a_layout_that_does_not_divide_the_ranks_names_the_nearest_that_does():
    with pytest.raises(
        ConfigError, match=r"\[critic.megatron\] tp 4, pp 3, .*12 ranks each.* 8 ranks.* tp = 4, pp = 2\."
    ):
        layout_of(MegatronOptions(tp=4, pp=3), 8, "critic")


def test_experts_are_shared_by_ranks_with_data_of_their_own():
    with pytest.raises(
        ConfigError, match=r"actor.megatron.ep is 4, .* the 2 ranks .*Set it to 2 \(one of 1, 2\)"
    ):
        layout_of(MegatronOptions(tp=4, ep=4), 8, "actor")
