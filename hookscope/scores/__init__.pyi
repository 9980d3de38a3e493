from .boxes import BoxTarget as BoxTarget
from .categories import read_categories as read_categories
from .choice import Boxes as Boxes, Region as Region, TargetChoice as TargetChoice, parse_target as parse_target
from .difference import DifferenceTarget as DifferenceTarget
from .logits import (
    Prediction as Prediction,
    Score as Score,
    check_categories as check_categories,
    check_family as check_family,
    check_finite_score as check_finite_score,
    class_maps as class_maps,
    class_scores as class_scores,
    gives_boxes as gives_boxes,
    one_picture as one_picture,
    predict as predict,
    predictions as predictions,
    probabilities as probabilities,
    without_scores as without_scores,
)
from .losses import AnyLoss as AnyLoss, Loss as Loss, LossLike as LossLike, OwnLoss as OwnLoss, as_loss as as_loss
from .objective import (
    FunctionTarget as FunctionTarget,
    Objective as Objective,
    ScoreTarget as ScoreTarget,
    objectives as objectives,
)
from .region import RegionTarget as RegionTarget
from .similarity import SimilarityTarget as SimilarityTarget
from .target import Target as Target, class_label as class_label
