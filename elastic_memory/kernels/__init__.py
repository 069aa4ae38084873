"""Hand-written Triton kernels: faster roads to numbers that plain torch code gives too."""
