"""Where a run computes."""

from __future__ import annotations

import torch

from safari.config import parse
from safari.engine.device import device_of


def test_a_gpu_has_its_number(monkeypatch):
    """As a tensor's device has: one without is equal to no tensor's, so that data on it would count as elsewhere."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    for wanted in ("cuda", "auto"):
        assert device_of(parse({"engine": {"device": wanted}})) == torch.device("cuda:3")
    assert device_of(parse({"engine": {"device": "cpu"}})) == torch.device("cpu")


def test_cuda_is_not_started_for_its_number(monkeypatch):
    def started():
        raise AssertionError("CUDA was started")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", started)
    assert device_of(parse({"engine": {"device": "cuda"}})) == torch.device("cuda:0")


def test_auto_without_a_gpu_is_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_of(parse({})) == torch.device("cpu")
