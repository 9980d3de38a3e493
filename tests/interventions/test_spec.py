"""Interventions as a shell spells them."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, Optional, Union

import numpy as np
import pytest
import torch

from hookscope import interventions
from hookscope.errors import UsageError, WeightsError
from hookscope.interventions import WORDS, InterventionSpec
from hookscope.interventions.base import Spelled
from hookscope.interventions.spec import read_direction
from tests.helpers import refused


def test_a_direction_is_a_single_finite_tensor_in_each_kind_of_file(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    direction = torch.tensor([1.0, -2.0])
    np.save(tmp_path / "a.npy", direction.numpy())
    torch.save(direction, tmp_path / "a.pt")
    torch.save({"direction": direction}, tmp_path / "a.anything")
    save_file({"direction": direction}, tmp_path / "a.safetensors")
    for path in tmp_path.iterdir():
        assert torch.equal(read_direction(str(path)), direction)
    torch.save({"a": torch.ones(1), "b": torch.ones(1)}, tmp_path / "two.pt")
    torch.save(torch.tensor([torch.nan]), tmp_path / "nan.pt")
    with pytest.raises(WeightsError, match="is not a single tensor; it holds 2: a, b"):
        read_direction(str(tmp_path / "two.pt"))
    with pytest.raises(WeightsError, match="holds NaN or Inf"):
        read_direction(str(tmp_path / "nan.pt"))


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("photo.png", b"no picture", "no direction in photo.png; give a .npy, .pt or .safetensors file"),
        ("notes", b"", "no direction in notes; give a .npy,"),
        ("a.pt", b"damaged, as it seems", "cannot read weights a.pt: damaged, incomplete or not a checkpoint"),
        ("a.npz", b"PK\x03\x04 cut off", "a.npz is not a NumPy file of numbers; save one with numpy.save"),
        ("a.npy", b"damaged, as it seems", "a.npy is not a NumPy file of numbers; save one with numpy.save"),
        ("a.png", None, "cannot read a.png: No such file or directory; name a file that exists"),
        ("a.pt", None, "cannot read a.pt: No such file or directory; name a file that exists"),
        ("a.npy", None, "cannot read a.npy: No such file or directory; name a file that exists"),
    ],
)
def test_files_without_a_direction_are_refused(
    name: str, content: bytes | None, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if content is not None:
        Path(name).write_bytes(content)
    with refused(WeightsError, says, part="begins"):
        read_direction(name)


EXAMPLES: dict[str, tuple[str, Any]] = {
    "dropblock": ("dropblock:p=0.2,block_size=3,when=always", interventions.DropBlock(0.2, 3, when="always")),
    "dropblock2d": (
        "dropblock2d:block_size=5,channels=0-2,7",
        interventions.DropBlock2d(block_size=5, channels="0-2,7"),
    ),
    "dropblock3d": ("dropblock3d:p=1", interventions.DropBlock3d(1)),
    "dropout": ("dropout:p=5e-1,when=train", interventions.Dropout(0.5)),
    "dropout2d": ("dropout2d:p=0", interventions.Dropout2d(0.0)),
    "zero": ("zero:channels=0-31,40,positions=0-9x5-14", interventions.Zero(channels="0-31,40", positions="0-9x5-14")),
    "scale": ("scale:factor=-2,on=input", interventions.Scale(-2, on="input")),
    "clamp": ("clamp: min = none , max = 6", interventions.Clamp(max=6)),
    "noise": ("noise:std=0.5,relative=yes", interventions.Noise(0.5, relative=True)),
    "mean": ("mean:over=positions", interventions.Mean(over="positions")),
    "permute": ("permute:axis=channels", interventions.Permute("channels")),
    "patch": ("patch:from=a.jpg,channels=1", None),
    "steer": ("steer:from=d.npy,scale=2", None),
    "quantize": ("quantize:bits=4,symmetric=TRUE,per_channel=0", interventions.Quantize(4, symmetric=True)),
    "prune": ("prune:amount=0.3,dim=0,norm=1", interventions.Prune(0.3, 0, 1)),
    "freeze": ("freeze", interventions.Freeze()),
}


def test_every_word_has_an_example_here_and_every_class_a_word() -> None:
    assert set(EXAMPLES) == set(WORDS)
    public = [getattr(interventions, name) for name in interventions.__all__]
    classes = {kind for kind in public if isinstance(kind, type) and issubclass(kind, Spelled)}
    assert set(WORDS.values()) == classes - {interventions.Intervention, interventions.ParameterIntervention}


@pytest.mark.parametrize("name", list(WORDS))
def test_an_example_of_each_and_its_defaults(name: str) -> None:
    text, made = EXAMPLES[name]
    spec = InterventionSpec.parse(text)
    assert (spec.text, spec.word) == (text, name)
    if name not in ("patch", "steer", "scale", "clamp"):
        assert InterventionSpec.parse(name).build() == WORDS[name]() == InterventionSpec.parse(f"{name}:").build()
    if made is not None:
        assert spec.build() == made and type(spec.build()) is WORDS[name] is spec.kind and spec.source is None
    else:
        assert (spec.from_file, spec.source) == {"patch": ("image", "a.jpg"), "steer": ("tensor", "d.npy")}[name]
        assert type(spec.build(torch.ones(2))) is WORDS[name]


@pytest.mark.parametrize("name", list(WORDS))
def test_the_word_has_the_parameters_of_its_class_and_no_others(name: str) -> None:
    with pytest.raises(UsageError) as caught:
        InterventionSpec.parse(f"{name}:nonsense=1")
    told = str(caught.value).partition(f"{name} has ")[2].split(";")[0]
    files = {"source": "from", "direction": "from"}
    fields = [files.get(field.name, field.name) for field in dataclasses.fields(WORDS[name])]
    assert told == (", ".join(fields) or "none")


SAMPLE = {
    "p": "0.25", "block_size": "5", "when": "always", "channels": "1,3-4", "positions": "0-1x2", "on": "input",
    "factor": "2.5", "min": "-1", "max": "4", "std": "0.5", "relative": "true", "over": "images", "axis": "images",
    "scale": "3", "bits": "6", "symmetric": "true", "per_channel": "true", "amount": "0.75", "dim": "1", "norm": "1",
}  # fmt: skip


@pytest.mark.parametrize("name", list(WORDS))
def test_each_parameter_arrives_as_its_class_takes_it(name: str) -> None:
    fields = [field.name for field in dataclasses.fields(WORDS[name]) if field.name not in ("source", "direction")]
    given = [f"{field}={SAMPLE[field]}" for field in fields]
    source = ["from=file"] if name in ("patch", "steer") else []
    built = InterventionSpec.parse(f"{name}:{','.join([*given, *source])}").build(torch.ones(1) if source else None)
    for field in fields:
        value = getattr(built, field)
        default = next(f.default for f in dataclasses.fields(WORDS[name]) if f.name == field)
        assert value != default or field == "over"
        if isinstance(value, bool):
            assert value is True
        elif isinstance(value, int | float):
            assert value == float(SAMPLE[field])


def test_str_of_an_intervention_is_parsed_to_the_same() -> None:
    for text, made in EXAMPLES.values():
        if isinstance(made, interventions.Intervention):
            shown = str(InterventionSpec.parse(text).build())
            inside = shown.partition("(")[2].rstrip(")")
            word = next(word for word, kind in WORDS.items() if kind is type(made))
            assert InterventionSpec.parse(f"{word}:{inside}").build() == made


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("dropblok:p=1", "no intervention 'dropblok'; nearest: dropblock"),
        ("", "no intervention ''; there are clamp, dropblock, dropblock2d,"),
        ("xyzzy", "no intervention 'xyzzy'; there are clamp, dropblock"),
        ("noise:sdt=1", "no parameter 'sdt' of noise; noise has channels, positions, on, std, relative; nearest: std"),
        ("clamp:0,6", "'0' is not PARAMETER=VALUE; clamp has"),
        ("noise:std", "std needs a value: std=0.1"),
        ("dropblock:p", "p needs a value: p=0.1"),
        ("dropblock:p=0.1, block_size", "block_size needs a value: block_size=7"),
        ("zero:channels", "channels needs a value: channels=0-31"),
        ("patch:from", "from needs a value: from=other.jpg"),
        ("noise:std=1,std=2", "'std' appears twice in 'noise:std=1,std=2'"),
        ("noise:std=a", "std='a' of noise is not a number"),
        ("noise:std=", "std='' of noise is not a number"),
        ("quantize:bits=2.5", "bits='2.5' of quantize is not a whole number"),
        ("noise:relative=maybe", "relative='maybe' of noise is not true or false"),
        ("dropblock:block_size=4", "block_size=4; give an odd number"),
        ("clamp:min=2,max=1", "a clamp from 2 to 1"),
        ("mean:over=positions,from=x", "a mean over positions takes no source"),
        ("patch", "patch needs from=FILE; such as patch:from=other.jpg"),
        ("steer:scale=2", "steer needs from=FILE"),
        ("patch:from=", "patch needs from=FILE"),
        ("freeze:p=1", "no parameter 'p' of freeze; freeze has none"),
    ],
)
def test_bad_text_is_refused_with_the_possible_values(text: str, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        InterventionSpec.parse(text)
    assert str(caught.value).startswith(says) and str(caught.value).count("nearest") == says.count("nearest")


@pytest.mark.parametrize("name", list(WORDS))
def test_the_example_in_an_error_is_a_valid_value(name: str) -> None:
    for field in dataclasses.fields(WORDS[name]):
        if field.name in ("source", "direction"):
            continue
        with pytest.raises(UsageError) as caught:
            InterventionSpec.parse(f"{name}:{field.name}")
        told = str(caught.value).partition("needs a value: ")[2]
        source = {"patch": ",from=a.jpg", "steer": ",from=a.npy"}.get(name, "")
        factor = ",factor=2" if name == "scale" and field.name != "factor" else ""
        ends = ",max=9" if name == "clamp" and field.name not in ("min", "max") else ""
        assert field.name in InterventionSpec.parse(f"{name}:{told}{source}{factor}{ends}").values


@pytest.mark.parametrize("name", ["other.jpg", "C:/a b.jpg", "a,b.jpg", "a,on", "a, b.jpg", "x#1.npy"])
def test_a_file_keeps_its_name(name: str) -> None:
    assert InterventionSpec.parse(f"patch:channels=0,from={name}").source == name
    assert InterventionSpec.parse(f"patch:from={name},channels=0").source == name


def test_defaults_of_the_caller_give_way_and_go_where_they_fit() -> None:
    assert InterventionSpec.parse("dropout:p=0.5").build(one_pass=True) == interventions.Dropout(0.5, when="always")
    assert InterventionSpec.parse("dropout:when=train").build(one_pass=True) == interventions.Dropout(when="train")
    assert InterventionSpec.parse("zero").build(one_pass=True) == interventions.Zero()


@pytest.mark.parametrize("text", ["mean", "permute:axis=images"])
def test_interventions_without_effect_on_one_image_are_refused(text: str) -> None:
    assert InterventionSpec.parse(text).build()
    with pytest.raises(UsageError, match="one image"):
        InterventionSpec.parse(text, one_image=True)
    for fine in ("mean:over=positions", "mean:from=folder", "permute"):
        InterventionSpec.parse(fine, one_image=True)


def test_a_class_with_a_word_is_parsed_by_its_types_and_in_the_help() -> None:
    @dataclasses.dataclass(frozen=True)
    class Toy(interventions.Intervention):
        size: Optional[int] = None  # noqa: UP045
        rate: Union[float, Callable[[int], float]] = dataclasses.field(default=0.5, metadata={"example": "0.25"})  # noqa: UP007

        word = "toy"
        summary = "does nothing"

    try:
        assert InterventionSpec.parse("toy:size=3,rate=2").build() == Toy(3, 2.0)
        assert InterventionSpec.parse("toy:size=none").build() == Toy()
        with pytest.raises(UsageError, match="size='a' of toy is not a whole number"):
            InterventionSpec.parse("toy:size=a")
        with pytest.raises(UsageError, match=r"rate needs a value: rate=0\.25"):
            InterventionSpec.parse("toy:rate")
        assert ("toy", "does nothing  [size rate=0.5]") in interventions.help_rows()
    finally:
        del WORDS["toy"]
