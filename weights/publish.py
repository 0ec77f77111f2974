"""A drafter's folder onto the Hugging Face Hub, as one commit of the files that make it up.

HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE mean what they mean to huggingface-hub.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import CommitOperationAdd, HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError
from huggingface_hub.utils import logging as hub_logging
from huggingface_hub.utils._validators import validate_repo_id

from redrafter_mlx.errors import BadInputError, DamagedFileError, RedrafterError
from redrafter_mlx.weights.hub import ANSWER_TIMEOUT, hub_is_switched_off
from redrafter_mlx.weights.safetensors_header import read_safetensors_header

CONFIG, WEIGHTS, CARD = "config.json", "model.safetensors", "README.md"

FILES = (CONFIG, WEIGHTS, CARD, "loss.png", "accuracy.png", "metrics.jsonl")
"""What is uploaded; a folder's checkpoints and whatever else lies in it stay where they are."""

_LOG_IN = "log in with: hf auth login"
_LONGEST_REASON = 160


class UploadError(RedrafterError):
    """A folder could not be brought to the Hub; says what to do about it."""


@dataclass(frozen=True)
class Published:
    """What is on the Hub now.

    notes: lines that the user should see: what the Hub says of the card, or that there is none
    """

    url: str
    files: tuple[str, ...]
    notes: tuple[str, ...]


def publish(folder: Path, repo: str, *, private: bool, message: str) -> Published:
    """Upload the drafter in `folder` to the repository `user/name`, made if it is not there.

    All files go up in one commit, so that nobody ever fetches half of a new drafter with half of
    an old one.

    Raises:
      BadInputError: not a repository's name, or an empty message
      DamagedFileError: the folder's weights are missing or truncated; nothing was sent
      UploadError: not logged in, out of reach, not allowed, or broken off
    """
    _check_repo(repo)
    if not message.strip():
        raise BadInputError("the message is empty; leave it out or give some words")
    files = _files(folder)
    if hub_is_switched_off():
        raise UploadError(f"{repo} cannot be uploaded: HF_HUB_OFFLINE forbids it")
    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None, token=_token())
    with _quiet(), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        _check_existing(api, repo, private)
        try:
            url = api.create_repo(repo, private=private or None, exist_ok=True)
            additions = [CommitOperationAdd(name, folder / name) for name in files]
            api.create_commit(repo, additions, commit_message=message)
        except Exception as error:  # the HTTP client's and the storage's own classes differ
            raise UploadError(_explain(error, repo)) from error
    notes = [" ".join(str(w.message).split()) for w in warned if w.category is UserWarning]
    if CARD not in files:
        notes.append(f"{folder} holds no {CARD}, so {repo} has no model card")
    return Published(str(url), files, tuple(notes))


def _check_repo(repo: str) -> None:
    try:
        validate_repo_id(repo)
    except HFValidationError:
        valid = False
    else:
        valid = "/" in repo and repo.isascii()
    if not valid:
        raise BadInputError(
            f"the repository is {repo!r}; give user/name in letters, digits, '-', '_' and '.'"
        )


def _files(folder: Path) -> tuple[str, ...]:
    """Those of FILES that are there; raises DamagedFileError unless the weights are whole."""
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise DamagedFileError(f"{folder / name} is missing; a drafter's folder holds {name}")
    if not read_safetensors_header(folder / WEIGHTS).shapes:
        raise DamagedFileError(f"{folder / WEIGHTS} holds no tensors")
    return tuple(name for name in FILES if (folder / name).is_file())


def _token() -> str:
    """The user's token, from HF_TOKEN or where `hf auth login` left it."""
    try:
        token = get_token()
    except Exception as error:  # a login that has to be renewed, and was not
        raise UploadError(f"the login to the Hub failed: {_reason(error)}; {_LOG_IN}") from error
    if token is None:
        raise UploadError(f"you are not logged in to the Hub; {_LOG_IN}")
    return token


def _check_existing(api: HfApi, repo: str, private: bool) -> None:
    """One quick request: does the Hub answer, and may a repository of that name stay as it is?"""
    try:
        found = api.model_info(repo, timeout=ANSWER_TIMEOUT)
    except Exception as error:  # as above
        if isinstance(error, RepositoryNotFoundError) and _status(error) != 401:
            return
        raise UploadError(_explain(error, repo)) from error
    if private and found.private is False:
        raise UploadError(
            f"{repo} is there already and public; leave out --private, or make it private in its "
            f"settings on the Hub first"
        )


def _explain(error: Exception, repo: str) -> str:
    """One line of what went wrong and what to do."""
    status = _status(error)
    if status == 401:
        return f"the Hub does not accept your login; {_LOG_IN}"
    if status == 403 or isinstance(error, RepositoryNotFoundError):
        return (
            f"you may not write to {repo} on the Hub: is {repo.split('/')[0]} you, and has your "
            f"token write access? ({_reason(error)}); to change the token, {_LOG_IN}"
        )
    return f"{repo} could not be uploaded ({_reason(error)}); run the same command again later"


def _status(error: BaseException) -> int | None:
    """The HTTP status of an answer, None if there was none."""
    return error.response.status_code if isinstance(error, HfHubHTTPError) else None


def _reason(error: BaseException) -> str:
    """One short line; of a transfer that broke off, what broke it."""
    if isinstance(error, RuntimeError) and error.__cause__ is not None:
        return _reason(error.__cause__)
    said = str(error)
    if isinstance(error, HfHubHTTPError):
        said = (
            f"{error.response.status_code} {error.server_message or error.response.reason_phrase}"
        )
    text = " ".join(said.split()) or type(error).__name__
    return text if len(text) <= _LONGEST_REASON else text[: _LONGEST_REASON - 3] + "..."


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep huggingface-hub's log off the terminal: ours is the one line."""
    before = hub_logging.get_verbosity()
    hub_logging.set_verbosity_error()
    try:
        yield
    finally:
        hub_logging.set_verbosity(before)
