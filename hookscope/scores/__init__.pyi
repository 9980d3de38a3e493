from .logits import (
    FIND_NON_FINITE as FIND_NON_FINITE,
    Prediction as Prediction,
    Score as Score,
    check_categories as check_categories,
    check_family as check_family,
    check_finite_score as check_finite_score,
    class_at as class_at,
    class_maps as class_maps,
    class_scores as class_scores,
    gives_boxes as gives_boxes,
    is_distribution as is_distribution,
    one_picture as one_picture,
    predict as predict,
    predictions as predictions,
    probabilities as probabilities,
    without_scores as without_scores,
)
from .objective import (
    AnyLoss as AnyLoss,
    Loss as Loss,
    LossLike as LossLike,
    Objective as Objective,
    OwnLoss as OwnLoss,
    ScoreTarget as ScoreTarget,
    as_loss as as_loss,
    objectives as objectives,
)
from .score_targets import (
    BoxTarget as BoxTarget,
    DifferenceTarget as DifferenceTarget,
    RegionTarget as RegionTarget,
    SimilarityTarget as SimilarityTarget,
    target_for as target_for,
)
from .target import (
    Boxes as Boxes,
    Region as Region,
    Target as Target,
    TargetChoice as TargetChoice,
    class_label as class_label,
    parse_target as parse_target,
    read_categories as read_categories,
)
