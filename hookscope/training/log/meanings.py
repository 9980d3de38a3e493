"""What each finding on a training run means, and what people do about it. Needs no torch."""

from __future__ import annotations

MEANINGS = {
    "non-finite": "From here on nothing is learned. Keep the operation from its edge (sqrt, log or a division at 0),"
    " and look at the learning rate, the inputs and the loss scale.",
    "loss-rises": "The run is worse off than it was: lower the learning rate, warm it up, clip the gradient's norm, and"
    " go back to the weights of the lowest loss.",
    "loss-spike": "A single batch or a step too far: look at what was in that batch, and clip the gradient's norm.",
    "dead-layer": "Nothing gets through it, and behind a ReLU no gradient wakes it: look at the bias and the weights"
    " before it, lower the learning rate, or use a leaky ReLU.",
    "dead-channels": "Behind a ReLU no gradient wakes them: lower the learning rate, warm it up, normalise before it or"
    " use a leaky ReLU; of a layer without positions a small batch proves little.",
    "constant-output": "Nothing of the input gets through: look for zeroed or equal weights, a dead layer or a wrong"
    " input range before it.",
    "exploding-activations": "Half precision ends at 65504 and makes Inf of larger values: lower the learning rate,"
    " normalise before this layer or scale the initialisation down.",
    "vanishing-activations": "Signals this small carry next to no gradient, and half precision rounds them away: add"
    " normalisation or residual connections, or scale the initialisation up.",
    "saturated": "At its bounds a function passes no gradient: normalise its input, scale down the weights before it,"
    " or use an unbounded function.",
    "exploding-gradient": "A step along it overturns the weights: clip the norm, lower the learning rate, normalise"
    " before this layer or scale the initialisation down.",
    "vanishing-gradient": "A step hardly changes these weights: normalisation, residual connections, other activation"
    " functions than sigmoid and tanh, or another initialisation keep gradients up on their way back.",
    "no-gradient": "It does not learn: look for a detach, a no_grad or an operation that is not differentiable after"
    " it, for an output that the loss does not use, and for a dead layer after it.",
    "no-update": "It does not learn although it could: give its parameters to the optimizer, and look at the rate of"
    " its parameter group.",
    "update-too-large": "About a thousandth is usual; steps this long throw away what was learned: lower the learning"
    " rate, or warm it up.",
    "update-too-small": "About a thousandth is usual; at this rate the run learns next to nothing: raise the learning"
    " rate, and look at the schedule.",
    "batchnorm-drift": "In eval mode the layer computes with other statistics than it learns with: look at its"
    " momentum, at batches that are small or of different kinds, and at a learning rate that moves what comes before it"
    " too fast.",
    "frozen": "Right where one means to fine-tune the rest; else set requires_grad before the optimizer is made.",
    "few-samples": "Most findings are told where a few sampled steps in a row show them, of fewer where all do: that"
    " there are no others does not mean that the run is sound.",
    "watcher-failed": "The log ends here; the training went on unwatched.",
}
"""By name."""

TO_KNOW_THE_OPERATION = " To have the operation named: watch --stop-on non-finite."
"""What more is to be done about values that are not finite, in a run that was not stopped at them."""
