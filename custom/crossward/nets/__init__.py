"""Backbones and building blocks that several methods use."""

from crossward.nets.alexnet import AlexNet
from crossward.nets.layers import Backbone, is_normalisation
from crossward.nets.resnet import ResNet

__all__ = ["AlexNet", "Backbone", "ResNet", "is_normalisation"]
