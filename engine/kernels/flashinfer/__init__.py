"""CUDA by flashinfer: paged attention, the gated delta rule, norms, rope, activations and sampling."""
