"""From where on something in a training run is a finding. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

from hookscope.findings import default


@dataclass(frozen=True, slots=True)
class TrainingThresholds:
    """From where on something in a training run is a finding.

    Attributes:
        patience: How many sampled steps in a row must show it; of fewer, all. One batch proves little: a channel
            rests, a batch is odd. What is not finite, and a gradient that explodes, need no second look, an
            update that is too large needs one.
        dead: Share of a layer's channels that are 0 for the whole batch, 0 to 1. Behind a
            BatchNorm none was seen (resnet18, nets of 3 layers); in such nets without one, while they learned with a
            rate that is too large for some channels, 25 % to 75 %.
        few_values: Values of a channel in the batch (images times positions) below which it may rest by chance; units
            of a linear layer have one an image.
        dead_of_few: The share that takes the place of ``dead`` there. In small sound nets up to 40 % were seen.
        vanishing: Norm of a layer's gradient over the norm of its weight, below which it vanishes; that of
            `GradientThresholds`, which tells where it comes from.
        exploding: The same ratio, above which it explodes; from there too.
        too_large: Norm of an update over the norm of the weight. The usual ratio is about 1e-3, in the
            first steps of sound runs up to 0.2 (resnet18, momentum 0.9); at 0.3 three steps replace the weight.
        too_small: The same, below which nothing is learned: a million such steps, all one way, make one weight.
        flat: Spread of an activation over its root mean square, below which it is constant: about ten times the
            epsilon of single precision.
        smallest: Root mean square of an activation below which it vanishes, as in `Thresholds`: the
            smallest normal number of half precision.
        largest: Root mean square above which it explodes: the largest number of half precision.
        slope: Mean slope of a sigmoid or tanh, as a share of its steepest, below which it is saturated; 1 % from a
            bound the slope is 4 % (sigmoid) or 2 % (tanh).
        shift: Distance of a batch's mean from the running mean in running standard deviations (root mean square over
            the channels), as in `Thresholds`.
        ratio: How many times the running variance the batch's is, or the other way round; from there too.
        warm_up: Steps that running statistics have to come near those of the batches; with the usual momentum of 0.1
            0.5 % of what they began with is left after 50.
        rising: How far the loss rises above its lowest, as a share of that, and beyond its noise.
        spike: How many times the loss of the steps before it a loss is, to be a spike.
    """

    patience: int = int(default("few-samples", "patience"))
    dead: float = default("dead-channels", "dead_in_batch")
    few_values: int = int(default("dead-channels", "few_values"))
    dead_of_few: float = default("dead-channels", "dead_of_few")
    vanishing: float = default("vanishing-gradient", "vanishing")
    exploding: float = default("exploding-gradient", "exploding")
    too_large: float = default("update-too-large", "too_large")
    too_small: float = default("update-too-small", "too_small")
    flat: float = default("constant-output", "flat")
    smallest: float = default("vanishing-activations", "smallest")
    largest: float = default("exploding-activations", "largest")
    slope: float = default("saturated", "slope")
    shift: float = default("batchnorm-drift", "shift")
    ratio: float = default("batchnorm-drift", "ratio")
    warm_up: int = int(default("batchnorm-drift", "warm_up"))
    rising: float = default("loss-rises", "rising")
    spike: float = default("loss-spike", "spike")
