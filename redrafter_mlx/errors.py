"""Errors that a person can cause, each with one line that says what was wrong and what to do.

The command line prints that line and exits non-zero; a library caller catches `RedrafterError`.
Anything else that escapes is a defect of ours.
"""


class RedrafterError(Exception):
    """Base of every error that a user can cause; `str(error)` is one readable line."""


class BadInputError(RedrafterError, ValueError):
    """A parameter, prompt or file content that cannot be used."""


class ModelNotFoundError(RedrafterError):
    """No model of that name, repository or path."""


class DownloadError(RedrafterError):
    """A file could not be brought here; says what to run once the cause is gone."""


class DamagedFileError(RedrafterError):
    """A file on disk is truncated, has a wrong checksum, or lacks a tensor."""


class MismatchError(RedrafterError):
    """A drafter and a target that do not belong together."""


class ForkedProcessError(RedrafterError):
    """A process that was forked from one in which MLX was used."""


class UnsupportedModelError(RedrafterError):
    """A model whose decoding state a tree of drafts cannot share."""
