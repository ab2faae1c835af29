"""RDMA devices: which there are, what is wrong with them, and which of them connects two ranks. Runs without MLX."""
