"""Here calibration itself is tested, and computed whenever it is asked for."""

from __future__ import annotations

import pytest

from dpllm.privacy import accounting


@pytest.fixture(autouse=True)
def _calibrated_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accounting, "_calibrate", accounting._calibrate.__wrapped__)
