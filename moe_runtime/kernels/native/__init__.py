"""The C++ kernels of the CPU and the way to call them. Optional: moe_runtime.kernels.registry does without."""
