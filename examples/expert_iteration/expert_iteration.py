"""Expert iteration: sample, keep the best response of each group, learn it as supervised fine-tuning does."""

from engine_core import hookimpl
from engine_core.algorithms.objectives import with_weights
from engine_core.specs import SAMPLING_SECTIONS, SHARED_SECTIONS, TrainerSpec
from engine_core.train.sampled_run import SampledRun
from engine_core.types import LossCall


class ExpertIteration(SampledRun):
    def step(self, step):
        rollouts, metrics = self.rollouts(step)  # sampled, scored, through the stages
        best = {}
        for rollout in (r for r in rollouts if r.valid):
            if rollout.reward > best.setdefault(rollout.group_id, rollout).reward:
                best[rollout.group_id] = rollout
        metrics["expert/reward"] = sum(r.reward for r in best.values()) / max(len(best), 1)
        batch = with_weights(self.batch(list(best.values())), "token-mean")
        with self.phase("train"):
            metrics |= self.learn(batch, LossCall("nll"))
        return metrics | self.sync()  # the sampler has the new weights


@hookimpl
def engine_trainers():
    spec = TrainerSpec(
        load=ExpertIteration,
        sections=SHARED_SECTIONS | SAMPLING_SECTIONS,
        required=frozenset({"data", "reward"}),
    )
    return {"expert_iteration": spec}
