"""From bytes to tensors and back, without a web framework: raw bytes, .npy, .npz, JSON, images, and
the Open Inference Protocol.
"""
