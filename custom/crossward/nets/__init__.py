"""Backbones and building blocks that several methods use."""

from crossward.nets.resnet import ResNet, is_normalisation

__all__ = ["ResNet", "is_normalisation"]
