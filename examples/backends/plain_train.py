"""A train engine from the contract alone: one process, one sequence at a time."""

from concurrent.futures import Future

import torch

from engine_core import hookimpl
from engine_core.algorithms.objectives import resolve_loss
from engine_core.contracts.engines import TrainEngine
from engine_core.contracts.weight_names import own_weights
from engine_core.errors import ConfigError, DataError
from engine_core.metrics import merge
from engine_core.packing import plan_micro_batches
from engine_core.runs.state_files import load_json, load_tensors, save_json, save_tensors
from engine_core.specs import TrainBackend
from engine_core.types import StepOutput, TrainOutput
from engine_plugin_torch.export import write_model
from engine_plugin_torch.log_probs import OUTPUTS, columns_at, gather_outputs, zero_outputs
from engine_plugin_torch.model_loading import load_model
from engine_plugin_torch.optimizers import build_optimizer, set_peak_lr
from engine_plugin_torch.state import load_optimizer_state, optimizer_state
from engine_plugin_torch.weights import published_weights, take_weights, to_own_names


class PlainTrain(TrainEngine):
    def __init__(self, config, model_config, context, *, trainable=True):
        super().__init__(config, model_config, context, trainable=trainable)
        self.module, self.optimizer, self.lr_scheduler = self._build_model_optimizer(
            model_path=model_config.path,
            engine_config=config.options,
            optim_config=config.optim if trainable else None,
            override_model_config=model_config.override,
            role=context.role,
        )
        self.set_token_budget(config.max_tokens_per_rank)

    def _build_model_optimizer(self, *, optim_config, role, **_):
        module = load_model(self.model_config, self.context.device, torch.float32).eval()
        if optim_config is None:  # a role that is not trained
            return module, None, None
        return module, *build_optimizer(module, optim_config, self.context.total_steps, role)

    def set_token_budget(self, tokens):
        self.budget = 8192 if tokens == "auto" else tokens

    def outputs(self, batch, grad, watched=()):
        """Return the outputs of a batch, [T] or [T, K]; those in ``grad`` have a gradient."""
        found = zero_outputs((*grad, *watched), batch, self.context.device)
        for number, start in enumerate(batch.offsets.tolist()[: len(batch)]):
            sequence = batch.select([number])
            learned = sequence["loss_mask"].clone()
            learned[0] = False  # nothing is before the first token
            places = learned.nonzero()[:, 0]
            ids = sequence.token_ids.to(self.context.device)
            logits = self.module(input_ids=ids[None]).logits[0]
            values = gather_outputs(
                lambda rows: rows.float(),
                logits[places - 1],
                ids[places],
                temperature=batch.temperature,
                chunk=256,
                grad=grad,
                watched=watched,
                columns=columns_at(places, found, sequence),
                top_k=batch.top_k,
            )
            for name, whole in found.items():
                found[name] = whole.index_put((start + places,), values[name].to(whole.dtype))
        return found

    @torch.no_grad()
    def infer(self, batch, outputs, adapter=True):
        if unknown := set(outputs) - set(OUTPUTS):
            raise ValueError(f"Unknown outputs {sorted(unknown)}. Known: {sorted(OUTPUTS)}.")
        return {name: value.cpu() for name, value in self.outputs(batch, (), outputs).items()}

    def forward_backward(self, batch, loss):
        self.need_optimizer()
        objective, total, metrics = resolve_loss(loss, self.context.plugins), 0.0, {}
        together = None if batch.keep_together is None else batch.keep_together.tolist()
        plan = plan_micro_batches(batch.lengths.tolist(), self.budget, together)
        for indices in plan:
            micro = batch.select(indices)
            value, measured = objective(self.outputs(micro, tuple(loss.outputs), tuple(loss.watched)), micro)
            if value.requires_grad:
                value.backward()
            total += float(value.detach())
            merge(metrics, {name: float(metric) for name, metric in measured.items()})
        return TrainOutput(total, metrics, len(plan))

    def optimizer_step(self):
        self.need_optimizer()
        trained = [p for group in self.optimizer.param_groups for p in group["params"]]
        for p in trained:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        norm = float(torch.stack([p.grad.double().norm() for p in trained]).norm())
        lr, skipped = (
            max(group["lr"] for group in self.optimizer.param_groups),
            norm != norm or norm == torch.inf,
        )
        if not skipped:
            if norm > self.config.optim.max_grad_norm > 0:
                for p in trained:
                    p.grad *= self.config.optim.max_grad_norm / norm
            self.optimizer.step()
            self.lr_scheduler.step()
        self.optimizer.zero_grad()
        return StepOutput(grad_norm=norm, lr=lr, skipped=skipped)

    def need_optimizer(self):
        if self.optimizer is None:
            raise ConfigError(f"The role '{self.context.role}' is not trained.")

    def named_weights(self, to="all", adapter=False):
        yield from published_weights(self.module)

    def load_named_weights(self, stream, mix=1.0):
        take_weights(self.module, to_own_names(self.module, stream), mix)

    def save(self, folder):
        folder.mkdir(parents=True, exist_ok=True)
        tensors, settings = {"random": torch.get_rng_state()}, {}
        if self.optimizer is not None:
            state, settings["optimizer"] = optimizer_state(self.optimizer, self.module)
            tensors |= state
            schedule = self.lr_scheduler.state_dict().items()
            settings["schedule"] = {name: value for name, value in schedule if name != "lr_lambdas"}
        save_tensors(folder / "training.safetensors", tensors)
        save_tensors(
            folder / "model.safetensors", {n: w.clone() for n, w in own_weights(self.module).items()}
        )
        save_json(folder / "training.json", settings)
        done = Future()
        done.set_result(None)
        return done

    def load(self, folder):
        settings, weights = load_json(folder / "training.json"), load_tensors(folder / "model.safetensors")
        tensors = load_tensors(folder / "training.safetensors")
        own = {name: weight.shape for name, weight in own_weights(self.module).items()}
        if own != {name: weight.shape for name, weight in weights.items()}:
            raise DataError(f"{folder}: these are the weights of another model.")
        if self.optimizer is not None and "optimizer" not in settings:
            raise DataError(f"{folder} has no optimizer: a role that is not trained has written it.")
        take_weights(self.module, weights.items())
        torch.set_rng_state(tensors.pop("random"))
        if self.optimizer is not None:
            load_optimizer_state(self.optimizer, self.module, tensors, settings["optimizer"])
            nothing = [None] * len(self.optimizer.param_groups)
            self.lr_scheduler.load_state_dict(settings["schedule"] | {"lr_lambdas": nothing})
            set_peak_lr(self.optimizer, self.lr_scheduler, self.config.optim.lr)  # the run file's

    def export(self, folder, adapter=False):
        write_model(folder, self.module, self.named_weights())


@hookimpl
def engine_train_engines():
    return {"plain_train": TrainBackend(load=PlainTrain)}
