"""What an inspection recorded, before places are found in it."""

from collections.abc import Sequence
from typing import Any
from unittest import mock

from torch import nn

from hookscope.inspection import run
from hookscope.inspection.facts import InspectionEvidence
from hookscope.models import LoadedModel, WeightsMetadata


def evidence_of(net: LoadedModel | nn.Module, images: Sequence[Any], **options: Any) -> InspectionEvidence:
    kept: list[InspectionEvidence] = []
    if isinstance(net, nn.Module):
        net = LoadedModel.of(net, "net", "trained.pth", WeightsMetadata())
    with mock.patch.object(run, "find_places", lambda evidence: kept.append(evidence) or ()):
        run.inspect(net, images, **options)
    return kept[0]
