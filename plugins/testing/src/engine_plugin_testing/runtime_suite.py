"""The suite of runtimes."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from engine_plugin_testing import runtime_calls, runtime_losses, runtime_orders, runtime_random
from engine_plugin_testing.suite import Suite

if TYPE_CHECKING:
    from engine_plugin_testing.contracts import Contract
    from engine_plugin_testing.runtime_bench import RuntimeBench


class RuntimeSuite(Suite, modules=(runtime_calls, runtime_random, runtime_orders, runtime_losses)):
    """A suite: the contracts of ``engine_core.contracts.runtime.Runtime``. ``Suite`` has the other attributes.

    The contracts run in a thread of the test's process, which is the controller; engines have no model. With ``world_size``
    over 1 the runtime's table must have ``processes``.

    Attributes:
        backend: name of the runtime.
        options: its table, as in ``[runtime.NAME]``.
        processes: whether workers are processes, which can be killed and belong to one pool each.
    """

    kind = "runtimes"
    section = "runtime"
    fields: ClassVar[tuple[str, ...]] = ("backend", "options", "plugins", "world_size")

    backend: str = "local"
    options: Mapping[str, Any] = {}
    processes: bool = True

    _bench: ClassVar[RuntimeBench | None] = None

    @classmethod
    def setup_class(cls) -> None:
        """Prepare the suite; ``processes`` is a capability."""
        super().setup_class()
        cls._capabilities = cls._capabilities | ({"processes"} if cls.processes else set())

    @classmethod
    def teardown_class(cls) -> None:
        """Close the bench."""
        super().teardown_class()
        if cls._bench is not None:
            cls._bench.close()
            cls._bench = None

    def _failure(self, made: Contract) -> str:
        from engine_plugin_testing.runtime_bench import RuntimeBench

        cls, failures = type(self), list[str]()
        bench = cls._bench = cls._bench or RuntimeBench(**self.settings())

        def run() -> None:
            """Run the contract."""
            try:
                made.function(bench)
            except Exception:
                failures.append(traceback.format_exc())

        thread = threading.Thread(target=run, name=made.name, daemon=True)
        thread.start()
        thread.join(self.deadline)
        if thread.is_alive():
            stack = "".join(traceback.format_stack(sys._current_frames()[thread.ident or 0]))
            failures.insert(0, f"It has not ended after {self.deadline:g} s. It is at:\n{stack}")
        if failures:
            bench.end_shared()  # the next contract starts another
        return "".join(failures[:1])
