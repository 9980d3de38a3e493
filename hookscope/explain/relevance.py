"""Layer-wise relevance propagation by the rules of zennit, on a copy of the model."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from hookscope.errors import InstallationError, ModelError
from hookscope.models import describe_error, is_quantized


@contextmanager
def relevance_rules(model: nn.Module) -> Iterator[nn.Module]:
    """A copy of ``model`` whose gradients are relevances, for a relevance of 1 at the score.

    Layer-wise relevance propagation (Bach et al., PLoS ONE 2015, doi:10.1371/journal.pone.0130140): the flat rule for
    the first layer, z+ for further convolutions, epsilon for linear layers. BatchNorm is merged into the convolution
    before it. Sums of branches share the relevance in torchvision's ResNets only.
    """
    try:
        from zennit.composites import EpsilonPlusFlat
        from zennit.torchvision import ResNetCanonizer
    except ImportError as error:
        raise InstallationError("lrp needs the package zennit", do="pip install 'hookscope[lrp]'") from error
    if is_quantized(model):
        raise ModelError(
            "zennit has no rules for layers of 8 bits", do="use a method without gradient: occlusion, rise"
        )
    composite = EpsilonPlusFlat(canonizers=[ResNetCanonizer()])
    try:
        twin = copy.deepcopy(model)
        composite.register(twin)
    except Exception as error:
        asked = f"zennit has no rules for {type(model).__name__}: {describe_error(error)}"
        raise ModelError(asked, do="use integrated-gradients, whose shares add up too") from error
    try:
        yield twin
    finally:
        composite.remove()
