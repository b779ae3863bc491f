"""Contracts, functions with a promise that run in the workers, and the comparisons that they share.

A contract's docstring is its promise, its name is the test's name without ``test_``. It fails by ``AssertionError``
with numbers that show how far off the engine is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

from engine_core.errors import EngineError

if TYPE_CHECKING:
    from torch import Tensor

REFUSALS = (EngineError, ValueError, RuntimeError, NotImplementedError)
"""Errors by which an engine may refuse a call; any other is a crash, also a KeyError that names the missing key."""


@dataclass(frozen=True)
class Contract:
    """A test of a suite."""

    function: Callable[[Any], None]
    capability: str | None  # runs exactly when the spec declares it
    catches: tuple[str, ...]  # planted faults that only this contract must catch, for the docs
    follow: Callable[[Any], None] | None = None  # the second half, on other numbers of ranks
    options: frozenset[str] = frozenset()  # empty, or runs if the spec declares one of these sampling options
    package: str = ""  # skipped where it is not installed
    role: str = ""  # empty, or runs if the suite declares the role
    option: str = ""  # empty, or runs if the plugin's option model has this field
    setting: str = ""  # empty, or runs if the suite gives this attribute a value

    @property
    def name(self) -> str:
        """The name of the test."""
        return f"test_{self.function.__name__}"

    @property
    def case(self) -> str:
        """The path ``module:qualname`` by which a worker finds the function."""
        return _named(self.function)

    @property
    def follow_case(self) -> str:
        """The path ``module:qualname`` of the second half."""
        assert self.follow is not None
        return _named(self.follow)

    @property
    def promise(self) -> str:
        """The first paragraph of the docstring on one line."""
        return " ".join((self.function.__doc__ or "").split("\n\n")[0].split())


def _named(function: Callable[..., Any]) -> str:
    return f"{function.__module__}:{function.__qualname__}"


def contract(
    *,
    capability: str | None = None,
    catches: Sequence[str] = (),
    follow: Callable[[Any], None] | None = None,
    options: Collection[str] = (),
    package: str = "",
    role: str = "",
    option: str = "",
    setting: str = "",
) -> Callable[[Callable[[Any], None]], Callable[[Any], None]]:
    """Mark a function of one bench as a contract.

    Args:
        capability: the contract runs exactly if the spec declares this capability.
        catches: planted faults that only this contract must catch, for the docs.
        follow: a function that each number of ranks of ``Suite.resumes_on`` runs after the contract; the two share the
            folder ``bench.shared``.
        options: sampling options that the contract is about; it runs if the spec declares one of them.
        package: the contract is skipped where this package is not installed.
        role: the contract runs if the suite's ``roles`` has this role.
        option: the contract runs if the plugin's option model has this field.
        setting: the contract runs if the suite gives this attribute a value.
    """

    def mark(function: Any) -> Any:
        """Attach the ``Contract`` to the function."""
        function.contract = Contract(
            function, capability, tuple(catches), follow, frozenset(options), package, role, option, setting
        )
        return function

    return mark


def contracts_of(*modules: ModuleType) -> list[Contract]:
    """Return the contracts of some modules, in the order of their sources."""
    return [
        function.contract
        for module in modules
        for function in vars(module).values()
        if hasattr(function, "contract") and function.__module__ == module.__name__
    ]


def close(found: Tensor, expected: Tensor, tolerance: float, what: str) -> None:
    """Assert that all values are within ``tolerance`` (absolute) of ``expected``, and that none is NaN.

    Args:
        found: [D_1, D_2, ...], any shape.
        expected: same shape as ``found``.

    Raises:
        AssertionError: with the number of wrong values, the largest gap and the first wrong value.
    """
    assert found.shape == expected.shape, (
        f"{what}: shape {list(found.shape)}, expected {list(expected.shape)}."
    )
    gap = (found.double() - expected.double()).abs()
    wrong = ~(gap <= tolerance)
    if bool(wrong.any()):
        at = int(wrong.flatten().nonzero()[0])
        raise AssertionError(
            f"{what}: {int(wrong.sum())} of {wrong.numel()} values are off by more than {tolerance:g}, at most by "
            f"{float(gap.max()):.3g}. The first, at {at}: {float(found.flatten()[at]):.6g}, expected "
            f"{float(expected.flatten()[at]):.6g}."
        )


def near(found: float, expected: float, tolerance: float, what: str) -> None:
    """Assert that ``found`` is within the relative ``tolerance`` of ``expected``; a size below 1e-6 counts as 1e-6."""
    assert abs(found - expected) <= tolerance * max(abs(expected), 1e-6), (
        f"{what}: {found:.8g}, expected {expected:.8g} (relative tolerance {tolerance:g})."
    )


def same_direction(
    found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float, what: str
) -> None:
    """Assert for each tensor that the norm of the difference of two gradients is within ``tolerance`` of its norm.

    A tensor whose gradient is tiny compared with the whole is measured against a thousandth of the whole, or a tenth of
    the tolerance if that is more: the rounding of a type is relative to what is summed, not to the sum.

    Args:
        found: gradients [D_1, D_2, ...] by name.
        expected: same names and shapes as ``found``.
    """
    assert found.keys() == expected.keys(), (
        f"{what}: other names: {sorted(found.keys() ^ expected.keys())[:5]}."
    )
    whole = sum(float(value.double().pow(2).sum()) for value in expected.values()) ** 0.5
    for name, value in expected.items():
        size = max(float(value.double().norm()), max(1e-3, tolerance / 10) * whole)
        gap = float((found[name].double() - value.double()).norm())
        assert gap <= tolerance * size, (
            f"{what}: '{name}' differs by {gap:.3g}, {gap / max(size, 1e-30):.2%} of its norm "
            f"(norm {float(found[name].double().norm()):.4g}, expected {float(value.double().norm()):.4g})."
        )


def identical(found: dict[str, Tensor], expected: dict[str, Tensor], what: str, exact: bool = True) -> None:
    """Assert that two sets of weights are equal.

    Args:
        found: weights [D_1, D_2, ...] by name.
        expected: same names and shapes as ``found``.
        exact: bit for bit; False allows 1e-5 of each tensor's largest value.

    Raises:
        AssertionError: with the first weight that differs, and the largest gap.
    """
    import torch

    assert found.keys() == expected.keys(), (
        f"{what}: other names: {sorted(found.keys() ^ expected.keys())[:5]}."
    )
    for name, value in expected.items():
        if exact:
            equal = torch.equal(found[name], value)
        else:
            equal = bool((found[name] - value).abs().max() <= 1e-5 * value.abs().max().clamp(min=1e-6))
        if not equal:
            gap = float((found[name].double() - value.double()).abs().max())
            raise AssertionError(f"{what}: '{name}' differs, at most by {gap:.3g}.")


@contextmanager
def refused(what: str, *words: str) -> Iterator[None]:
    """Assert that the block raises one of ``REFUSALS`` with a message that contains ``words``.

    Raises:
        AssertionError: nothing is raised, or a word is missing.
    """
    try:
        yield
    except REFUSALS as error:
        if missing := [word for word in words if word not in str(error)]:
            raise AssertionError(f"{what} is refused, but not with the words {missing}: {error}") from error
        return
    except (AssertionError, OSError):
        raise
    except Exception as error:
        names = ", ".join(kind.__name__ for kind in REFUSALS)
        crash = f"{type(error).__name__}: {error}"
        raise AssertionError(
            f"{what} ends with {crash}. That is a crash; refuse with one of {names}."
        ) from error
    raise AssertionError(f"{what} is not refused.")
