"""Runtimes, each with one mistake in what crosses to its workers and back; a plugin that offers them."""

import dataclasses
import sys
from concurrent.futures import Future
from unittest import mock

import torch

from engine_core import hookimpl
from engine_core.builtin import LocalOptions
from engine_core.errors import DataError
from engine_core.local.engine_host import EngineHost
from engine_core.local.runtime import LocalGroup, LocalRuntime
from engine_core.specs import RuntimeSpec


class Broken(LocalRuntime):
    """``given`` changes the arguments of a call on their way, ``back`` its result."""

    def start(self, roles, total_steps):
        runtime = self

        class Group(LocalGroup):
            def call(self, method, batch=None, split="dp", **plain):
                future = super().call(method, *runtime.given(batch, plain), **plain)
                result = runtime.back(future.result())
                future = type(future)()
                future.set_result(result)
                return future

        return {name: Group(group.engine) for name, group in super().start(roles, total_steps).items()}

    def given(self, batch, plain):
        return (batch,)

    def back(self, result):
        return result


class Changed(Broken):
    def given(self, batch, plain):
        return (batch and self.changed(batch),)

    def changed(self, batch):
        return batch


class LosesTogether(Changed):
    def changed(self, batch):
        return dataclasses.replace(batch, keep_together=None)


class RoundsColumns(Changed):
    def changed(self, batch):
        tokens = {name: c.float() if c.dtype == torch.float64 else c for name, c in batch.tokens.items()}
        return dataclasses.replace(batch, tokens=tokens)


class LosesTemperature(Changed):
    def changed(self, batch):
        return dataclasses.replace(batch, temperature=1.0)


class CutsColumns(Changed):
    def changed(self, batch):
        tokens = {name: c[:, :2] if c.ndim > 1 else c for name, c in batch.tokens.items()}
        return dataclasses.replace(batch, tokens=tokens)


class RoundsMetrics(Broken):
    def back(self, result):
        if hasattr(result, "metrics"):
            result.metrics = {name: float(torch.tensor(value)) for name, value in result.metrics.items()}
        return result


class OneMicroBatch(Broken):
    def back(self, result):
        return dataclasses.replace(result, num_micro_batches=1) if hasattr(result, "metrics") else result


class Asked(Broken):
    def given(self, batch, plain):
        if "requests" in plain:
            plain["requests"] = [dataclasses.replace(r, **self.asked(r)) for r in plain["requests"]]
        return (batch,)


class LosesOption(Asked):
    def asked(self, request):
        return {"sampling": dataclasses.replace(request.sampling, timeout_s=0.0)}


class LosesBegun(Asked):
    def asked(self, request):
        return {"begun": None}


class PromptOfId(Broken):
    def given(self, batch, plain):
        prompts = {request.prompt.id: request.prompt for request in plain.get("requests", ())}
        if prompts:
            plain["requests"] = [
                dataclasses.replace(r, prompt=prompts[r.prompt.id]) for r in plain["requests"]
            ]
        return (batch,)


class Returned(Broken):
    def back(self, result):
        return [self.returned(rollout) for rollout in result] if isinstance(result, list) else result


class ForgetsDrops(Broken):
    def given(self, batch, plain):
        plain.pop("dropped", None)
        return (batch,)


class DropsLate(Broken):
    """A drop arrives with the next call; answers that come in between are hidden."""

    late = ()

    def given(self, batch, plain):
        if "dropped" in plain or "requests" in plain:
            plain["dropped"], self.late = self.late, plain.get("dropped", ())
        return (batch,)

    def back(self, result):
        return [r for r in result if r.request_id not in self.late] if isinstance(result, list) else result


class EarlierPrompt(Asked):
    """A cache of requests by id that a second request with the id does not replace."""

    def start(self, roles, total_steps):
        self.known = {}
        return super().start(roles, total_steps)

    def asked(self, request):
        return {"prompt": self.known.setdefault(request.id, request.prompt)}


class HidesStopped(Broken):
    def back(self, result):
        return [r for r in result if r.finish_reason != "abort"] if isinstance(result, list) else result


class AnswersOfEarlierCalls(Broken):
    last = None

    def back(self, result):
        if not isinstance(result, dict):
            return result
        self.last, earlier = result, self.last
        return earlier or result


class LosesColumnsOfOne(Changed):
    def changed(self, batch):
        return dataclasses.replace(batch, tokens={}) if len(batch) == 1 else batch


class LosesExtras(Returned):
    def returned(self, rollout):
        return dataclasses.replace(rollout, extras={n: c for n, c in rollout.extras.items() if c.ndim == 1})


class LosesFailure(Returned):
    def returned(self, rollout):
        return dataclasses.replace(rollout, failure="")


class RaisesAgain(Broken):
    def start(self, roles, total_steps):
        groups = super().start(roles, total_steps)
        infer = groups["actor"].engine.infer

        def kept(batch, outputs):
            try:
                return infer(batch, outputs)
            except DataError as error:
                self.raise_again(error)

        groups["actor"].engine.infer = kept
        return groups

    def raise_again(self, error):
        raise error


class LosesNotes(RaisesAgain):
    def raise_again(self, error):
        raise DataError(str(error)) from error


class LosesTraceback(RaisesAgain):
    def raise_again(self, error):
        made = DataError(str(error))
        made.__notes__ = error.__notes__
        raise made from None


class Swallows(Broken):
    def start(self, roles, total_steps):
        groups = super().start(roles, total_steps)
        for group in (groups["actor"], groups["ref"]):
            infer = group.engine.infer

            def kept(batch, outputs, infer=infer):
                return infer(batch, [output for output in outputs if "raise" not in output])

            group.engine.infer = kept
        return groups


class CountsIdle(Broken):
    def start(self, roles, total_steps):
        return super().start(
            {name: dataclasses.replace(role, idle_steps=0) for name, role in roles.items()}, total_steps
        )


class TrainsAll(Broken):
    def start(self, roles, total_steps):
        roles = {name: dataclasses.replace(role, trainable=True) for name, role in roles.items()}
        return super().start(roles, total_steps)


class LeavesFailed(Broken):
    """Requests of a call that raises are not dropped."""

    def start(self, roles, total_steps):
        groups = super().start(roles, total_steps)
        engine = groups["rollout"].engine
        abort = engine.abort
        engine.abort = lambda ids: [] if sys.exc_info()[0] else abort(ids)
        return groups


class Unseeded(Broken):
    def start(self, roles, total_steps):
        torch.seed()
        with mock.patch.object(torch, "manual_seed"):
            return super().start(roles, total_steps)


class PushesFirst(Broken):
    def start(self, roles, total_steps):
        groups = super().start(roles, total_steps)
        named, first = groups["actor"].engine.named_weights, []

        def kept(to="all", adapter=False):
            first[:] = first or named(to, adapter)
            return iter(first)

        groups["actor"].engine.named_weights = kept
        return groups


class SaveIsDone(Broken):
    def start(self, roles, total_steps):
        groups = super().start(roles, total_steps)
        save = groups["actor"].engine.save

        def begun(folder):
            save(folder)
            done = Future()
            done.set_result(None)
            return done

        groups["actor"].engine.save = begun
        return groups


class LeavesEngines(Broken):
    def start(self, roles, total_steps):
        with mock.patch.object(EngineHost, "close", lambda host: host._stack.pop_all()):
            return super().start(roles, total_steps)


class LeavesStreams(Broken):
    def start(self, roles, total_steps):
        found, self.kept = super().start(roles, total_steps), []

        class Group(type(found["rollout"])):
            def stream(group, requests):
                self.kept.append(super().stream(requests))
                for part in self.kept[-1]:
                    yield [*part]

        return {name: Group(group.engine) for name, group in found.items()}


class NeverCloses(Broken):
    def close(self):
        pass


class ClosesAgain(Broken):
    def close(self):
        for engine in self.engines.values():
            engine.close()


class CallsTwice(Broken):
    def given(self, batch, plain):
        if "loss" in plain:
            self.engines["actor"].forward_backward(batch, plain["loss"])
        return (batch,)


class OneRound(Broken):
    def given(self, batch, plain):
        plain.pop("rounds", None)
        return (batch,)


class LosesAdapter(Broken):
    def given(self, batch, plain):
        plain.pop("adapter", None)
        return (batch,)


class ErrorStays(Broken):
    """An error is raised by the call and by the next one."""

    def start(self, roles, total_steps):
        groups, left = super().start(roles, total_steps), []
        infer = groups["ref"].engine.infer

        def kept(batch, outputs):
            if left:
                raise left.pop()
            try:
                return infer(batch, outputs)
            except DataError as error:
                left.append(error)
                raise

        groups["ref"].engine.infer = kept
        return groups


class MixesHalf(Broken):
    def mix_weights(self, source, target, mix):
        super().mix_weights(source, target, round(mix, 1))


class SleepsInTraining(Broken):
    def _trade(self, phase):
        super()._trade({"train": "generate", "generate": "train"}.get(phase, phase))


class SleepsWhole(Broken):
    def _trade(self, phase):
        engine = self.engines["rollout"]
        sleep = engine.sleep
        engine.sleep = lambda keep=(): sleep()
        super()._trade(phase)
        engine.sleep = sleep


class OwnMemory(Broken):
    def memory_metrics(self):
        return {"memory/actor/peak": 1.0}


@hookimpl
def engine_runtimes():
    return {
        name: RuntimeSpec(load=made, config=LocalOptions, in_process=True)
        for name, made in globals().items()
        if isinstance(made, type) and issubclass(made, Broken) and made.__module__ == __name__
    }
