"""Where the ink of a digit lies: a model without weights, and the surgery that makes it fit for
TensorRT. Both are of configs/surgery.yaml.
"""
