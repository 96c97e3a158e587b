"""The metric of a plan: its checks, and its assembly from a decoder and a score."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pipeline.accuracy.metrics import decoders, f1, ranks
from pipeline.accuracy.metrics.detection import mean_average_precision
from pipeline.accuracy.metrics.libraries import check_libraries
from pipeline.accuracy.metrics.metric import Decode, Metric, as_they_are
from pipeline.accuracy.metrics.per_sample import agreement, cosine, top_k
from pipeline.accuracy.metrics.perplexity import perplexity
from pipeline.accuracy.metrics.user import decoder_of_function, load_function, metric_of_function
from pipeline.accuracy.metrics.word_errors import word_error_rate
from pipeline.core.shapes import TensorSpec
from pipeline.data.label_file import LabelKind
from pipeline.data.samples import SampleSet
from pipeline.errors import DataError, PlanError
from pipeline.plan.schema import AccuracyConfig
from pipeline.plan.sections.accuracy import TOP_K, is_built_in, needs_labels
from pipeline.postprocess import IndexOutput

KIND_OF: dict[str, LabelKind] = {"map": "boxes", "wer": "texts"}
"""What the labels of a metric must be; of all others, numbers."""

GIVE: dict[LabelKind, str] = {
    "numbers": "add an array `labels` to each .npz, or name a .jsonl file in `data.labels`",
    "texts": 'name a .jsonl file with a line {"text": "..."} per sample in `data.labels`',
    "boxes": "name a .json file in the format of COCO in `data.labels`",
}


def metric_from_plan(
    options: AccuracyConfig,
    output: str,
    samples: SampleSet,
    indices: Sequence[IndexOutput] = (),
) -> Metric:
    """Return the metric of the plan, which reads `output`. `indices`: the outputs of indices.

    PlanError if the metric or its decoder does not exist. DataError if it needs labels and there
    are none, or others.
    """
    index = next((each for each in indices if each.name == output), None)
    check_labels(options, samples.label_kind)
    name = _name(options, samples, index)
    if not is_built_in(name):
        function = load_function(name, "accuracy.metric", options.python_path)
        return metric_of_function(name, function)
    if match := TOP_K.fullmatch(name):
        return top_k(name, int(match["k"]), index)
    if name == "agreement":
        assert index is not None, "check_metric refuses other outputs"
        return agreement(index)
    classes = samples.label_file.classes if samples.label_file else ()
    return _of_set(name, _decode(options, index), options.decoder, classes, index)


def _name(options: AccuracyConfig, samples: SampleSet, index: IndexOutput | None) -> str:
    """Return the name of the metric. PlanError if `auto` chooses one without classes to judge."""
    if options.metric != "auto":
        return options.metric
    if samples.has_labels:
        return "top1"
    name = "agreement" if index else "cosine"
    if options.max_class_drop is not None:
        raise PlanError(
            f"accuracy.max_class_drop is given, and without labels the metric is {name}, which"
            " has no classes",
            "add an array `labels` to each .npz, or leave `max_class_drop` out",
        )
    return name


def _of_set(
    name: str,
    decode: Decode,
    decoder: str | None,
    classes: tuple[str, ...],
    index: IndexOutput | None,
) -> Metric:
    """Return a built-in metric by its name. `classes`: the names of the categories of boxes."""
    metrics: dict[str, Callable[[], Metric]] = {
        "cosine": cosine,
        "f1": lambda: f1.f1(decode, of_scores=index is None and decoder == "argmax"),
        "map": lambda: mean_average_precision(decode, classes),
        "wer": lambda: word_error_rate(decode),
        "spearman": lambda: ranks.spearman(decode),
        "sts": lambda: ranks.similarity(decode),
        "perplexity": perplexity,
    }
    return metrics[name]()


def _decode(options: AccuracyConfig, index: IndexOutput | None) -> Decode:
    match options.decoder:
        case None:
            return as_they_are
        case "argmax":
            return decoders.argmax(index)
        case "ctc_greedy":
            return decoders.ctc_greedy(options.tokens, index)
        case "boxes_xyxy":
            return decoders.boxes_xyxy
        case "mean_pool":
            return decoders.mean_pool
        case name:
            function = load_function(name, "accuracy.decode", options.python_path)
            return decoder_of_function(name, function)


def check_metric(
    options: AccuracyConfig,
    outputs: tuple[TensorSpec, ...],
    indices: tuple[IndexOutput, ...],
) -> None:
    """Raise PlanError for a built-in metric or a limit that its output cannot have."""
    of_indices = {each.name: each for each in indices}
    output, metric = options.output or outputs[0].name, options.metric
    index = of_indices.get(output)
    if index and metric in ("cosine", "map", "sts", "spearman", "perplexity"):
        raise PlanError(
            f"accuracy.metric is {metric}, and '{output}' holds indices, whose size means nothing",
            "set `accuracy.metric` to auto, top1, top5 or agreement, or `accuracy.output` to"
            " another output",
        )
    match = TOP_K.fullmatch(metric)
    if index and match and (index.top_k or 1) < int(match["k"]):
        raise PlanError(
            f"accuracy.metric is {metric}, and '{output}' holds {index.top_k or 1} indices per"
            " place",
            f"set `postprocess.{index.source}.top_k` to {match['k']} or more, or"
            " `accuracy.metric: top1`",
        )
    if metric == "agreement" and not index:
        raise PlanError(
            f"accuracy.metric is agreement, and '{output}' holds no indices of `postprocess`;"
            f" outputs that do: {', '.join(of_indices) or 'none'}",
            "name one of these as `accuracy.output`, or set `accuracy.metric: cosine`",
        )
    for name, limits in options.per_output.items():
        given = limits.model_fields_set
        misfits = given - {"min_agreement"} if name in of_indices else given & {"min_agreement"}
        if misfits:
            kind = "indices" if name in of_indices else "no indices of `postprocess`"
            key = min(misfits)
            raise PlanError(
                f"accuracy.per_output.{name} has {key}, and '{name}' holds {kind}",
                "indices take `min_agreement` only, and other outputs every other threshold",
            )


def check_host(options: AccuracyConfig, inputs: Sequence[TensorSpec]) -> None:
    """Raise BackendUnavailable for a missing library of the metric, and PlanError for a mask that
    is none of the model's inputs.
    """
    check_libraries(options.metric)
    names = [spec.name for spec in inputs]
    if options.mask is not None and options.mask not in names:
        raise PlanError(
            f"accuracy.mask names '{options.mask}', which is no input; the model has"
            f" {', '.join(names)}",
            "name one of these",
        )


def check_labels(options: AccuracyConfig, kind: LabelKind | None, role: str = "") -> None:
    """Raise DataError unless the labels of the set, called `role`, are those of the metric.

    `kind`: what they are; None where the set has none.
    """
    named = f"{role} set" if role else "set"
    if needs_labels(options.metric):
        needed = KIND_OF.get(options.metric, "numbers")
        if kind is None:
            raise DataError(
                f"accuracy.metric is {options.metric}, but the {named} has no labels",
                f"{GIVE[needed]}, or set `accuracy.metric: cosine`",
            )
        if kind != needed:
            raise DataError(
                f"accuracy.metric is {options.metric}, which needs {needed} as labels, and those of"
                f" the {named} are {kind}",
                GIVE[needed],
            )
    if options.metric == "auto" and kind in ("texts", "boxes"):
        fitting = next(metric for metric, needed in KIND_OF.items() if needed == kind)
        raise DataError(
            f"the labels of the {named} are {kind}, and accuracy.metric is auto, which compares"
            " classes",
            f"set `accuracy.metric: {fitting}`, or another one",
        )
