"""The stub of pytest in a box does what pytest does."""

import importlib
import itertools
import math
import sys
from decimal import Decimal, InvalidOperation
from fractions import Fraction

import pytest

from engine_plugin_rewards.sandbox.inside import pytest_stub

VALUES = [
    *(0, 1, 1 + 5e-7, 1 + 5e-6, 1e-13, 1e-11, -1, 10**20, 1j, 1 + 1e-9j, math.inf, -math.inf, math.nan),
    *(Decimal("1.0000001"), Fraction(1, 3), 1 / 3, "1", b"1", None),
    *([1, 2], (1, 2), [1, 2 + 1e-9], [1, 2.1], [1], [], [1, "a"], [1, None], [math.nan], [1, 0]),
    *({"a": 1}, {"a": 1 + 1e-9}, {"a": 1.1}, {"b": 1}, {"a": None}),
]
TOLERANCES = [{}, {"rel": 1e-5}, {"abs": 1e-5}, {"rel": 0.5, "abs": 0.1}, {"nan_ok": True}]


@pytest.mark.filterwarnings("ignore:.* cannot be represented exactly as a Decimal")
@pytest.mark.parametrize("tolerances", TOLERANCES)
def test_approx_equals_what_pytest_s_equals(tolerances):
    compared = 0
    for actual, expected in itertools.product(VALUES, VALUES):
        try:
            theirs = actual == pytest.approx(expected, **tolerances)
        except (TypeError, InvalidOperation):  # pytest does not compare them
            continue
        compared += 1
        ours = pytest_stub.approx(expected, **tolerances)
        assert ((actual == ours), (actual != ours)) == (theirs, not theirs), (actual, expected)
    assert compared > 500


def test_approx_compares_nested_values_and_says_what_it_is():
    assert pytest_stub.approx([[1], {"a": [2]}]) == [[1 + 1e-9], {"a": (2,)}]
    assert repr(pytest_stub.approx([1])) == "approx([1])"


@pytest.mark.parametrize("module", [pytest, pytest_stub])
def test_raises_expects_an_exception(module):
    with module.raises((KeyError, ValueError), match="o.e") as info:
        raise ValueError("some")
    assert (info.type, str(info.value)) == (ValueError, "some")
    assert info.match("^s")
    assert module.raises(ValueError, int, "a", base=10).type is ValueError
    with pytest.raises(AssertionError), module.raises(ValueError, match="b"):
        raise ValueError("a")
    with pytest.raises(KeyError), module.raises(ValueError):
        raise KeyError
    with pytest.raises(BaseException, match="DID NOT RAISE") as missed, module.raises(ValueError):
        pass
    assert not isinstance(missed.value, Exception)
    with pytest.raises(BaseException, match="why"):
        module.fail("why")


def test_parametrize_runs_a_test_with_each_row():
    mark, seen = pytest_stub.mark, []

    @mark.parametrize("a", [1, pytest_stub.param(2, id="two")], ids=str)
    @mark.parametrize(("b", "c"), [(3, 4), pytest_stub.param(5, 6)])
    @mark.parametrize("d,e", iter([[7, 8]]))
    def test(a, b, c, d, e):
        seen.append((a, b, c, d, e))

    test()
    assert seen == [(1, 3, 4, 7, 8), (1, 5, 6, 7, 8), (2, 3, 4, 7, 8), (2, 5, 6, 7, 8)]


def test_the_finder_offers_pytest_alone(monkeypatch):
    monkeypatch.setattr(sys, "meta_path", [pytest_stub.Finder()])
    monkeypatch.delitem(sys.modules, "pytest")
    assert importlib.import_module("pytest") is pytest_stub
    with pytest.raises(ImportError):
        importlib.import_module("no_such_module")
