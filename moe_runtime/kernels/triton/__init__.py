"""GPU kernels in Triton: grouped expert products in every weight format, quantized linear layers, paged attention.

Read in this order: sort.py (picks by expert), decode.py (stored numbers to plain ones), grouped_gemm.py, experts.py (a
whole layer), bank.py and linear.py (what the nodes use), attention.py; tiles.py and tune.py choose tile sizes, and
compile.py translates every kernel for a target that is not at hand.
"""
