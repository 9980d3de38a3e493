"""See inside a vision model: hooks on every layer, activations as pictures and numbers."""
