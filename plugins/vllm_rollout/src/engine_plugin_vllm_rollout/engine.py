"""The rollout engine ``vllm``: vLLM's engine in the process of the trainer.

Requests go in one by one and come back as they finish, while others still decode. Weights come from the trainer's
stream into the running model; nothing is compiled or captured again.
"""

from __future__ import annotations

import contextlib
import gc
import signal
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from engine_core.contracts.engines import Layout, RolloutEngine
from engine_core.contracts.weight_names import published
from engine_core.data import load_tokenizer
from engine_core.errors import ConfigError, DataError, did_you_mean
from engine_core.model_config import has_no_weights, load_hf_config
from engine_core.sampling import begun_ids, check_request
from engine_core.temporary_folder import TemporaryFolder
from engine_plugin_vllm_rollout.memory import Memory
from engine_plugin_vllm_rollout.memory_need import memory_need
from engine_plugin_vllm_rollout.plugin import VLLMOptions
from engine_plugin_vllm_rollout.ranks import check_ranks, layout_of
from engine_plugin_vllm_rollout.start import Place, architecture, prepare_environment, start

if TYPE_CHECKING:
    from engine_core.config import ModelConfig, RolloutConfig
    from engine_core.contracts.engines import WorkerContext
    from engine_core.contracts.memory import MemoryNeed, MemoryQuestion
    from engine_core.types import Request, Rollout
    from engine_plugin_vllm_rollout.adapter import AdapterUpdater
    from engine_plugin_vllm_rollout.weights import Updater

PAUSES = ("abort", "drain", "keep")
FALLBACK_POSITIONS = 8192  # of a model whose config does not say
STEPS = 8  # of vLLM in one ``step`` at most, where nothing finishes
HELD_BACK = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""The signals that wait while vLLM computes one token of each sequence."""


@contextlib.contextmanager
def whole() -> Iterator[None]:
    """Hold back the handlers of signals, of which some raise: a step of vLLM that is cut in two breaks its engine.

    A mask of this thread is not enough: another thread receives the signal, and Python calls the handler in this one.
    """
    if threading.current_thread() is not threading.main_thread():  # handlers run in the main thread only
        yield
        return
    received: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _: received.append(number)) for number in HELD_BACK
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for held in dict.fromkeys(received):
            signal.raise_signal(held)


class VLLMRolloutEngine(RolloutEngine):
    """A sampler that runs vLLM in this process."""

    @classmethod
    def memory_need(
        cls, config: RolloutConfig, model_config: ModelConfig, question: MemoryQuestion
    ) -> MemoryNeed | None:
        return memory_need(config.options or VLLMOptions(), model_config, question)

    @classmethod
    def check_pool(cls, config: RolloutConfig, role: str, processes: int) -> None:
        """Check the ranks of a pool; a judge must keep its weights.

        Raises:
            ConfigError: a judge gives its weights up, or the ranks do not fit.
        """
        options: VLLMOptions = config.options or VLLMOptions()
        if role == "judge" and options.sleep_level == 2:
            raise ConfigError(
                "reward.judge.vllm.sleep_level = 2 gives weights up until an update brings them, and a judge gets none. Set "
                "it to 1, which keeps them on the host."
            )
        table = "reward.judge" if role == "judge" else "rollout"
        check_ranks(config, options.tensor_parallel_size, processes, table)

    def __init__(self, config: RolloutConfig, model_config: ModelConfig, context: WorkerContext) -> None:
        super().__init__(config, model_config, context)
        self.options: VLLMOptions = config.options or VLLMOptions()
        self._table = "reward.judge" if context.role == "judge" else "rollout"  # for messages
        self.where = f"{self._table}.vllm"
        self._folder = TemporaryFolder("vllm-")  # tokenizer and config
        try:
            self._start()
        except BaseException:
            self._folder.remove()
            raise
        self._running: dict[str, Any] = {}  # Running, by our ids
        self._done: list[Rollout] = []  # finished while pausing, returned by the next step
        self._paused = False
        self._incomplete = ""  # why the weights are not those of one version
        self._updates = 0  # begun; part of what a cached prefix is found by
        self._random: Tensor | None = None  # state of torch's generator between two steps on a CPU

    @classmethod
    def load_libraries(cls) -> None:
        """Import vLLM, which takes as long as a large model takes to load."""
        prepare_environment()
        import vllm.v1.engine.llm_engine  # noqa: F401

    def _start(self) -> None:
        prepare_environment()
        from engine_plugin_vllm_rollout.adapter import AdapterUpdater
        from engine_plugin_vllm_rollout.weights import Updater, expected_shapes

        live = self.context.live or {}
        tokenizer: Any = live.get("tokenizer") or load_tokenizer(self.model_config)
        if tokenizer.eos_token_id is None:
            raise DataError("The tokenizer has no end-of-sequence token, so a response could never end.")
        module = live.get("model")
        if module is not None and self.options.adapter:
            raise ConfigError(
                f"{self.where}.adapter: vLLM reads the base from a folder, and the model was given from Python. Remove the "
                "key, or save the model and name the folder in model.path."
            )
        registered = self._registered()  # before the config is read, whose model type the hook may register
        hf_config = load_hf_config(self.model_config) if module is None else module.config
        self._tokenizer = tokenizer
        tokenizer.save_pretrained(self._folder.path)
        hf_config.save_pretrained(self._folder.path)  # vLLM looks for one next to the tokenizer, and waits
        text_config = hf_config.get_text_config()
        positions = self._positions(text_config)
        device = self.context.device
        self._full = self._tells_mass()
        head = {"head_dtype": "float32"} if self.options.fp32_head else {}
        self._llm = start(
            self._folder.path if module is not None else self.model_config.path,
            Path(self._folder.path),
            self.options,
            Place(
                device,
                self.context.seed,
                device.type == "cuda",
                positions,
                self._full,
                self.context.world_size,
            ),
            load_weights=module is None and not registered and self._reads_folder(),
            override=architecture(hf_config) | head | self.model_config.override | registered,
            trust_remote_code=self.model_config.trust_remote_code,
            key=self.where,
        )
        self._vocabulary = text_config.vocab_size
        self._room = self._llm.vllm_config.model_config.max_model_len
        self._updater: Updater | AdapterUpdater
        if self.options.adapter:
            self._updater = AdapterUpdater(self._llm)
        else:
            self._updater = Updater(self._llm, None if registered else expected_shapes(hf_config))
        self.memory = Memory(self._llm, self.options.sleep_level if device.type == "cuda" else 0)
        if module is not None:
            self._updater.take(published(module), 0)

    def _reads_folder(self) -> bool:
        """Return whether vLLM reads the folder's weights: not if a plugin maps them, as they may not fit before."""
        plugins: Any = self.context.plugins
        mapped = self.step_hooks is not None and plugins.overrides("engine_map_weights")
        return not has_no_weights(self.model_config.path) and (self.options.adapter or not mapped)

    def _registered(self) -> dict[str, Any]:
        """Return changes to the model's config for an architecture that a plugin registers with vLLM; empty without one.

        Raises:
            ConfigError: the run gives vLLM an adapter alone.
        """
        hooks = self.step_hooks
        changes = hooks and hooks.engine_register_model(
            sampler=self.config.backend, model_config=self.model_config, options=self.options
        )
        if changes and self.options.adapter:
            raise ConfigError(
                f"{self.where}.adapter: vLLM reads the base from the folder, and a plugin registers another architecture "
                "(engine_register_model), whose weights come with the updates. Remove the key."
            )
        return dict(changes or {})

    def _tells_mass(self) -> bool:
        """Whether log-probs of the whole distribution are returned in addition (key ``log_probs``)."""
        wanted = self.options.log_probs
        return wanted == "full" or (wanted == "auto" and bool(self.config.cutting))

    def _positions(self, config: Any) -> int:
        """Tokens of prompt and response together. Looked at before vLLM takes a minute to start."""
        wanted, held = self.options.max_model_len, getattr(config, "max_position_embeddings", None)
        response = self.config.max_response_tokens
        if wanted and response >= wanted:
            prompt = "the longest question" if self.context.role == "judge" else "data.max_prompt_tokens"
            raise ConfigError(
                f"{self.where}.max_model_len = {wanted} leaves no room for a prompt: {self._table}.max_response_tokens is "
                f"{response}. Set it to {prompt} and max_response_tokens together, or leave it out."
            )
        return int(wanted or held or FALLBACK_POSITIONS)

    # -- requests -----------------------------------------------------------

    @property
    def layout(self) -> Layout:
        return layout_of(self.options.tensor_parallel_size, self.context.rank, self.context.world_size)

    @property
    def num_unfinished(self) -> int:
        return len(self._running) + len(self._done)

    def add(self, requests: Sequence[Request]) -> None:
        """Queue requests: all of them, or none where one is malformed."""
        from vllm.inputs.engine import tokens_input

        from engine_plugin_vllm_rollout.requests import HOTTEST, sampling_params, too_long
        from engine_plugin_vllm_rollout.results import Running

        taken = {*self._running, *(rollout.request_id for rollout in self._done)}
        for request in requests:
            check_request(
                request,
                taken,
                self._vocabulary,
                self._room,
                holder="vLLM",
                instead=too_long(self._table),
                hottest=HOTTEST,
            )
            taken.add(request.id)
        for request in requests:
            ids = request.prompt.token_ids + begun_ids(request)
            params = sampling_params(
                request, self._room, self._vocabulary, self._full, self.options.per_request_seeds
            )
            given = tokens_input(ids, cache_salt=f"weights {self._updates}")
            internal = self._llm.add_request(request.id, given, params, lora_request=self._updater.request)
            self._running[request.id] = Running(request, internal)

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=False)
        return text

    def step(self) -> list[Rollout]:
        """Sample until a response finishes, at most ``STEPS`` tokens of each sequence.

        Raises:
            RuntimeError: the engine is paused, or a part of it sleeps.
            DataError: the weights are incomplete, because a stream broke off.
        """
        if self._paused:
            raise RuntimeError("The sampler is paused; call resume() first.")
        self._sample(STEPS)
        done, self._done = self._done, []
        return done

    def _sample(self, steps: int) -> None:
        """Until something finishes, which goes to ``_done``: so it is kept where a signal ends the step."""
        if not self._running:
            return
        self.memory.before_sampling()
        if self._incomplete:
            raise DataError(
                f"The sampler holds weights of two versions ({self._incomplete}). Update them again."
            )
        before = len(self._done)
        for _ in range(steps):
            with whole(), self._own_random():
                finished: Any = self._llm.step()
                self._done += self._ended([(o.request_id, o.outputs[0]) for o in finished])
            if len(self._done) > before or not self._running:
                break

    @contextlib.contextmanager
    def _own_random(self) -> Iterator[None]:
        """Leave torch's global random state alone, from which vLLM's CPU sampler draws also for requests with seeds."""
        if self.context.device.type != "cpu":
            yield
            return
        before = torch.get_rng_state()
        if self._random is not None:
            torch.set_rng_state(self._random)
        try:
            yield
        finally:
            self._random = torch.get_rng_state()
            torch.set_rng_state(before)

    def _ended(self, outputs: Sequence[tuple[str, Any]]) -> list[Rollout]:
        """The rollouts of requests that vLLM is done with. Args: their ids, and what was sampled."""
        from engine_plugin_vllm_rollout import versions
        from engine_plugin_vllm_rollout.requests import tells_mass
        from engine_plugin_vllm_rollout.results import rollout_of

        cut = [id for id, _ in outputs if tells_mass(self._running[id].request.sampling, self._full)]
        noted = versions.likeliest(self._llm, cut) if cut else {}
        return [
            rollout_of(self._running.pop(id), output, self.version, self._decode, noted.get(id))
            for id, output in outputs
        ]

    def abort(self, ids: Sequence[str]) -> list[Rollout]:
        from engine_plugin_vllm_rollout import versions

        wanted = dict.fromkeys(ids)
        # done, not yet returned
        stopped = [rollout for rollout in self._done if rollout.request_id in wanted]
        self._done = [rollout for rollout in self._done if rollout.request_id not in wanted]
        cut_short = []
        for id in wanted:
            if (running := self._running.get(id)) is None:
                continue
            cut_short.append((id, versions.partial_output(self._llm, running.internal_id).outputs[0]))
            self._llm.abort_request([running.internal_id], internal=True)
        return stopped + self._ended(cut_short)

    def pause(self, mode: str = "drain") -> None:
        """Stop sampling: ``drain`` finishes what is in flight, ``abort`` ends it, ``keep`` leaves it for ``resume``.

        Raises:
            ValueError: the mode is unknown.
        """
        if mode not in PAUSES:
            raise ValueError(f"Unknown pause mode '{mode}'." + did_you_mean(mode, PAUSES))
        if mode == "abort":
            self._done += self.abort(list(self._running))
        while mode == "drain" and self._running:
            self._sample(STEPS)
        self._paused = True

    def resume(self) -> None:
        self._paused = False

    # -- weights ------------------------------------------------------------

    @property
    def weight_dtype(self) -> torch.dtype | None:
        """Type of vLLM's weights, if they have one type and are not quantized."""
        from engine_plugin_vllm_rollout import versions

        return None if self.options.adapter else versions.weight_dtype(self._llm)

    def update_weights(self, stream: Iterable[tuple[str, Tensor]], version: int) -> str:
        """Replace the weights ``[D_1, D_2, ...]`` in place; return the checksum of the received ones.

        Responses in flight continue with the new weights, their prefix computed again; each token carries the version
        that it was sampled with. Cached prefixes belong to earlier weights: later requests carry another salt and do
        not find them, because clearing the cache takes as long as it has blocks, over a million for a small model.

        Raises:
            DataError: the stream does not fit the model. If some weights were already replaced, sampling is refused
            until a
                complete stream has come.
            RuntimeError: the weights sleep.
        """
        from engine_plugin_vllm_rollout import versions

        self.memory.before_update()
        before = self._incomplete
        self._updates += 1
        self._incomplete = f"an update to version {version} did not come to its end"
        try:
            checksum = self._updater.take(stream, version)
        except BaseException:
            if not self._updater.touched:
                self._incomplete = before
            raise
        for running in self._running.values():
            running.versions.append((versions.tokens_sampled(self._llm, running.internal_id), self.version))
        if self._running:  # they keep their salt, and would find what they have computed
            self._llm.reset_prefix_cache(reset_running_requests=True)
        self._incomplete, self.version = "", version
        self.memory.after_update()
        return checksum

    # -- device memory ------------------------------------------------------

    def sleep(self, keep: Sequence[str] = ()) -> None:
        """Release device memory as ``[rollout.vllm] sleep_level`` says; on a CPU the memory stays."""
        self.memory.sleep(keep)

    def wake(self, only: Sequence[str] | None = None) -> None:
        self.memory.wake(only)

    def close(self) -> None:
        """Free vLLM's memory. Requests that are left are dropped."""
        if self._llm is None:
            return
        from engine_plugin_vllm_rollout import versions

        self._running.clear()
        self._done.clear()
        versions.shut_down(self._llm)
        self._updater.close()
        del self._updater, self.memory
        self._llm = None  # type: ignore[assignment]
        self._folder.remove()
        gc.collect()
        if self.context.device.type == "cuda":
            torch.cuda.empty_cache()
