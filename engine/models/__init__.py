"""One small file per architecture: plain functions over a weights record, written against the `Kernels` protocol."""
