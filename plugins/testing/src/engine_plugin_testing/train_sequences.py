"""Contracts of random sequences of calls: after each call, everything visible is that of a float64 reference.

The other contracts name a fault each. These find faults that show only after certain calls in a certain order. Sequences come
from a fixed list of seeds, so a failure is repeated exactly; its message has the seed and all calls so far.
"""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import TYPE_CHECKING, Any

from engine_plugin_testing.contracts import contract
from engine_plugin_testing.sequence_player import Game, Player
from engine_plugin_testing.train_adapters import LORA, takes_adapters

if TYPE_CHECKING:
    from engine_plugin_testing.train_bench import TrainBench

SEEDS = (4, 8, 3)  # with several ranks the first one alone
SHARES = (0.25, 1.0, 0.5)  # of the peak rate; neither the first nor the last is the largest
CALLS = ("infer", "save", "load", "sleep", "sleep", "mix", "set_token_budget", "read")
DECK = (
    *("infer", "backward", "step", "set_token_budget", "sleep", "load", "save") * 3,
    *("backward", "skip", "sleep", "mark", "mix", "set_lr", "scale", "read"),
)
"""Calls of an engine that is not trained, and of one that is; each in a random order."""


def _optim(bench: TrainBench, draws: Random) -> dict[str, Any]:
    """Draw the options of an optimizer; those of SGD have a rate and clipping alone."""
    found: dict[str, Any] = {"lr": 1e-2, "max_grad_norm": draws.choice((0.0, 0.5, 1.0))}
    if bench.settings["optimizer"] != "adamw" or bench.settings["gradients"]:
        return found
    return found | {
        "betas": draws.choice(((0.8, 0.95), (0.9, 0.999), (0.5, 0.9))),
        "eps": draws.choice((1e-6, 1e-3)),
        "weight_decay": draws.choice((0.1, 0.5)),
        "schedule": draws.choice(("constant", "linear", "cosine")),
        "warmup_steps": draws.choice((0, 2)),
        "decay_steps": draws.choice((0, 5)),
        "min_lr_ratio": draws.choice((0.1, 0.5)),
    }


def _play(game: Game, players: Mapping[Player, tuple[str, ...]]) -> None:
    """Play the calls of each player in a random order, then a step of those that train."""
    turns = [(player, name) for player, deck in players.items() for name in deck]
    game.draws.shuffle(turns)
    turns += [(player, "step" if player.engine.trainable else "infer") for player in players]
    calls: list[str] = []
    for player, name in turns:
        calls.append(f"{player.title}.{name}")
        try:
            player.play(name)
        except Exception as error:
            kind = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
            text = f"Seed {game.seed}, call {len(calls)} ({calls[-1]}): {kind}{error}\nCalls: {', '.join(calls)}."
            raise AssertionError(text).with_traceback(error.__traceback__) from error


@contract(
    catches=(
        "weight decay in a skipped step",
        "a late scale kept after a skipped step",
        "a copy of the weights that only a step replaces",
        "the temperature of the last infer in training",
        "a frozen engine that shares the weights of one that trains",
        "a wake that undoes a load",
        "moments saved as they were in the last sleep",
        "the token budget of the saved run brought back",
        "moments cleared by set_lr",
        "the loss mask of an earlier batch of the same lengths",
        "k3 of the opposite divergence",
        "sequences without loss tokens left out of the token budget",
        "groups split once the token budget was changed",
        "an infinite loss with a finite gradient is trained",
        "equal tokens behind other beginnings computed once",
        "a tensor of a stream read in the order of its memory",
        "a tensor of a stream in another type taken as numbers",
        "an automatic token budget of a few tokens",
        "dropped sequences counted in the divisor of seq-mean",
        "a group counted as one sequence in the divisor of seq-mean",
        "the betas of the saved run kept",
        "end tokens left out of the loss",
        "weights lost in a sleep of an engine asleep",
        "a late scale of calls that follow it",
        "a module that stays frozen once its borrower has failed",
        "parameters taken out of a loss",
    )
)
def random_sequences_of_calls_equal_the_reference(bench: TrainBench) -> None:
    """In random sequences of calls, weights, outputs, losses, norms and random state are always those of a float64 reference.

    Two engines that train and a frozen one take turns: they infer, add gradients of random losses, step, skip, save, load,
    sleep, lend their modules, take weights, and change rates and budgets. The two load each other's states, and differ in
    their options. Sequences are dropped or stay together; no micro-batch of several exceeds the budget, and weights of a loss
    are those of its aggregation's formula.
    """
    for seed in SEEDS if bench.place.world_size == 1 else SEEDS[:1]:
        game = Game(bench, seed, Random(seed), bench.reference())
        optim = _optim(bench, game.draws)
        grouped = seed == SEEDS[1]
        first = Player(game, "first", SHARES if grouped else (), optim=optim)
        path = None if first.lora else bench.model(seed=1)  # a state of an adapter needs its base
        # under coarse rounding alike: the first moment keeps roundings that a second one of other betas has forgotten
        varied = _optim(bench, Random(seed + 100)) if bench.precision < 0.01 else optim
        other = {**varied, "lr": 2 * optim["lr"]}
        other |= {"weight_decay": 0.0} if "weight_decay" in optim else {}
        second = Player(game, "second", SHARES[::-1] if grouped else (), optim=other, path=path, seed=1)
        frozen = Player(game, "frozen", trainable=False, role="ref")
        _play(game, {first: DECK, second: DECK, frozen: CALLS})


@contract(
    catches=(
        "the gap measured against old log-probs with bypass",
        "tokens that are not learned are trained",
        "sequence weights as geometric means",
        "rejection at a larger bound",
        "a mask forgotten where sequences are rejected",
        "a maximum over tokens that do not count",
        "an output without gradient because it is watched too",
        "the gap to the teacher with the wrong sign",
    )
)
def random_policies_equal_the_reference(bench: TrainBench) -> None:
    """For random options of the objective ``policy``, loss, metrics and gradients are those of its formulas in float64.

    Clips, correction, masks, rejection, bypass, KL, entropy and learned tokens are drawn, and token budgets.
    """
    game = Game(bench, SEEDS[0], Random(SEEDS[0]), bench.reference())
    player = Player(game, "policy", optim=_optim(bench, game.draws))
    for _ in range(3):
        for name in ("losses", "step"):
            player.play(name)


@contract(
    role="critic",
    catches=(
        "values divided by the temperature",
        "the value clip too wide",
        "the rate of the first group taken for the largest",
    ),
)
def random_sequences_of_a_critic_equal_the_reference(bench: TrainBench) -> None:
    """In a random sequence of calls, values, losses, norms and weights of a critic are always those of a float64 reference.

    If the engine calls ``engine_build_optimizer``, its optimizer has groups whose rates are shares of the peak.
    """
    module = bench.value_reference(bench.weights(bench.engine(role="critic")))
    if module is not None:
        game = Game(bench, SEEDS[0], Random(SEEDS[0]), module)
        player = Player(game, "critic", SHARES, role="critic", optim=_optim(bench, game.draws))
        _play(game, {player: DECK})
        player.play("losses")
        player.play("step")


@contract(
    capability="lora",
    package="peft",
    catches=("merged weights from before an adapter was loaded", "a state of the base before a new one"),
)
def random_sequences_of_an_adapter_equal_the_reference(bench: TrainBench) -> None:
    """In a random sequence of calls, an adapter, its merged weights, outputs and norms are always those of a float64 reference.

    The base, which outputs without the adapter show, changes only when a whole model is loaded. A state is loaded over its
    base; over another one it is refused, or brings its base back.
    """
    if takes_adapters(bench):
        game = Game(bench, SEEDS[0], Random(SEEDS[0]), bench.reference())
        optim = _optim(bench, game.draws)
        players = [Player(game, name, optim=optim, lora=LORA, seed=len(name)) for name in ("one", "other")]
        _play(game, dict.fromkeys(players, (*DECK, "new_base", "save", "load", "load")))
