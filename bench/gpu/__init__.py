"""What needs a CUDA machine: one check that is right everywhere, and the build of the modules that it would load."""
