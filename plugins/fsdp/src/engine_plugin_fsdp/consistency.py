"""Checks before training: all ranks have the same model, and the sharded model computes what the whole model did."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from engine_core.contracts.weight_names import own_weights
from engine_core.errors import ConfigError, PluginError
from engine_core.types import Batch
from engine_plugin_torch.packed_forward import PackedForward, ValueForward
from engine_plugin_torch.value_models import VALUE_ROLES
from engine_plugin_torch.weights import identity

if TYPE_CHECKING:
    from engine_plugin_fsdp.options import FSDPOptions
    from engine_plugin_fsdp.ranks import Ranks

log = logging.getLogger("engine")

AFFORDABLE = 2_000_000_000  # parameters; the probe then takes a few seconds on the CPU of rank 0
ON_A_CPU = frozenset({"varlen", "sdpa", "eager"})  # attention that needs no accelerator
LENGTHS = (9, 7)  # tokens of the probe's two packed sequences
CANNOT = (RuntimeError, NotImplementedError)  # what torch raises where a device lacks an operator
FULL, HALF = 1e-3, 0.1
"""Allowed deviation of the probe, as a share of the range of its values, for a forward pass in float32 and in 16 bits. The
rounding of either is far below; a layer that misses the part of one rank is of the order of 1."""


def check_same(module: nn.Module, ranks: Ranks, values: bool, role: str) -> None:
    """Refuse a model that differs between ranks, because their shards would mix several models. Collective.

    Args:
        module: the model before it is sharded.
        ranks: the ranks of the role.
        values: also compare some values of each weight; False for weights on ``meta``, where only names and shapes
            are compared.
        role: the role's name, for messages.

    Raises:
        PluginError: the model differs; every rank raises.
    """
    own = own_weights(module)
    digests = ranks.texts(_digest(own, values))
    other = next((rank for rank, text in enumerate(digests) if text != digests[0]), None)
    if other is None:
        return
    what = "weights" if values else "names or shapes of weights"
    every = ranks.texts({name: _digest({name: tensor}, values) for name, tensor in own.items()})
    counts = ranks.texts(sum(tensor.numel() for tensor in own.values()))
    names = dict.fromkeys([*every[0], *every[other]])
    first = next(name for name in names if every[0].get(name) != every[other].get(name))
    counted = f" ({counts[0]:,} parameters on rank 0, {counts[other]:,} on rank {other})"
    raise PluginError(
        f"The model of role '{role}' has other {what} on rank {other} than on rank 0; the first is '{first}'"
        f"{counted if counts[0] != counts[other] else ''}. What builds it must give the same on every rank: "
        "draw first weights from model.seed, not from the process's own generator."
    )


def _digest(own: dict[str, Tensor], values: bool) -> str:
    if values:
        return identity(own)
    shapes = "".join(f"{name}{list(tensor.shape)}" for name, tensor in own.items())
    return hashlib.blake2b(shapes.encode(), digest_size=16).hexdigest()


class Probe:
    """A few tokens that rank 0 computes with the whole model, and all ranks compute with the sharded model.

    Args:
        module: the model in eval mode, whole on rank 0; weights of other ranks are not read.
        ranks: the ranks of the role.
        options: the role's table; `probe` says whether to compare.
        role: the role's name, which decides the output that is compared.

    Raises:
        ConfigError: `probe` is true, but the model is none of transformers or does not run on a CPU; every rank raises.
        PluginError: rank 0 cannot compute the probe; every rank raises.

    Attributes:
        expected: [T] outputs at the probe's tokens; None where the model is not compared.
    """

    def __init__(self, module: nn.Module, ranks: Ranks, options: FSDPOptions, role: str) -> None:
        self.ranks, self.key, self.role = ranks, f"{role}.fsdp.probe", role
        self.output = "values" if role in VALUE_ROLES else "log_probs"
        self.expected: Tensor | None = None
        count = sum(parameter.numel() for parameter in module.parameters())
        wanted = options.probe
        if not isinstance(module, PreTrainedModel):
            if wanted is True:
                raise ConfigError(
                    f"{self.key} = true: only models of transformers are compared, and {type(module).__name__} is none. "
                    "Leave it out for this role."
                )
            return
        if wanted == "auto":
            runs = module.config._attn_implementation in ON_A_CPU
            wanted = ranks.size > 1 and count <= AFFORDABLE and runs
        if not wanted:
            return
        self.batch = probe_batch(module.config.get_text_config().vocab_size)
        mine, fatal, cannot = None, None, ""
        try:
            mine = self._whole(module).tolist() if ranks.rank == 0 else None
        except Exception as error:
            if isinstance(error, CANNOT):
                cannot = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            else:
                fatal = error
        ranks.share(fatal, f"{self.key}: the model before it is sharded", PluginError)
        values, reason = ranks.texts([mine, cannot])[0]
        if values is None and options.probe is True:
            raise ConfigError(
                f"{self.key} = true: the whole model does not run on the first rank's CPU, so that nothing can be compared "
                f"with it ({reason}). Leave it out, or choose a model.attention that a CPU has."
            )
        if values is None:
            log.warning(
                "%s: the whole model does not run on the CPU, so nothing is compared with it (%s).",
                role,
                reason,
            )
            return
        self.expected = torch.tensor(values)

    @torch.no_grad()
    def _whole(self, module: nn.Module) -> Tensor:
        weight = next(module.parameters())
        place = (module, weight.device, weight.dtype)
        value = self.role in VALUE_ROLES
        forward = ValueForward(*place) if value else PackedForward(*place, chunk=self.batch.num_tokens)
        return forward(self.batch.to(weight.device), (), (self.output,))[self.output].float().cpu()

    def compare(self, run: Callable[[Batch, tuple[str, ...]], dict[str, Tensor]], half: bool) -> None:
        """Compute the probe with the sharded model and compare it with ``expected``. Collective.

        Args:
            run: computes the named outputs of a pack, each [T].
            half: the model computes in 16 bits.

        Raises:
            PluginError: the result differs on some rank; every rank raises.
        """
        if self.expected is None:
            return
        with torch.no_grad():
            found = run(self.batch.to(self.ranks.device), (self.output,))[self.output].float().cpu()
        spread = float(self.expected.max() - self.expected.min())
        allowed = (HALF if half else FULL) * max(spread, 1e-2)
        gap = (found - self.expected).abs().nan_to_num(torch.inf)
        at = int(gap.argmax())
        worst_gaps = self.ranks.texts([str(float(gap[at])), at, float(found[at].nan_to_num(1e30))])
        worst = max(range(len(worst_gaps)), key=lambda rank: float(worst_gaps[rank][0]))
        size, place, value = worst_gaps[worst]
        if float(size) > allowed:
            raise PluginError(
                f"The model of role '{self.role}' computes something else sharded than whole: on rank {worst} "
                f"'{self.output}' of token {place} of the probe is {value:.6g}, expected {float(self.expected[place]):.6g} "
                f"(allowed: {allowed:.2g}). Its code does not fit this way of sharding: choose another. {self.key} = false "
                "leaves this check out."
            )
        log.info(
            "%s: the sharded model computes what the whole one does (deviation at most %.2g).",
            self.role,
            float(size),
        )


def probe_batch(vocabulary: int) -> Batch:
    """Return two packed sequences in which all tokens are loss tokens."""
    total = sum(LENGTHS)
    return Batch(
        token_ids=(torch.arange(total) * 7 + 1) % vocabulary,
        lengths=torch.tensor(LENGTHS),
        tokens={"loss_mask": torch.ones(total, dtype=torch.bool)},
    )
