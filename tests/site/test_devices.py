from __future__ import annotations

import pytest
import torch
from torch import nn

from crossward.site.devices import Device


def test_without_cuda_everything_is_float32_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    device = Device.best()
    assert device == Device(torch.device("cpu"), None)
    assert str(device) == "cpu, float32"
    weight = torch.ones(2, 2)
    with device.autocast():
        assert (weight @ weight).dtype == torch.float32
    assert not device.scaler().is_enabled()


@pytest.mark.parametrize(
    ("has_bfloat16", "half", "scaled"), [(True, torch.bfloat16, False), (False, torch.float16, True)]
)
def test_on_cuda_precision_follows_the_card(
    monkeypatch: pytest.MonkeyPatch, has_bfloat16: bool, half: torch.dtype, scaled: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: has_bfloat16)
    device = Device.best()
    assert device == Device(torch.device("cuda"), half)
    assert str(device) == f"cuda, {str(half).removeprefix('torch.')}"
    assert (device.half is torch.float16) == scaled


def test_autocast_uses_the_half_precision_that_was_chosen() -> None:
    with Device(torch.device("cpu"), torch.bfloat16).autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16


def test_a_wide_model_and_its_images_are_channels_last() -> None:
    model = nn.Conv2d(16, 16, 3)
    device = Device(torch.device("cpu"), None).take(model)
    assert model.weight.is_contiguous(memory_format=torch.channels_last)
    assert device.images(torch.randn(3, 16, 4, 4)).is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("channels", [(4, 32), (32, 4), (8, 16), (15, 32)])
def test_a_narrow_strided_shortcut_is_not_channels_last_on_the_cpu(channels: tuple[int, int]) -> None:
    """Its input must fill a block of the CPU's convolutions: 8 channels with AVX2, 16 with AVX-512."""
    model = nn.Sequential(nn.Conv2d(1, 32, 3), nn.Conv2d(*channels, 1, stride=2))
    device = Device(torch.device("cpu"), None).take(model)
    assert device.memory_format == torch.contiguous_format
    assert device.images(torch.randn(3, 2, 4, 4)).is_contiguous()


def test_images_keep_their_values() -> None:
    images = torch.randn(3, 2, 4, 4)
    assert torch.equal(Device(torch.device("cpu"), None).images(images), images)
