"""What kernels of several rooms share: lanes, rows, lists, scales, the matmul."""
