"""PyTorch: the user's module, its exports, and programs that can be delivered."""
