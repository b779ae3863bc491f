"""Loading of tokenizers, checks that a tokenizer fits the model, and its hash for checkpoints."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine_core.errors import NO_HUB, DataError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from engine_core.config.roles import ModelConfig

log = logging.getLogger("engine")

ROLES = ("bos", "eos", "pad")
HUB_SECONDS = 10.0  # until a hub that does not answer is given up


def load_tokenizer(model: ModelConfig, table: str = "model") -> PreTrainedTokenizerBase:
    """Load the tokenizer of ``[model]``: `tokenizer`, else `path`.

    Args:
        model: the table.
        table: the table's name in messages.

    Raises:
        DataError: the folder or hub name has no tokenizer, or the tokenizer does not load.
    """
    name = model.tokenizer or model.path
    key = "tokenizer" if model.tokenizer else "path"
    local = Path(name).expanduser()
    if not name:
        raise DataError(f"{table}.path: missing. Give a model folder or a hub name.")
    # A hub name is one or two words; anything else is a folder and is not looked up on the network.
    if not local.exists() and (local.is_absolute() or name[0] in ".~" or name.count("/") > 1):
        raise DataError(f"{table}.{key}: there is no folder '{name}'.")
    if not local.exists():
        use_cache_if_unreachable(name)
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            str(local) if local.exists() else name, trust_remote_code=model.trust_remote_code
        )
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().split("\n")[0]
        hint = "" if local.exists() else NO_HUB
        raise DataError(f"{table}.{key}: no tokenizer loads from '{name}': {reason}{hint}") from error


def use_cache_if_unreachable(name: str) -> None:
    """Ask the hub for a model, once; if nothing answers, use only cached files in this process and its children.

    The hub's client would try each file of a model again for 20 s.
    """
    import httpx
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError

    if constants.HF_HUB_OFFLINE:
        return
    try:
        HfApi().model_info(name, timeout=HUB_SECONDS)
    except HfHubHTTPError:  # an answer: no such model, or no access
        return
    except (httpx.HTTPError, OSError) as error:
        log.warning("The hub does not answer (%s): only cached files are used.", error)
        constants.HF_HUB_OFFLINE = True
        os.environ["HF_HUB_OFFLINE"] = "1"


def end_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Return the ids that end a response: those of the tokenizer and of the model's ``generation_config.json``."""
    path = Path(str(tokenizer.name_or_path)) / "generation_config.json"
    config = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    return {*_ids(tokenizer.eos_token_id), *_ids(config.get("eos_token_id"))}


def end_tokens(model: ModelConfig) -> tuple[int, ...]:
    """Return the ids with which a model ends a response, from its ``generation_config.json``; empty without such a file.

    Samplers end a response at the tokenizer's end of sequence alone, and some chat models end a turn with another token.
    """
    from transformers import GenerationConfig

    try:
        ends = GenerationConfig.from_pretrained(model.path).eos_token_id
    except OSError as error:
        log.info("Only the tokenizer's end token ends a response: %s", str(error).strip().split("\n")[0])
        return ()
    return tuple(ends) if isinstance(ends, list) else () if ends is None else (ends,)


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, hf_config: PretrainedConfig) -> list[str]:
    """Check that every id of the tokenizer has a row in the model's embedding.

    Args:
        tokenizer: the run's tokenizer.
        hf_config: the config of the model.

    Returns:
        Remarks that are no errors: end tokens that differ, a chat template without an end of sequence.

    Raises:
        DataError: ids do not fit; the message lists all problems.
    """
    config: Any = hf_config.get_text_config()
    size = int(config.vocab_size)
    problems = []
    vocabulary = tokenizer.get_vocab()
    if beyond := sorted((i, token) for token, i in vocabulary.items() if i >= size):
        first = ", ".join(f"{token!r} = {i}" for i, token in beyond[:3])
        problems.append(
            f"The tokenizer has ids up to {beyond[-1][0]}, but the model embeds ids 0 to {size - 1} "
            f"(vocab_size {size}): {len(beyond)} tokens have no embedding, such as {first}."
        )
    for owner, source in (("tokenizer", tokenizer), ("model's config", config)):
        problems += [
            f"The {owner} has {role}_token_id {i}, outside the model's ids 0 to {size - 1}."
            for role in ROLES
            for i in _ids(getattr(source, f"{role}_token_id", None))
            if not 0 <= i < size
        ]
    if tokenizer.eos_token_id is None:
        problems.append("The tokenizer has no end-of-sequence token, so a response could never end.")
    if problems:
        problems.append(
            "Use the tokenizer that belongs to the model ([model] tokenizer), or enlarge the model."
        )
        raise DataError("\n".join(problems))
    return _remarks(tokenizer, _ids(getattr(config, "eos_token_id", None)))


def tokens_differ(one: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> str:
    """Describe the first difference between the ids of two tokenizers; return "" if all ids mean the same tokens.

    Only ids are compared, not chat templates or the segmentation of text.
    """
    here, there = ({i: token for token, i in each.get_vocab().items()} for each in (one, other))
    different = [i for i in sorted(here | there) if here.get(i) != there.get(i)]
    if different:
        first = different[0]
        shown = [repr(tokens[first]) if first in tokens else "no token" for tokens in (here, there)]
        return f"{len(different)} of {len(here | there)} ids differ: id {first} is {shown[0]} here and {shown[1]} there"
    if one.eos_token_id != other.eos_token_id:
        return f"a sequence ends with id {one.eos_token_id} here and with {other.eos_token_id} there"
    return ""


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the SHA-256 of everything that determines token ids: vocabulary, merges, special tokens, chat template.

    A tokenizer and its saved and loaded copy have the same hash; padding and truncation settings of the
    last call are ignored.
    """
    if tokenizer.is_fast:
        backend: Any = tokenizer
        model = json.loads(backend.backend_tokenizer.to_str())
        model = {key: value for key, value in model.items() if key not in ("padding", "truncation")}
    else:
        model = tokenizer.get_vocab()
    special = {role: getattr(tokenizer, f"{role}_token_id", None) for role in ROLES}
    state = json.dumps([model, special, tokenizer.chat_template], sort_keys=True)
    return hashlib.sha256(state.encode()).hexdigest()


def _remarks(tokenizer: PreTrainedTokenizerBase, ends: list[int]) -> list[str]:
    end, remarks = tokenizer.eos_token_id, []
    if ends and end not in ends:
        remarks.append(
            f"The model's config ends sequences with {ends}, the tokenizer with {end} "
            f"({tokenizer.eos_token!r}); responses end with the tokenizer's."
        )
    template = str(tokenizer.chat_template or "")
    if template and "eos_token" not in template and str(tokenizer.eos_token) not in template:
        remarks.append(
            f"The chat template never writes the end of sequence ({tokenizer.eos_token!r} = {end}), so "
            "learned conversations do not teach when to stop."
        )
    return remarks


def _ids(value: Any) -> list[int]:
    """Return the ids of a config's field, which may be absent, one id or a list."""
    return [] if value is None else list(value) if isinstance(value, list | tuple) else [value]
