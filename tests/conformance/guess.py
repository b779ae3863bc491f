"""A one-file plugin with an environment that keeps the contracts of the kit, and some that break one each."""

import os
import random

import aiohttp

from engine_core import hookimpl
from engine_core.specs import Environment
from engine_plugin_agents import endpoint


async def guess(episode):
    answer = str(episode.prompt.columns["answer"])
    turn = await episode.sample(max_tokens=4)
    while turn.text.strip() != answer and episode.goes_on:
        episode.append(" No. ")
        turn = await episode.sample(max_tokens=4)
    return episode.rollout({"solved": float(turn.text.strip() == answer) + len(turn.text) / 100})


async def again(episode):
    await episode.sample(max_tokens=4)
    while episode.goes_on:
        episode.append_messages({"role": "user", "content": "Again."})
        await episode.sample(max_tokens=4)
    return episode.rollout({})


async def greedy_reader(episode):
    turn = await episode.sample(max_tokens=4)
    return episode.rollout({"solved": float(turn.text[1] == "4")})


async def dice(episode):
    await episode.sample(max_tokens=4)
    return episode.rollout({"solved": os.urandom(1)[0] / 255})


async def shared_dice(episode):
    await episode.sample(max_tokens=4)
    return episode.rollout({"solved": random.random()})


async def twice(episode):
    await episode.sample(max_tokens=4)
    episode.branches = [episode.rollout()]
    return episode.rollout({})


@endpoint
async def agent(row, base_url, api_key):
    """Continue a conversation in two directions."""
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {api_key}"}) as client:

        async def ask(*messages):
            body = {"messages": messages, "max_tokens": 4}
            async with client.post(f"{base_url}/chat/completions", json=body) as found:
                return (await found.json()).get("choices", [{"message": None}])[0]["message"]

        user = {"role": "user", "content": row["prompt"]}
        if (first := await ask(user)) and await ask(user, first, user):
            await ask(user, first, {**user, "content": "Else?"})
    return {"solved": float(len(first["content"])) if first else 0.0}


class Counter:
    def __init__(self):
        self.played = 0

    async def __call__(self, episode):
        await episode.sample(max_tokens=4)
        self.played += 1
        return episode.rollout({"solved": float(self.played)})


SCHEMA = {"type": "function", "function": {"name": "double", "description": "Doubles.", "parameters": {}}}


async def calculator(episode):
    turn = await episode.sample(max_tokens=4)
    while episode.goes_on and await episode.answer_calls(turn, {"double": lambda: 2}):
        turn = await episode.sample(max_tokens=4)
    return episode.rollout({})


@hookimpl
def engine_environments():
    made = {
        "guess": guess,
        "again": again,
        "greedy_reader": greedy_reader,
        "dice": dice,
        "shared_dice": shared_dice,
        "counter": Counter,
    }
    made |= {"twice": twice, "agent": agent}
    offered = {name: Environment(load=load, rewards=frozenset({"solved"})) for name, load in made.items()}
    return {**offered, "calculator": Environment(load=calculator, tools=(SCHEMA,))}
