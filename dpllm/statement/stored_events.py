"""Accounting events as fields of files: read once, when the file is read; a malformed one makes the file invalid."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import PlainSerializer, PlainValidator, WithJsonSchema

from dpllm.errors import ConfigError
from dpllm.privacy import events


def _event(value: Any) -> Any:
    try:
        return value if isinstance(value, events.Event) else events.read(value)
    except ConfigError as error:
        raise ValueError(str(error)) from None


def _steps(value: Any) -> Any:
    event = _event(value)
    try:
        events.step_of(event)
    except ConfigError as error:
        raise ValueError(str(error)) from None
    return event


_STORED = (
    PlainSerializer(lambda event: event.to_json()),
    WithJsonSchema({"type": "object", "additionalProperties": True}),
)
Event = Annotated[events.Event, PlainValidator(_event), *_STORED]
"""An accounting event, see ``dpllm.privacy.events``."""
RunEvent = Annotated[events.RunEvent, PlainValidator(_steps), *_STORED]
"""That of a run's steps."""
