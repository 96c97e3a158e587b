"""Our decoder in PyTorch: fixed buffers, so that a CUDA graph holds the making of one token.

    transformers' module --weights--> Network --decoder--> Decoder --generate_together--> answers

These modules import torch at the top: import them inside functions.
"""
