"""Accounting events as fields of files: read once, when the file is read; a malformed one makes the file invalid."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import PlainSerializer, PlainValidator, WithJsonSchema

from dpllm.errors import ConfigError
from dpllm.privacy import events


def stored_event(allowed: Callable[[Any], object] = bool) -> tuple[Any, ...]:
    """How an accounting event that is ``allowed`` stands in a file: read once, and a malformed one makes the file invalid."""

    def read(value: Any) -> Any:
        try:
            event = value if isinstance(value, events.Event) else events.read(value)
            if not allowed(event):
                raise ConfigError(f"{event.to_json()} is no event of what this is about.")
        except ConfigError as error:
            raise ValueError(str(error)) from None
        return event

    written = PlainSerializer(lambda event: event.to_json())
    return PlainValidator(read), written, WithJsonSchema({"type": "object", "additionalProperties": True})


Event = Annotated[events.Event, *stored_event()]
"""An accounting event, see ``dpllm.privacy.events``."""
RunEvent = Annotated[events.RunEvent, *stored_event(events.step_of)]
"""That of a run's steps."""
