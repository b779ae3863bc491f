"""The rows are right, and the same in every call."""

from engine_core.plugins import PluginSet


def test_rows_are_right_and_the_same_in_every_call():
    rows = PluginSet.load({"data_sources": ["template_name"]}).function("data_sources", "template_name")
    train = rows("train", count=5, seed=1)
    assert len(train) == 5
    assert train == rows("train", count=5, seed=1)
    assert train != rows("validation", count=5, seed=1)
    for row in train:
        a, b = row["prompt"].removesuffix("=").split("+")
        assert int(row["answer"]) == int(a) + int(b)
