import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_core.config.read import _merge_tables, key_text, read_config, split_key
from engine_core.errors import ConfigError


@pytest.fixture
def write(tmp_path):
    def write(name, text):
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
        return file

    return write


def error_of(*files, overrides=(), env=None, **more):
    with pytest.raises(ConfigError) as error:
        read_config(files, overrides, env or {}, **more)
    return str(error.value)


def test_precedence_is_extends_file_later_file_environment_override(write):
    write("base.toml", "a = 1\nb = 1\nc = 1\nd = 1\ne = 1")
    first = write("run.toml", 'extends = ["base.toml"]\nb = 2\nc = 2\nd = 2\ne = 2')
    second = write("more.toml", "c = 3\nd = 3\ne = 3")
    raw = read_config([first, second], ["e=5"], {"ENGINE__D": "4", "ENGINE__E": "4", "OTHER": "1"})
    assert raw.data == {"a": 1, "b": 2, "c": 3, "d": 4, "e": 5}
    names = {key: str(origin).rpartition("/")[2] for key, origin in raw.origins.items()}
    assert names == {
        "a": "base.toml:1",
        "b": "run.toml:2",
        "c": "more.toml:1",
        "d": "environment ENGINE__D",
        "e": "--set e",
    }


def test_a_name_that_one_file_lists_twice_is_kept_twice_whatever_it_extends(write):
    base = write("base.toml", '[[r]]\nname = "x"\nw = 1')
    over = write("over.toml", '[[r]]\nname = "x"\nw = 2\n[[r]]\nname = "x"\nw = 3')
    assert [each["w"] for each in read_config([base, over], (), {}).data["r"]] == [2, 3]


def test_tables_merge_arrays_are_replaced_and_named_arrays_merge_by_name(write):
    base = write("base.toml", '[t]\na = 1\nb = [1, 2]\n[[r]]\nname = "x"\nw = 1\n[[r]]\nname = "y"\nw = 2')
    over = write("over.toml", '[t]\nb = [3]\n[[r]]\nname = "y"\nw = 9\n[[r]]\nname = "z"')
    raw = read_config([base, over], (), {})
    assert raw.data["t"] == {"a": 1, "b": [3]}
    assert raw.data["r"] == [{"name": "x", "w": 1}, {"name": "y", "w": 9}, {"name": "z"}]
    assert str(raw.origins["r.y.w"]).endswith("over.toml:5")
    assert str(raw.origins["r.x.w"]).endswith("base.toml:6")


def test_two_elements_of_one_name_in_one_file_stay_two(write):
    raw = read_config([write("a.toml", '[[r]]\nname = "x"\n[[r]]\nname = "x"')], (), {})
    assert len(raw.data["r"]) == 2


def test_an_array_replaced_by_another_leaves_no_origin_behind(write):
    first = write("a.toml", "t.x = 1")
    raw = read_config([first, write("b.toml", "t = 3")], (), {})
    assert list(raw.origins) == ["t"]


def test_extends_may_be_one_name_and_reach_below_the_folder(write):
    write("parts/base.toml", "a = 1")
    assert read_config([write("run.toml", 'extends = "parts/base.toml"')], (), {}).data == {"a": 1}


def test_a_file_that_is_extended_may_extend_a_neighbour_above_it(write):
    write("top.toml", "a = 1")
    write("parts/base.toml", 'extends = ["../top.toml"]')
    assert read_config([write("run.toml", 'extends = ["parts/base.toml"]')], (), {}).data == {"a": 1}


@pytest.mark.parametrize("target", ["../secret.toml", "/etc/passwd", "sub/../../secret.toml", "link.toml"])
def test_extends_outside_the_folder_is_refused_and_nothing_of_it_is_shown(write, tmp_path, target):
    write("secret.toml", "token = 'hunter2'")
    run = write("inner/run.toml", f'a = 1\nextends = ["{target}"]')
    (tmp_path / "inner/link.toml").symlink_to(tmp_path / "secret.toml")
    message = error_of(run)
    assert f"run.toml:2: extends '{target}', which is outside {tmp_path / 'inner'}." in message
    assert "--allow-code" in message
    assert "hunter2" not in message


def test_extends_outside_the_folder_can_be_allowed(write):
    write("base.toml", "a = 1")
    run = write("inner/run.toml", 'extends = ["../base.toml"]')
    assert read_config([run], (), {}, allow_code=True).data == {"a": 1}


def test_a_circle_of_extends_is_shown(write):
    write("b.toml", 'extends = ["c.toml"]')
    write("c.toml", 'extends = ["a.toml"]')
    message = error_of(write("a.toml", 'extends = ["b.toml"]'))
    assert "in a circle: a.toml -> b.toml -> c.toml -> a.toml" in message


def test_extends_must_be_files(write):
    assert "run.toml:2: extends: got 3, expected a list of files" in error_of(
        write("run.toml", "a=1\nextends = 3")
    )


@pytest.mark.parametrize(
    ("text", "place", "what"),
    [
        ("a = 1\nb = \n", ":2:5", "this is no TOML: Invalid value"),
        ("a = 1\na = 2\n", ":2:6", "Cannot overwrite a value"),
        ("a = 1\n[b", ":2", "this is no TOML"),
        ('a = 1\r\nb = "x\r\n', ":2:7", "Illegal character"),
        ("a = " + "9" * 5000, ":1", "this is no TOML"),
    ],
)
def test_a_syntax_error_has_file_and_line(write, text, place, what):
    message = error_of(write("run.toml", text))
    assert f"run.toml{place}: " in message
    assert what in message


def test_invalid_utf8_has_file_and_line(write):
    message = error_of(write("run.toml", b"a = 1\nb = '\xff'\n"))
    assert "run.toml:2: not UTF-8 (byte 0xff). Save it as UTF-8." in message


def test_windows_line_ends_and_a_byte_order_mark_are_read(write):
    raw = read_config([write("run.toml", b"\xef\xbb\xbfa = 1\r\n[t]\r\nb = 2\r\n")], (), {})
    assert raw.data == {"a": 1, "t": {"b": 2}}
    assert raw.origins["t.b"].line == 3


def test_an_absent_file_names_its_neighbour(write, tmp_path):
    write("train.toml", "")
    assert "trian.toml: there is no such file. Did you mean 'train.toml'?" in error_of(
        tmp_path / "trian.toml"
    )


def test_a_folder_is_named_with_the_run_files_in_it(write, tmp_path):
    write("run.toml", "")
    assert error_of(tmp_path).endswith(f"is a folder. Name a run file in it: '{tmp_path}/run.toml'.")


def test_a_key_given_as_a_file_is_named_with_its_option():
    assert error_of("train.total_steps=3").endswith("To set a key, write --set train.total_steps=3.")


def test_a_hundred_megabytes_are_refused_without_reading_them(tmp_path):
    file = tmp_path / "run.toml"
    with file.open("wb") as stream:
        stream.truncate(100_000_000)
    assert "run.toml: larger than 1 MB" in error_of(file)


def test_a_device_is_no_run_file():
    assert "/dev/zero: there is no such file" in error_of("/dev/zero")


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_an_unreadable_file_says_why(write):
    file = write("run.toml", "")
    file.chmod(0)
    assert "cannot be read: Permission denied" in error_of(file)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("true", True),
        ('["a", "b"]', ["a", "b"]),
        ("{ x = 1 }", {"x": 1}),
        ("plain words", "plain words"),
        ("a=b", "a=b"),
        ("", ""),
        ("2024-01-01", "2024-01-01"),
        ("1\nb = 2", "1\nb = 2"),
        ("[" * 3000, "[" * 3000),
    ],
)
def test_values_of_overrides_and_environment_are_toml_or_else_text(text, value):
    assert read_config([], [f"a={text}"], {}).data == {"a": value}
    assert read_config([], (), {"engine__A": text}).data == {"a": value}


def test_an_override_reaches_a_named_element(write):
    file = write("run.toml", '[[reward]]\nname = "math"\n[[reward]]\nname = "format"')
    raw = read_config([file], ["reward.format.weight=0.5"], {"ENGINE__REWARD__MATH__WEIGHT": "2"})
    assert raw.data["reward"] == [{"name": "math", "weight": 2}, {"name": "format", "weight": 0.5}]
    assert str(raw.origins["reward.format.weight"]) == "--set reward.format.weight"


def test_an_override_never_makes_an_element(write):
    file = write("run.toml", '[[reward]]\nname = "math"')
    message = error_of(file, overrides=["reward.maths.weight=1"])
    assert (
        message
        == "--set reward.maths.weight: reward has no entry named 'maths'. Did you mean 'math'? Known: math."
    )
    assert "reward.math is a table. Name one of its keys." in error_of(file, overrides=["reward.math=1"])


def test_an_override_through_a_value_is_refused(write):
    file = write("run.toml", 'actor.backend = "torch"')
    message = error_of(file, overrides=["actor.backend.x=1"])
    assert message == "--set actor.backend.x: actor.backend holds a value, not a table."


def test_overrides_from_python_may_be_nested():
    raw = read_config([], [{"actor": {"optim": {"lr": 1e-6}}}, {"actor.optim.eps": 1e-9}], {})
    assert raw.data == {"actor": {"optim": {"lr": 1e-6, "eps": 1e-9}}}
    assert str(raw.origins["actor.optim.lr"]) == "--set actor"


def test_an_override_from_python_is_copied():
    mine = {"x": [1]}
    read_config([], [{"a": mine}, {"a.x": [2]}], {})
    assert mine == {"x": [1]}


@pytest.mark.parametrize("text", ["actor", "=1", "a..b=1", "a.=1", ".a=1", '"a=1'])
def test_what_is_no_override_is_refused(text):
    assert f"--set {text.partition('=')[0]}" in error_of(overrides=[text])


def test_an_environment_name_with_an_empty_part_is_refused():
    assert error_of(env={"ENGINE__A____B": "1"}).startswith(
        "environment ENGINE__A____B: the key has an empty part"
    )


def test_a_quoted_key_may_hold_dots_and_signs():
    assert split_key('schedule."rollout.temperature"') == ("schedule", "rollout.temperature")
    assert read_config([], ['t."a=b"=1'], {}).data == {"t": {"a=b": 1}}
    assert key_text(("schedule", "rollout.temperature")) == 'schedule."rollout.temperature"'


TREES = st.recursive(
    st.integers(0, 3),
    lambda inner: st.dictionaries(st.sampled_from("abcd"), inner, max_size=3),
    max_leaves=8,
).filter(lambda tree: isinstance(tree, dict))


def merged(*trees):
    into = {}
    for tree in trees:
        _merge_tables(into, tree)
    return into


@given(TREES, TREES)
def test_merging_keeps_all_of_the_later_tree(one, two):
    result = merged(one, two)

    def holds(outer, inner):
        if isinstance(inner, dict):
            return isinstance(outer, dict) and all(
                key in outer and holds(outer[key], inner[key]) for key in inner
            )
        return outer == inner

    assert holds(result, two)
    assert set(result) == set(one) | set(two)


@given(TREES)
def test_merging_a_tree_with_itself_or_nothing_changes_nothing(tree):
    assert merged(tree, tree) == merged(tree, {}) == merged({}, tree) == tree


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        (
            "[run]\nname = first\n",
            r'Invalid value\. A text needs quotes: name = "first"\. A switch is true or false, in small letters\.$',
        ),
        ("[run]\nsteps = 1\nsteps = 2\n", r"The key stands twice in its table: keep one\.$"),
        (
            "[run]\nsteps = 1\n[run]\nepochs = 2\n",
            r"The table stands twice: write its keys below one header\.$",
        ),
        ("run:\n  steps: 1\n", r'steps = 100\. YAML \("key: value"\) is not read\.$'),
    ],
)
def test_a_syntax_error_says_what_to_do(write, text, fix):
    with pytest.raises(ConfigError, match=rf"run\.toml:\d+:\d+: this is no TOML: .*{fix}"):
        read_config([write("run.toml", text)], env={})
