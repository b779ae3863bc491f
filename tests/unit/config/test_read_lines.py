import tomllib

from hypothesis import given, settings
from hypothesis import strategies as st

from engine_core.config.dump import _table_lines
from engine_core.config.read import key_lines

SAMPLE = '''\
a = 1 # [no.table]
"b c".d = "x # = [y]"
e = """
f = 2
"""
[t]
u = { v = 1, w = { x = "}" } }
y = [
  { name = "one", z = 1 },
  # a = comment
  { name = "two", a = [
    1], z = 2 },
]
[[r]]
name = '# its'
[r.o]
p = 1
[[r]]
q = 2
[[r.s]]
k = 1
[[r.s]]
k = 2
'''


def paths(value, path=()):
    """Every path of a parsed TOML, independently of the scanner."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield (*path, key)
            yield from paths(inner, (*path, key))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from paths(inner, (*path, number))


def test_every_key_has_its_line():
    lines = key_lines(SAMPLE)
    assert lines["a",] == 1
    assert lines["b c", "d"] == 2
    assert lines["e",] == 3
    assert ("f",) not in lines
    assert lines["t",] == 6
    assert lines["t", "u", "w", "x"] == 7
    assert lines["t", "y", 1, "z"] == lines["t", "y"] == 8  # a key in a value has the line of the outer key
    assert lines["r", 0, "o", "p"] == 17
    assert lines["r", 1, "q"] == 19
    assert lines["r", 1, "s", 0, "k"] == 21
    assert lines["r", 1, "s", 1, "k"] == 23


def test_a_comment_on_the_last_line_holds_no_keys():
    assert key_lines("a = 1 # b = 2") == {("a",): 1}
    assert key_lines("a = 1\n# b.c = 2") == {("a",): 1}


def test_the_scanner_finds_the_keys_that_tomllib_finds():
    found = {path for path in key_lines(SAMPLE) if isinstance(path[-1], str)}
    assert found == {path for path in paths(tomllib.loads(SAMPLE)) if isinstance(path[-1], str)}


KEYS = st.text(min_size=1, max_size=6).filter(lambda key: "\r" not in key and key.isprintable())
TEXTS = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=12)
VALUES = st.recursive(
    st.integers(-(2**60), 2**60) | st.booleans() | TEXTS | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(KEYS, VALUES, max_size=5))
@settings(max_examples=150)
def test_any_toml_that_we_write_is_scanned_to_its_keys(tree):
    text = "\n".join(_table_lines(tree, ())) + "\n"
    parsed = tomllib.loads(text)
    assert parsed == tree
    found = {path for path in key_lines(text) if isinstance(path[-1], str)}
    assert found == {path for path in paths(parsed) if isinstance(path[-1], str)}


@given(st.text(alphabet="ab=.[]{}\"'#\n ,1\\", max_size=60))
@settings(max_examples=300)
def test_the_scanner_ends_on_any_text(text):
    key_lines(text)
