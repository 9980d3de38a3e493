"""Eight trained networks and 118 faults in them, collected before their author had read the rules of an inspection.

Do not tune a rule to one of these faults: they are a fair judge only while nobody does. Model and images give away 101
of the 117 faults that were first tried. Then 68 of these were among the first three places, 52 with the cause, and 62
as an error or a warning; before this, 44. A place that only carries the answer does not count, nor one that
the sound network has too.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from hookscope import HookscopeError, inspect, load_model
from hookscope.inspection import Place
from hookscope.models import LoadedModel
from tests.inspection.collection.faults import FAULTS, Fault
from tests.inspection.collection.nets import NETS, RECIPES, build, raw, trained
from tests.inspection.collection.pictures import pictures

pytestmark = pytest.mark.slow

Load = Callable[..., LoadedModel]
SOUND = Fault("sound", "", "")
# How many visible faults of each network are found at least, and found with their cause: one less than measured.
LEAST = {
    "preact": (13, 7),
    "incept": (7, 6),
    "flat": (9, 8),
    "dense": (8, 6),
    "vitc": (8, 7),
    "vitm": (4, 2),
    "seg": (11, 7),
    "wsse": (5, 3),
}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Load:
    """Trains a network when it is first asked for, and loads its weights as a user would."""
    folder = tmp_path_factory.mktemp("weights")

    def load(name: str, fault: Fault = SOUND) -> LoadedModel:
        weights = folder / f"{name}.pt"
        if not weights.exists():
            net, right = trained(name)
            assert right > (0.7 if name == "preact_b" else 0.95)
            torch.save(net.state_dict(), weights)
        source, prepare = f"{build.__code__.co_filename}:build(name='{name}')", partial(_prepared, fault, name)
        return load_model(source, weights=str(weights), device="cpu", preprocess=prepare)

    return load


def _layer(place: Place) -> str:
    """The layer that a place is about, without the call, the part and the parameter."""
    layer = re.sub(r"#\d+", "", place.layer).replace("(model)", "").replace("(whole)", "").replace("(input)", "input")
    layer = layer.split("::")[0].split(" ")[0]
    return re.sub(r"\.(weight|bias|running_mean|running_var|num_batches_tracked)$", "", layer).strip(".:")


def _is_right(layer: str, right: Sequence[str], net: nn.Module) -> bool:
    """Whether it is a right layer, in one, or the block around one, if the block is at most a third of the network."""
    leaves = [name for name, module in net.named_modules() if not list(module.children())]
    inside = sum(name.startswith(f"{layer}.") for name in leaves)
    around = bool(layer) and inside <= max(1, len(leaves) // 3)
    return any(
        layer == place or (place and layer.startswith(f"{place}.")) or (around and layer == place.rpartition(".")[0])
        for place in right
    )


def _prepared(fault: Fault, name: str, picture: Image.Image) -> Tensor:
    return fault.prepare(raw(picture, name), name)


@pytest.mark.parametrize("count", [1, 8, 16])
@pytest.mark.parametrize("name", [*NETS, "flat_b", "vitc_b"])
def test_a_sound_network_has_only_notes(name: str, count: int, loaded: Load) -> None:
    places = inspect(loaded(name), pictures(RECIPES[name].task, count, 120 + count)).places
    assert [place for place in places if place.severity != "note"] == []


@pytest.mark.filterwarnings("ignore::hookscope.errors.OutputNote")  # some faults end in a softmax
@pytest.mark.parametrize("name", NETS)
def test_faults_are_found(name: str, loaded: Load) -> None:
    sound, shown = loaded(name), pictures(RECIPES[name].task, 8, 21)
    usual = {(place.kind, _layer(place)) for place in inspect(sound, shown).places}
    found, named, misses = 0, 0, []
    for fault in (fault for fault in FAULTS[name] if fault.visible):
        net = fault.planted(sound.model, loaded(f"{name}_b").model if fault.other else None)
        planted = replace(loaded(name, fault), model=net, checkpoint="")
        torch.manual_seed(0)
        try:
            first = inspect(planted, [fault.picture(picture) for picture in shown]).places[:3]
        except HookscopeError as error:
            misses.append(f"{fault.name}: {error}")
            continue
        right = [place for place in first if _is_right(_layer(place), fault.right(name), net)]
        told = [place for place in right if place.kind != "carries-answer" and (place.kind, _layer(place)) not in usual]
        causes = [place for place in told if re.search(fault.words, f"{place.kind} {place.reason}", re.IGNORECASE)]
        found, named = found + bool(told), named + bool(causes)
        if not causes:
            said = "; ".join(f"{place.severity} {place.kind} @ {place.layer}" for place in first)
            misses.append(f"{fault.name}{' without its cause' if told else ''}: {said or 'no places'}")
    assert found >= LEAST[name][0] and named >= LEAST[name][1], "\n".join([f"{found} found, {named} named", *misses])
