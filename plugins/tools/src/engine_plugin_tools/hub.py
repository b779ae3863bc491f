"""Upload a folder to a repository of the Hugging Face hub, with errors that say what to do.

Requests, tokens, retries and the transfer of large files are those of huggingface_hub. The token is that of its login
(``hf auth login``) or of HF_TOKEN; it is in no file of a run.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from engine_core.errors import ConfigError, EnvironmentProblem

CARD = "README.md"
LOG_IN = (
    "Log in with 'hf auth login', or set HF_TOKEN, with a token from https://huggingface.co/settings/tokens"
)
STALE = ["model*.safetensors", "model.safetensors.index.json", "adapter_*"]
"""Files of an earlier model, which would be loaded in place of the new one or together with it."""


@dataclass(frozen=True)
class Target:
    """A model repository of the hub.

    Args:
        name: ``user/name``.
        private: whether it must be private.
        branch: the branch to commit to; None: main.

    Raises:
        ConfigError: the hub does not allow such a name.
    """

    name: str
    private: bool = False
    branch: str | None = None

    def __post_init__(self) -> None:
        from huggingface_hub.errors import HFValidationError
        from huggingface_hub.utils import validate_repo_id

        if self.name.count("/") != 1:
            raise ConfigError(
                f"'{self.name}' is no name of a repository. Write USER/NAME, such as me/my-model."
            )
        try:
            validate_repo_id(self.name)
        except HFValidationError as error:
            raise ConfigError(f"'{self.name}' is no name of a repository: {error}") from error

    def __str__(self) -> str:
        branch = f", branch {self.branch}" if self.branch else ""
        return f"{self.name}{branch}{', private' if self.private else ''}"

    def prepare(self) -> None:
        """Check the token and create the repository and its branch where they are missing.

        Raises:
            ConfigError: no or a wrong token, no right to write, or a public repository that must be private.
            EnvironmentProblem: the hub cannot be reached.
        """
        from huggingface_hub import HfApi, get_token
        from huggingface_hub.errors import RepositoryNotFoundError

        if get_token() is None:
            raise ConfigError(f"No token for the Hugging Face hub. {LOG_IN}.")
        api = HfApi()
        with self._explaining("Nothing was uploaded."):
            api.whoami()
            try:
                found = api.model_info(self.name)
            except RepositoryNotFoundError:
                found = None
            if found is not None and self.private and not found.private:
                raise ConfigError(
                    f"--private: '{self.name}' exists and is public. Change it on its page first."
                )
            if found is not None:
                said = f"engine: '{self.name}' exists: this adds a commit and replaces the weights of its newest one."
                print(said, file=sys.stderr)
            api.create_repo(self.name, private=self.private or None, exist_ok=True)
            if self.branch is not None:
                api.create_branch(self.name, branch=self.branch, exist_ok=True)

    def upload(self, folder: Path, message: str) -> str:
        """Upload a folder in one commit, without the weights of an earlier model; return the URL of the commit.

        Args:
            folder: the exported model.
            message: first line of the commit.

        Raises:
            ConfigError: the hub refuses the upload. Nothing was published.
            EnvironmentProblem: the connection broke before the hub confirmed the commit.
        """
        from huggingface_hub import HfApi

        retry = (
            "The hub confirmed no commit: nothing was published. Run the command again; what the hub holds is not sent twice. "
            "To export only once: 'engine export RUN OUT --card', then 'engine push OUT USER/NAME'."
        )
        with self._explaining(retry):
            commit = HfApi().upload_folder(
                repo_id=self.name,
                folder_path=folder,
                commit_message=message,
                revision=self.branch,
                delete_patterns=STALE,
            )
        return str(commit.commit_url)

    @contextlib.contextmanager
    def _explaining(self, state: str) -> Iterator[None]:
        """Raise errors of the hub and of the connection as errors that say what happened, then ``state``."""
        import httpx
        from huggingface_hub.errors import HfHubHTTPError

        try:
            yield
        except (HfHubHTTPError, httpx.TransportError, ConnectionError, RuntimeError, ValueError) as error:
            # The upload of a large file raises a RuntimeError from its reason.
            cause = error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ else error
            if isinstance(cause, HfHubHTTPError):
                status = cause.response.status_code
                kind = ConfigError if status < 500 else EnvironmentProblem
                raise kind(f"{self._refusal(status, cause.server_message)} {state}") from error
            kind = ConfigError if isinstance(cause, ValueError) else EnvironmentProblem
            raise kind(f"{self.name}: {_sentence(cause)} {state}") from error

    def _refusal(self, status: int, server_message: str | None) -> str:
        """Return what the hub's answer means, with its own words, and what to do."""
        answer = f"The hub answered {status}"
        if server_message:
            answer += f" ({' '.join(server_message.split())})"
        fixes = {
            401: f"it does not accept the token. {LOG_IN}.",
            403: f"the token has no right to write to '{self.name}'. Check the name, or {LOG_IN[0].lower()}{LOG_IN[1:]} "
            "that may write there.",
            404: f"'{self.name}' does not exist, or the token cannot see it.",
        }
        return f"{answer}: {fixes[status]}" if status in fixes else f"{answer}."


def _sentence(error: BaseException) -> str:
    """Return the message of an error on one line, with a full stop."""
    return (
        " ".join(str(error).split()).rstrip(".") + "." if str(error).strip() else f"{type(error).__name__}."
    )
