"""Hostfiles: which hosts a job runs on, in the formats of MLX, Open MPI, MPICH and SLURM."""
