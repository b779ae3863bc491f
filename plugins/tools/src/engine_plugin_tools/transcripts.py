"""The messages of an episode with what took how long, as ``engine inspect rollouts`` and the report show them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine_core.types import Rollout


@dataclass(frozen=True)
class Entry:
    """A message of an episode."""

    role: str
    text: str
    facts: dict[str, Any] = field(default_factory=dict)  #: "turn", "tokens", "versions", "seconds", "calls"

    @property
    def note(self) -> str:
        """The facts in words: ``turn 2, 12 tokens, version 3 to 4, 0.52 s``."""
        parts = [f"turn {self.facts['turn']}"] if "turn" in self.facts else []
        if "tokens" in self.facts:
            first, last = self.facts["versions"]
            versions = f"version {first}" + (f" to {last}" if last != first else "")
            parts += [f"{self.facts['tokens']} tokens", versions]
        elif parts:
            parts.append("learned in another branch")
        for call in self.facts.get("calls", ()):
            failure = f" ({call['failure']})" if "failure" in call else ""
            parts.append(f"{call['name'] or 'unreadable call'}{failure} {call['seconds']:.3g} s")
        if "seconds" in self.facts:
            parts.append(f"{self.facts['seconds']:.3g} s")
        return ", ".join(parts)


def transcript(rollout: Rollout) -> list[Entry]:
    """Return the messages of an episode; a response without turns is one message without facts.

    Facts of the policy's turns are left out if the rollout does not say which tokens each turn has.
    """
    if not rollout.messages:
        return [Entry("assistant", rollout.text)]
    turns = _turns(rollout)
    known = len(turns) == sum(message["role"] == "assistant" for message in rollout.messages)
    found = []
    for message in rollout.messages:
        facts = turns.pop(0) if known and message["role"] == "assistant" else {}
        facts |= {name: message[name] for name in ("seconds", "calls") if name in message}
        found.append(Entry(message["role"], message["content"], facts))
    return found


def _turns(rollout: Rollout) -> list[dict[str, Any]]:
    """Return number, learned tokens and policy versions of each turn in a rollout's sequence."""
    numbers = rollout.extras.get("turns")
    if numbers is None:
        return []
    found = []
    for number in dict.fromkeys(numbers[numbers > 0].tolist()):
        learned = (numbers == number) & rollout.loss_mask
        facts: dict[str, Any] = {"turn": number}
        if bool(learned.any()):
            versions = rollout.policy_versions[learned]
            facts |= {"tokens": int(learned.sum()), "versions": [int(versions.min()), int(versions.max())]}
        found.append(facts)
    return found
