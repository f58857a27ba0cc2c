"""The Hugging Face Hub's answers as errors of dpllm.

Comes in: calls of huggingface_hub, within ``asking``. Goes out: what they return, or one line about why not. Must not be
imported where nobody asked for the Hub.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

from huggingface_hub import constants
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from dpllm.errors import ConfigError, DpllmError

# httpx in huggingface_hub 1, httpx2 in 2: the class of everything that goes wrong on the way.
_ON_THE_WAY = cast(type[Exception], HfHubHTTPError.__bases__[0])
_UNKNOWN = (401, 403, 404)


def endpoint() -> str:
    """Where the Hub is: HF_ENDPOINT, or the public one."""
    return os.environ.get("HF_ENDPOINT") or str(constants.ENDPOINT)


@contextmanager
def asking(repository: str) -> Iterator[None]:
    """Whatever goes wrong inside is said in one line.

    Args:
        repository: What is asked for.

    Raises:
        ConfigError: The Hub allows no such name, or does not know or give the repository.
        DpllmError: The Hub cannot be reached, or refuses.
    """
    try:
        yield
    except HFValidationError:
        raise ConfigError(
            f"{repository}: is no name that the Hub allows, so nothing was asked. Type OWNER/NAME, such as alice/notes-dp."
        ) from None
    except (_ON_THE_WAY, OSError) as error:
        answer = getattr(getattr(error, "response", None), "status_code", None)
        if answer is None:
            raise DpllmError(
                f"{repository}: {endpoint()} cannot be reached ({type(error).__name__}), so nothing was read or changed there. "
                "Check the network and HF_HUB_OFFLINE, and type the command again."
            ) from None
        raise (ConfigError if answer in _UNKNOWN else DpllmError)(
            f"{repository}: {endpoint()} answered {answer}, so it is not there for you. Check the name and the revision, log in "
            "with hf auth login if it is private, and type the command again."
        ) from None
    except ValueError as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise DpllmError(
            f"{repository}: {endpoint()} refused ({first}), so nothing was changed there. Mend that, and type the command again."
        ) from None
