"""A one-file plugin with estimators, losses and stages that each break one contract of the kit."""

import dataclasses
import random
import statistics

import torch

from engine_core import hookimpl
from engine_core.specs import Advantage, Loss, Stage
from engine_core.types import StageState


def _centred(batch, valid):
    values = torch.zeros(len(batch))
    for group in batch["group_ids"].unique():
        members = (batch["group_ids"] == group) & valid
        if members.any():
            values[members] = batch["rewards"][members] - batch["rewards"][members].mean()
    return values


def negated(batch):
    return -batch.to_tokens(_centred(batch, batch["valid"])) * batch["loss_mask"]


def everywhere(batch):
    return batch.to_tokens(_centred(batch, batch["valid"]))


def of_all(batch):
    return batch.to_tokens(_centred(batch, torch.ones_like(batch["valid"]))) * batch["loss_mask"]


def in_order(batch):
    rewards = batch["rewards"] * batch["valid"]
    size = len(batch) // len(batch["group_ids"].unique())
    values = (rewards.reshape(-1, size) - rewards.reshape(-1, size).mean(1, keepdim=True)).reshape(-1)
    return batch.to_tokens(values) * batch["loss_mask"]


def divided(batch):
    values = _centred(batch, batch["valid"])
    return batch.to_tokens(values / values.std()) * batch["loss_mask"]


def in_place(batch):
    made = batch.to_tokens(_centred(batch, batch["valid"])) * batch["loss_mask"]
    batch["rewards"].sub_(batch["rewards"].mean())
    return made


def of_batch(batch):
    held = batch["rewards"] - batch["rewards"][batch["valid"]].mean()
    return batch.to_tokens(held * batch["valid"]) * batch["loss_mask"]


def _ratio(outputs, batch, most=20.0):
    return (outputs["log_probs"] - batch["old_log_probs"]).clamp(-most, most).exp()


def half(outputs, batch):
    return -_ratio(outputs, batch) * batch["advantages"] / 2, {}


def turned(outputs, batch):
    return _ratio(outputs, batch) * batch["advantages"], {}


def centred(outputs, batch):
    losses = -_ratio(outputs, batch) * batch["advantages"]
    return losses - losses.mean().detach(), {}


def unclamped(outputs, batch):
    return -_ratio(outputs, batch, 1e4) * batch["advantages"], {}


def watched(outputs, batch):
    ratio = _ratio(outputs, batch)
    return -ratio * batch["advantages"], {"ratio": ratio}


def scaled(outputs, batch):
    losses = -_ratio(outputs, batch) * batch["advantages"].clone()
    batch["advantages"].mul_(0.5)
    return losses, {}


def everything(rollouts, step):
    return rollouts, {}


def rounded(rollouts, step):
    return [dataclasses.replace(r, rollout_log_probs=r.rollout_log_probs.round()) for r in rollouts], {}


def averaging(rollouts, step):
    return rollouts, {"mean": statistics.mean(r.reward for r in rollouts if r.valid)}


def lottery(rollouts, step):
    return [rollout for rollout in rollouts if random.random() < 0.5], {}


class Centers:
    def __init__(self):
        self.mean = 0.0

    def __call__(self, rollouts, step):
        for rollout in rollouts:
            self.mean += 0.1 * (rollout.reward - self.mean)
            rollout.reward -= self.mean
        return rollouts, {}

    def state(self):
        return StageState({})

    def load_state(self, state):
        pass


class Forgets:
    def __init__(self):
        self.seen, self.calls = set(), 0

    def __call__(self, rollouts, step):
        self.calls += 1
        kept = [r for r in rollouts if r.prompt.id not in self.seen and r.index < self.calls]
        self.seen |= {rollout.prompt.id for rollout in rollouts}
        return kept, {}

    def state(self):
        return StageState({"seen": sorted(self.seen)})

    def load_state(self, state):
        self.seen = set(state.values["seen"])


@hookimpl
def engine_advantages():
    found = {
        f.__name__: Advantage(load=f) for f in (negated, everywhere, of_all, in_order, divided, in_place)
    }
    return found | {"of_batch": Advantage(load=of_batch, per_group=True)}


@hookimpl
def engine_losses():
    functions = (half, turned, centred, unclamped, watched, scaled)
    needs = frozenset({"advantages", "old_log_probs"})
    return {function.__name__: Loss(load=function, needs=needs) for function in functions}


@hookimpl
def engine_stages():
    functions = (everything, rounded, averaging, lottery)
    objects = {"forgets": Stage(load=Forgets), "centers": Stage(load=Centers)}
    return {**{f.__name__: Stage(load=f) for f in functions}, **objects}
