"""Codecs between bytes and tensors: raw bytes, .npy, .npz, JSON, images, Open Inference Protocol.

They use no web framework.
"""
