"""The public name of a surgery that plans may give: `simplify.surgery:
pipeline.folding:fold_strides`.
"""

from pipeline.onnx_graph.space_to_depth import fold_strides

__all__ = ["fold_strides"]
