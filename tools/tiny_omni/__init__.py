"""The shape world and the training and evaluation code of the built-in model `tiny-omni`."""
