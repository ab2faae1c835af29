"""`mlxdist launch`: starts the ranks of a job, supervises them, and leaves nothing behind.

run.py takes a job from its start to its end. It starts the ranks by local.py on this machine, or by hosts.py on
several: there each host has an agent.py, which remote.py speaks to over a connection of mlxdist.cluster.ssh.
supervisor.py decides how the job ends, output.py shows what the ranks print, standard_input.py gives them what they
read, reaper.py cleans up after them, and jobs.py shows other commands which jobs run.

It runs without MLX, NumPy and the engine, for a fast start. The only compiled file that it uses is the MPI shim.
"""
