"""Devices that change while they are watched: what was read is forgotten, once for each change."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace

import fake_runtimes
import pytest
import torch

from tcport.device import live, nvidia_source
from tcport.device.live import State, Watcher, has_battery, watch
from tcport.errors import ArgumentError

GPU = torch.device("cuda", 0)
PLUGGED_IN, ON_BATTERY = State(24, 2.37e9, 115.0), State(24, 2.37e9, 55.0)


class Device:
    """Answers with a state that a test sets."""

    def __init__(self, state: State) -> None:
        self.state = state

    def read(self, device: torch.device) -> State:
        assert device == GPU
        return self.state


@pytest.fixture
def refreshes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    counted: list[int] = []
    monkeypatch.setattr(live, "refresh", lambda: counted.append(1))
    return counted


@pytest.mark.parametrize(
    ("later", "said"),
    [
        (ON_BATTERY, "power_limit 115 -> 55"),
        (State(24, 1.2e9, 115.0), "clock_hz 2.37e+09 -> 1.2e+09"),
        (State(14, 2.37e9, None), "compute_units 24 -> 14, power_limit 115 -> unknown"),
    ],
)
def test_each_change_is_told_once(later: State, said: str, refreshes: list[int]) -> None:
    device, told = Device(PLUGGED_IN), []
    watcher = Watcher([GPU], device.read, lambda *change: told.append(change))
    assert watcher.poll() == []
    device.state = later
    assert watcher.poll() == [GPU]
    assert watcher.poll() == []
    assert told == [(GPU, later)]
    assert len(refreshes) == 1
    assert PLUGGED_IN.differences(later) == said


def test_a_thread_looks_until_the_block_ends(refreshes: list[int]) -> None:
    device, changed = Device(PLUGGED_IN), threading.Event()
    with watch([GPU], 0.001, lambda device, state: changed.set(), device.read):
        device.state = ON_BATTERY
        assert changed.wait(30)
    assert refreshes
    assert not [thread for thread in threading.enumerate() if thread.name == "tcport-devices"]


@pytest.mark.parametrize("seconds", [0, -1, float("nan")])
def test_a_period_that_is_none_is_refused(seconds: float) -> None:
    with pytest.raises(ArgumentError, match="Give a positive number"), watch([], seconds=seconds):
        pass


def test_off_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(live.ENVIRONMENT_VARIABLE, raising=False)
    for battery, wanted in ((False, 0.0), (True, 5.0)):
        monkeypatch.setattr(live, "has_battery", lambda battery=battery: battery)
        assert live._wanted_seconds() == wanted
    for given, wanted in (("0", 0.0), ("2.5", 2.5)):
        monkeypatch.setenv(live.ENVIRONMENT_VARIABLE, given)
        assert live._wanted_seconds() == wanted
    monkeypatch.setenv(live.ENVIRONMENT_VARIABLE, "often")
    with pytest.raises(ArgumentError, match="'often' is no number"):
        live._wanted_seconds()


def test_a_battery_is_found(tmp_path: Path) -> None:
    for name, kind in (("AC", "Mains"), ("BAT0", "Battery")):
        assert not has_battery(tmp_path)
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "type").write_text(kind + "\n")
    assert has_battery(tmp_path)
    assert not has_battery(tmp_path / "absent")


def test_the_power_limit_is_in_watts() -> None:
    nvml = fake_runtimes.nvml_of_parent(known=("GPU-1",))
    nvml.nvmlDeviceGetEnforcedPowerLimit = lambda handle: 700_000
    assert nvidia_source.power_limit("1", nvml) == 700.0
    assert nvidia_source.power_limit("2", nvml) is None
    assert nvidia_source.power_limit(None, nvml) is None
    refuses = SimpleNamespace(**{**vars(nvml), "nvmlDeviceGetEnforcedPowerLimit": _refuse})
    assert nvidia_source.power_limit("1", refuses) is None


def _refuse(handle: str) -> int:
    raise fake_runtimes.NvmlError("no permission")
