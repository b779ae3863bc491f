"""A contract of random workloads: whatever is called in whatever order, every rollout is that of the reference.

The calls and the requests are drawn from a fixed seed. What a rollout must be follows from its request and from the
weights of its tokens' versions (``rollout_verify``).
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import random
import traceback
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from engine_core.types import Prompt, Request, Rollout, Sampling
from engine_plugin_testing.contracts import contract, refused
from engine_plugin_testing.reference import SHAPE, VOCABULARY
from engine_plugin_testing.rollout_bench import RolloutBench, plain_text, response
from engine_plugin_testing.rollout_cuts import DRAWN
from engine_plugin_testing.rollout_draws import check_independent
from engine_plugin_testing.rollout_partial import STOPS
from engine_plugin_testing.rollout_verify import Verifier

if TYPE_CHECKING:
    from torch import Tensor

OPERATIONS = 70
ALONE = 6  # responses that are sampled again, each alone
MODELS = 3  # whose weights take turns
OF_SPECIAL = "<>adepos"  # letters of special tokens, in which a sampler may find a stop string or not


@dataclasses.dataclass
class _Asked:
    """A request in flight."""

    request: Request
    since: int  # index of the version that was current when it was added
    until: int | None = None  # index behind its last possible version: a pause has ended it
    may_stop: bool = False


class _Workload:
    """Random calls of an engine, all of whose answers are checked."""

    def __init__(self, bench: RolloutBench, seed: int, **rollout: Any) -> None:
        self.bench, self.seed, self.draws = bench, seed, random.Random(seed)
        self.engine, self.can = bench.engine(**rollout), bench.capabilities
        self.positions: int = {**SHAPE, **bench.settings["model"]}["max_position_embeddings"]
        self.modules = {0: bench.reference()}
        self.verifier = Verifier(bench, self.positions, self.modules)
        self.versions, self.paused, self.numbers = [0], False, itertools.count()
        self.asked: dict[str, _Asked] = {}
        self.answered: list[tuple[Request, Rollout]] = []

    def run(self) -> None:
        """Call ``OPERATIONS`` random operations, then finish all requests, and sample some again.

        Raises:
            AssertionError: an answer is wrong; the message names the seed and the operation.
        """
        weights = {self.add: 7, self.step: 8, self.abort: 5, self.refuse: 1, self.update: 3}
        weights |= {self.pause: 3} if "pause" in self.can else {}
        chosen = self.draws.choices(list(weights), list(weights.values()), k=OPERATIONS)
        for number, operation in enumerate([*chosen, self.finish, self.repeat], 1):
            try:
                operation()
                found, expected = self.engine.num_unfinished, len(self.asked)
                assert found == expected, f"num_unfinished is {found}; expected {expected}"
            except Exception as error:
                text = str(error) if isinstance(error, AssertionError) else traceback.format_exc()
                where = f"Workload {self.seed}, operation {number} ({operation.__name__})"
                raise AssertionError(f"{where}: {text}") from error
        check_independent(self.verifier.drawn, f"of workload {self.seed}")

    def add(self) -> None:
        """Add one or two groups, and continue responses that were stopped; the engine gets copies."""
        requests = [r for _ in range(self.draws.choice((1, 1, 2))) for r in self._group()]
        if "partial" in self.can:
            stopped = [
                p for p in self.answered if p[1].finish_reason == "abort" and p[0].id not in self.asked
            ]
            self.answered = [p for p in self.answered if not any(p is pair for pair in stopped[-2:])]
            requests += [dataclasses.replace(r, begun=rollout) for r, rollout in stopped[-2:]]
        requests = list({request.id: request for request in requests}.values())
        self.engine.add(copy.deepcopy(requests))
        self.asked |= {r.id: _Asked(r, len(self.versions) - 1) for r in requests}

    def step(self) -> None:
        """Take a step, which a paused engine refuses."""
        with refused("step of a paused engine") if self.paused else contextlib.nullcontext():
            self._take(self.engine.step())

    def abort(self) -> None:
        """Stop some requests, which must come back; other ids are ignored."""
        named = self.draws.sample(list(self.asked), min(len(self.asked), self.draws.randint(1, 3)))
        for id in named:
            self.asked[id].may_stop = True
        done = [r.id for r, _ in self.answered[-1:] if r.id not in self.asked]
        self._take(self.engine.abort(self.draws.sample([*named, "none", *done], len(named) + 1 + len(done))))
        assert not set(named) & self.asked.keys(), f"abort did not return all of {named}"

    def refuse(self) -> None:
        """Add a request with an id that is taken, after a good one: none may be queued."""
        good, *_ = self._group()
        bad = dataclasses.replace(good, id=self.draws.choice([good.id, *self.asked]))
        with refused(f"another request with the id '{bad.id}'"):
            self.engine.add([good, bad])

    def pause(self) -> None:
        """Pause in a random mode, or resume."""
        if self.paused:
            self.engine.resume()
        else:
            mode = self.draws.choice(("drain", "keep", "keep", "keep", "abort"))
            self.engine.pause(mode)
            for asked in self.asked.values() if mode != "keep" else ():
                asked.until = asked.until or len(self.versions)
                asked.may_stop |= mode == "abort"
        self.paused = not self.paused

    def update(self) -> None:
        """Replace the weights, perhaps while the engine sleeps in part, or after an update that broke off."""
        if self.asked and not self.paused:
            self.pause() if "pause" in self.can else self.finish()
        asleep = "sleep" in self.can and self.draws.random() < 0.5
        if asleep:
            self.engine.sleep(keep=self.draws.choice(((), ("weights",), ("kv_cache",))))
            self.engine.wake(only=("weights",))
        path, version = self.bench.model(seed=self.draws.randrange(MODELS)), self.versions[-1] + 1
        if self.draws.random() < 0.3:
            with refused("an update whose stream breaks"):
                self.engine.update_weights(_broken(self.bench.stream(path)), version)
            version += 1
        self.modules[version] = self.bench.reference(path)
        self.versions.append(version)
        self.engine.update_weights(self.bench.stream(path), version)
        if asleep:
            self.engine.wake()
        if self.paused and self.draws.random() < 0.7:
            self.pause()

    def finish(self) -> None:
        """Step until every request is answered.

        Raises:
            AssertionError: requests are unfinished after 2000 steps.
        """
        if self.paused:
            self.pause()
        for _ in range(2000):
            self._take(self.engine.step())
            if not self.asked:
                return
        raise AssertionError(f"{len(self.asked)} requests are unfinished after 2000 steps")

    def repeat(self) -> None:
        """Sample some requests with a seed again, each alone: they get the tokens that they got among others."""
        again = 0
        for request, rollout in reversed(self.answered):
            before, versions = (
                response(rollout),
                set(rollout.policy_versions[rollout.prompt_length :].tolist()),
            )
            seeded = request.sampling.temperature and request.sampling.seed is not None
            if not seeded or request.begun or versions != {self.versions[-1]} or again == ALONE:
                continue
            found, again = response(self.engine.generate([request])[0]), again + 1
            assert found[: len(before)] == before, (
                f"'{request.id}' gives {found} alone, among others {before}"
            )

    def _group(self) -> list[Request]:
        """Draw requests that share a prompt, perhaps behind the beginning of an older sequence; ids may be used again, those of prompts at once."""
        most, number = self.draws.choice((1, 4, 20, 20, self.positions - 1)), next(self.numbers)
        ids = [self.draws.randrange(VOCABULARY) for _ in range(self.draws.randint(0, most - 1))]
        ids.append(self.draws.randrange(2, VOCABULARY))  # padding alone may have equal logits
        if self.answered and self.draws.random() < 0.4:
            old: list[int] = self.draws.choice(self.answered)[1].token_ids.tolist()
            ids = [*old[: self.draws.randint(1, len(old))], *ids][: self.positions - 1]
        prompt = Prompt(f"train:{number % 3}", ids, f"prompt {number % 3}", {"answer": str(number)})
        names = [f"{number}-{index}" for index in range(self.draws.choice((1, 1, 2, 4)))]
        free = [request.id for request, _ in self.answered if request.id not in self.asked]
        names[0] = self.draws.choice([names[0], names[0], *free[-1:]])
        return [Request(id, prompt, self._sampling(), number, index) for index, id in enumerate(names)]

    def _sampling(self) -> Sampling:
        """Draw sampling options, of those that the engine has; stop strings are pieces of responses."""
        draw = self.draws.choice
        texts = [plain_text(self.bench, response(rollout)) for _, rollout in self.answered[-3:]]
        letters = "".join(letter for letter in "".join(texts) if letter not in OF_SPECIAL)
        starts = self.draws.sample(range(len(letters)), min(len(letters), draw((0, 0, 3))))
        options: dict[str, Any] = {
            **{name: draw(values) for name, values in DRAWN.items()},
            "max_response_tokens": draw((1, 4, 20, 40, 60, 200)),
            "stop_token_ids": tuple(self.draws.sample(range(VOCABULARY), draw((0, 0, 1, 3)))),
            "stop": tuple(letters[at : at + draw((1, 2))] for at in starts),
        }
        kept = {name: value for name, value in options.items() if self.bench.supported({name: value})}
        kept["max_support"] = draw((0, 8, 30)) if "support" in self.can else 0
        seed = self.draws.getrandbits(draw((8, 31, 50))) * 1000 + next(self.numbers)  # no seed twice
        return Sampling(**kept, log_probs=draw((True, True, False)), seed=draw((None, seed, seed)))

    def _take(self, rollouts: Sequence[Rollout]) -> None:
        """Check rollouts, each the only answer to its request."""
        for rollout in rollouts:
            asked = self.asked.pop(rollout.request_id, None)
            assert asked is not None, f"'{rollout.request_id}' came and is not in flight"
            request, versions = asked.request, self.versions[asked.since : asked.until]
            try:
                self.verifier.check(request, rollout, versions, asked.may_stop)
            except AssertionError as error:
                begun = request.begun.response_length if request.begun else 0
                about = f"prompt of {rollout.prompt_length} tokens, {begun} begun, {request.sampling}"
                raise AssertionError(f"'{rollout.request_id}' ({about}): {error}") from error
            self.answered.append((request, rollout))


def _broken(stream: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield the first three weights [D_1, D_2, ...], then raise an error."""
    yield from itertools.islice(stream, 3)
    raise RuntimeError("the stream broke off")


@contract(
    catches=(
        "padding tokens of a prompt left out",
        "a prompt read from its last end token on",
        "the beginning of prompts near the limit cut off",
        "a continued response sampled at temperature 1",
        "no support of more than sixteen tokens",
        "top-k above the vocabulary taken modulo its size",
        "nothing cut where no log-probs are asked for",
        "abort without effect in a pause",
        "requests added in a pause lost",
        "requests in flight lost in an update that breaks",
        "one version for all tokens of before",
    )
)
def any_workload_is_answered_right(bench: RolloutBench) -> None:
    """Random calls with random requests are answered as the reference says, each request once.

    Prompts and responses have any lengths and options, ids are used again, stopped responses are continued, and weights
    change meanwhile, as far as the spec's capabilities say. A request with a seed gets the same tokens alone.
    """
    for seed, rollout in ((1, {}), (4, STOPS), (7, STOPS)):
        _Workload(bench, seed, **rollout).run()
