"""Our decoder in PyTorch behind `StepEngine`: answers in slots, tokens drawn on the device.

These modules import torch at the top: import them inside functions.
"""
