"""Sound training runs are left in peace: no error, no warning, and the same weights as unwatched."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hookscope.findings import verdict
from hookscope.training import Monitor, findings_over_time, read_runs
from tests.helpers import same_values
from tests.training.healthy import frameworks
from tests.training.healthy.scripts import SCRIPTS
from tests.training.watched import validations

FRAMEWORKS = {"trainer": "transformers", "lightning": "lightning", "accelerate": "accelerate"}
FRAMEWORKS["segmentation"] = "segmentation_models_pytorch"
TRUE = {"fine_tuning": {"frozen"}, "masked_attention": {"non-finite"}, "convnext_with_sgd": {"update-too-large"}}
"""The notes that are right."""
LONG = ("fine_tuning", "convnext", "convnext_with_sgd", "super_resolution", "vae")
"""The others of their kind are shorter."""
ONCE = ("imagenet", "dcgan", "growing_accumulation")
"""Training them twice takes seconds; whether watching changes a weight is told by the others."""


def trained(name: str) -> nn.Module:
    if name in FRAMEWORKS:
        pytest.importorskip(FRAMEWORKS[name])
    torch.manual_seed(0)
    train = SCRIPTS.get(name) or getattr(frameworks, name)
    with torch.random.fork_rng():
        net: nn.Module = train()
    return net


@pytest.mark.filterwarnings("default")  # frameworks warn of what torch will change
@pytest.mark.parametrize(("between", "every"), [(nullcontext, 4), (validations, 50)])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in LONG)) for name in (*SCRIPTS, *FRAMEWORKS)]
)
def test_a_sound_run_has_no_error_and_no_warning(name: str, between: Any, every: int, tmp_path: Path) -> None:
    unwatched = trained(name) if between is nullcontext and name not in ONCE else None
    with between(), Monitor(every=every, log=tmp_path / "run.ndjson"):
        net = trained(name)
    assert unwatched is None or same_values(net, unwatched.state_dict())
    [run] = read_runs(tmp_path / "run.ndjson")
    findings = findings_over_time(run)
    assert [str(finding) for finding in findings if finding.severity != "note"] == []
    assert {finding.finding for finding in findings} == TRUE.get(name, set())
    assert verdict(findings).startswith("no errors and no warnings")
    losses = [row["loss"] for row in run.rows]
    assert losses[-1] < losses[0] or name == "dcgan"  # it did learn
