"""A small residual CNN on handwritten digits: the model of configs/digits.yaml."""
