import json
import os
import subprocess
import sys

import pytest

from engine_core.plugins.metadata import installed
from engine_plugin_tools import plugin_list as plugin_listing
from engine_plugin_tools.plugin_list import PluginInfo, list_plugins

GOOD = """
    from engine_core import hookimpl
    from engine_core.specs import Reward

    print("chatter on import", end="")

    def score(completions):
        return [1.0 for _ in completions]

    @hookimpl
    def engine_rewards():
        return {"good": Reward(load=score), "hollow": Reward(load="good_plugin.nothing:score")}
"""


def listed(*names: str, check: bool = False) -> dict[str, PluginInfo]:
    return {f"{info.distribution}:{info.name}": info for info in list_plugins(check) if info.name in names}


@pytest.fixture
def only_fakes(install, monkeypatch):
    """Take the real installation out of the list: checking it would import torch."""
    everything = plugin_listing.installed
    monkeypatch.setattr(
        plugin_listing,
        "installed",
        lambda: tuple(o for o in everything() if not o.distribution.name.startswith("engine-")),
    )
    return install


def test_the_cores_own_names_are_listed_and_healthy():
    grpo = listed("grpo")["engine-core-rl:grpo"]

    assert (grpo.kind, grpo.module, grpo.healthy, grpo.problem) == (
        "advantages",
        "engine_core.builtin",
        True,
        None,
    )


DESCRIBED = """
    from engine_core import hookimpl
    from engine_core.specs import Options, Reward

    class Width(Options):
        'How wide ``near`` is.'

    class Bare(Options):
        wide: int = 1
        'How wide.'

    def score(completions):
        '''Return 1 for ``yes``. Anything else gets 0.

        More.
        '''

    @hookimpl
    def engine_rewards():
        return {
            "direct": Reward(load=score),
            "lazy": Reward(load="heavy_mod:lazy"),
            "near": Reward(load="heavy_mod:undocumented", config=Width),
            "made": Reward(load="heavy_mod:lazy", config=Width, factory=True),
            "bare": Reward(load="heavy_mod:lazy", config=Bare, factory=True),
            "hollow": Reward(load="fake_mod.nothing:score"),
            "broken": Reward(load="broken_mod:score"),
        }
"""
NOT_IMPORTED = """
    raise RuntimeError("imported!")

    def lazy(completions):
        'Measure laziness.'

    def undocumented(completions): ...
"""


def test_names_of_one_kind_are_described_by_the_docstring_of_what_they_load_or_of_their_options(only_fakes):
    names = dict.fromkeys(("direct", "lazy", "near", "made", "bare", "hollow", "broken"), "fake_mod")
    modules = {"fake_mod": DESCRIBED, "heavy_mod": NOT_IMPORTED, "broken_mod": "def score("}
    only_fakes("fake", {"rewards": names}, modules)

    assert {info.name: info.description for info in list_plugins(described="rewards")} == {
        "direct": "Return 1 for yes",
        "lazy": "Measure laziness",
        "near": "How wide near is",
        "made": "How wide near is",
        "bare": "Measure laziness",
        "hollow": "",
        "broken": "",
    }
    assert {info.description for info in list_plugins(described="losses")} == {""}


def test_what_metadata_shows_to_be_wrong_is_told_without_importing_anything(install):
    install(
        "fine",
        {"rewards": {"fine": "fine_mod"}},
        {"fine_mod": "raise RuntimeError('imported!')"},
        version="1.2",
    )
    install("gone", {"rewards": {"gone": "gone_pkg.plugin"}})
    install("old", {"rewards": {"old": "fine_mod"}}, requires=["engine-core-rl<0.0.1"])
    install("group", {"reward": {"group": "fine_mod"}})
    install("twin-a", {"losses": {"twin": "fine_mod"}})
    install("twin-b", {"losses": {"twin": "fine_mod"}})

    found = listed("fine", "gone", "old", "group", "twin")

    assert found["fine:fine"] == PluginInfo("fine", "rewards", "fine", "1.2", "fine_mod")
    assert found["gone:gone"].problem == "its module 'gone_pkg.plugin' is absent; reinstall gone"
    assert found["old:old"].problem.startswith("needs engine-core-rl<0.0.1, but this is engine-core-rl ")
    assert found["group:group"].problem.startswith(
        "there is no group 'engine.reward'. Did you mean 'engine.rewards'? Known: "
    )
    assert found["twin-a:twin"].problem == "also offered by twin-b 1.0; write 'twin-a:twin' to pick this one"
    assert not found["twin-b:twin"].healthy
    assert "fine_mod" not in sys.modules


def test_check_imports_each_and_shows_what_breaks(only_fakes, capsys):
    only_fakes("good", {"rewards": {"good": "good_plugin", "hollow": "good_plugin"}}, {"good_plugin": GOOD})
    only_fakes("raises", {"rewards": {"raises": "raises_mod"}}, {"raises_mod": "raise RuntimeError('boom')"})
    only_fakes("watch", {"plugins": {"watch": "watch_mod"}}, {"watch_mod": "value = 1"})

    found = listed("good", "hollow", "raises", "watch", check=True)

    assert found["good:good"].healthy
    assert found["watch:watch"].healthy
    assert "its module 'good_plugin.nothing' is not" in found["good:hollow"].problem
    assert "is broken, it does not import: RuntimeError: boom" in found["raises:raises"].problem
    assert capsys.readouterr().out == ""


def test_names_from_metadata_are_never_run_as_code(only_fakes, tmp_path):
    proof = tmp_path / "proof"
    name = f"__import__('os').mkdir('{proof}')"
    only_fakes("sly", {"rewards": {name: "sly_mod"}}, {"sly_mod": ""})

    (info,) = listed(name, check=True).values()

    assert not info.healthy
    assert not proof.exists()


def test_the_list_reads_as_json():
    rows = json.loads(plugin_listing.as_json(list_plugins()))

    assert {
        "name",
        "kind",
        "distribution",
        "version",
        "module",
        "healthy",
        "problem",
        "health",
        "fit",
        "description",
    } == set(rows[0])


def test_the_metadata_of_distributions_without_offers_is_not_read(install, tmp_path):
    site = install("acme", {"rewards": {"x": "mod"}})
    for number in range(200):
        info = site / f"other{number}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Name: other{number}\nVersion: 1.0\n" + "Requires-Dist: x\n" * 50)
        (info / "entry_points.txt").write_text("[console_scripts]\nx = y:z\n")
    code = (
        "import sys; opened = []; sys.addaudithook(lambda event, of: event == 'open' and opened.append(str(of[0])))\n"
        "from engine_plugin_tools.plugin_list import list_plugins; list_plugins()\n"
        "print(sum('/other' in name and name.endswith('METADATA') for name in opened))"
    )
    environment = {**os.environ, "PYTHONPATH": str(site)}

    child = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True)

    assert int(child.stdout) == 0


def test_a_plugin_tells_what_the_machine_lacks(only_fakes):
    source = """
from engine_core import hookimpl
from engine_core.errors import EnvironmentProblem
from engine_core.specs import Reward

def lacks():
    raise EnvironmentProblem("no sandbox")

@hookimpl
def engine_rewards():
    return {
        "well": Reward(load=lambda completions: completions, health=lambda: "all well"),
        "ill": Reward(load=lambda completions: completions, health="acme_health:lacks"),
        "mute": Reward(load=lambda completions: completions),
    }
"""
    only_fakes(
        "acme", {"rewards": dict.fromkeys(("well", "ill", "mute"), "acme_health")}, {"acme_health": source}
    )

    infos = listed("well", "ill", "mute", check=True).values()

    assert {info.name: (info.problem, info.health, info.fit) for info in infos} == {
        "well": (None, "all well", True),
        "ill": (None, "no sandbox", False),
        "mute": (None, "", True),
    }


TABLE = """
from engine_core.hooks import hookspec
from engine_core.specs import Spec

class Parser(Spec):
    kind, noun = "query_parsers", "query parser"

SPECS = {"query_parsers": Parser}

@hookspec
def engine_query_parsers():
    "Offer parsers."
"""


def offered(*names):
    return [offer for offer in installed() if (offer.kind, offer.name) in names]


def test_check_passes_what_has_nothing_to_load_a_column_of_a_role_and_a_table(install):
    install("acme", {"tables": {"query_parsers": "acme_tables"}}, {"acme_tables": TABLE})
    offers = offered(("columns", "values"), ("tables", "query_parsers"))
    assert len(offers) == 2

    assert [plugin_listing._info(offer, check=True).problem for offer in offers] == [None, None]


@pytest.mark.parametrize(
    ("was", "becomes", "problem"),
    [
        ("SPECS =", "OTHER =", "'acme_tables' must have SPECS with a subclass of Spec for 'query_parsers'"),
        ("@hookspec", "", "and the hook engine_query_parsers, marked @hookspec."),
        ("from engine_core.specs", "from engine_core.nowhere", "is broken, it does not import"),
    ],
)
def test_check_shows_a_table_that_is_none(install, was, becomes, problem):
    install(
        "acme", {"tables": {"query_parsers": "acme_tables"}}, {"acme_tables": TABLE.replace(was, becomes)}
    )
    (offer,) = offered(("tables", "query_parsers"))

    said = plugin_listing._info(offer, check=True).problem

    assert said.startswith("Plugin 'query_parsers' (acme 1.0)")
    assert problem in said
