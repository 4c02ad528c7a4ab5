"""What the attention of a trained model does: dispersion, separation, sinks, per head, on any torch module."""
