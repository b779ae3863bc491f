"""One reward of a run file, scored from outside as a run would score it."""

from pathlib import Path

import pytest

from engine_core.errors import ConfigError, DataError, PluginError
from engine_plugin_rewards.server.service import RewardService, read_service

RUN = """
plugins = ["rewards.py"]
[[reward]]
name = "short"
weight = 5.0
clip = [0.0, 0.1]
max_failure_share = 0.0
on_error = "fail"
[reward.short]
words = 2
[[reward]]
name = "exact"
workers = 0
"""
PLUGIN = '''
from engine_core import hookimpl
from engine_core.specs import Options, Reward


class ShortOptions(Options):
    words: int = 10
    """Words."""


def short(completions, words):
    if "boom" in completions:
        raise ValueError("boom")
    return [float(len(text.split()) <= words) for text in completions]


def exact(completion, ground_truth, response_length=None):
    return None if ground_truth is None else float(completion == ground_truth) + (response_length or 0)


@hookimpl
def engine_rewards():
    return {"short": Reward(load=short, config=ShortOptions), "exact": Reward(load=exact)}
'''


@pytest.fixture
def serve(tmp_path):
    """Return ``serve("short")``: a service of the run file, closed at the end."""
    (tmp_path / "run.toml").write_text(RUN)
    (tmp_path / "rewards.py").write_text(PLUGIN)
    made = []

    def make(name, *sets):
        made.append(RewardService(read_service(str(tmp_path / "run.toml"), name, sets)))
        return made[-1]

    yield make
    for service in made:
        service.close()


def values(outcomes):
    return [o.value for o in outcomes]


def test_values_are_raw_with_the_options_of_the_file_and_failures_are_each_samples_own(serve):
    service = serve("short")
    assert values(service.score({"completions": ["a b", "a b c"]}, 2)) == [
        1.0,
        0.0,
    ]  # neither clipped nor weighed
    outcomes = service.score({"completions": ["a", "boom", "a b c"]}, 3)
    assert [(o.value, o.message) for o in outcomes] == [(1.0, ""), (None, "ValueError: boom"), (0.0, "")]
    assert service.scored == 5
    assert values(service.score({"completions": []}, 0)) == []


def test_arguments_are_what_was_sent_under_any_of_their_names(serve):
    service = serve("exact")
    sent = {
        "completions": ["4", "5"],
        "ground_truth": ["4", None],
        "response_lengths": [7, 7],
        "more": [0, 0],
    }
    assert values(service.score(sent, 2)) == [8.0, None]
    with pytest.raises(
        DataError,
        match=r"Reward 'exact' needs 'ground_truth', which was not sent.*columns = \[\"ground_truth\"\]",
    ):
        service.score({"completions": ["4"]}, 1)


def test_options_can_be_set(serve):
    assert values(serve("short", "reward.short.short.words=3").score({"completions": ["a b c"]}, 1)) == [1.0]


def test_what_cannot_be_served_is_refused(serve, tmp_path):
    serve("short")
    file = str(tmp_path / "run.toml")
    with pytest.raises(ConfigError, match=r"several rewards: short, exact\. Choose one: --reward short"):
        read_service(file, None)
    with pytest.raises(
        ConfigError, match=r"--reward shrt: the file has no such reward\. Did you mean 'short'\?"
    ):
        read_service(file, "shrt")
    Path(file).write_text('[model]\npath = "x"\n')
    with pytest.raises(ConfigError, match=r"no \[\[reward\]\], so there is nothing to serve"):
        read_service(file, None)
    Path(file).write_text('[[reward]]\nname = "no_such"\n')
    with pytest.raises(PluginError, match="Unknown reward 'no_such'"):
        read_service(file, None)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"reward\.reward\.model\.path: .* has no config\.json"):
        read_service(str(tmp_path / "empty"), None)
