"""One device that runs the model."""
