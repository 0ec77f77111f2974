"""JSON that people can read, and files of it by others, with one readable error for each."""

from __future__ import annotations

import json
from pathlib import Path

from redrafter_mlx.errors import DamagedFileError
from redrafter_mlx.runtime.files.regular_file import read_regular_text


def to_json(content: object, indent: int | None = None) -> str:
    """Return JSON with text as it is; with escapes if half a surrogate pair cannot be encoded.

    Raises ValueError for a number that is infinite or none, TypeError for what JSON cannot hold.
    """
    text = json.dumps(content, indent=indent, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(content, indent=indent)
    return text


def read_object(path: Path) -> dict[str, object]:
    """Return the JSON object in a file.

    Raises:
      FileNotFoundError: no such file
      DamagedFileError: in one line, naming the file, if it cannot be read or holds anything else
    """
    try:
        content = json.loads(read_regular_text(path))
    except FileNotFoundError:
        raise
    except OSError as error:
        raise DamagedFileError(f"{path} cannot be read: {error.strerror or error}") from error
    except RecursionError as error:
        raise DamagedFileError(f"{path} cannot be read: its JSON is nested too deeply") from error
    except ValueError as error:  # not UTF-8, not JSON, or a number of too many digits
        raise DamagedFileError(f"{path} cannot be read: {error!s:.200}") from error
    if not isinstance(content, dict):
        raise DamagedFileError(f"{path} holds no JSON object")
    return content
